"""The run's folder: whole files or none, one writer, and nothing twice after a resume."""

import json
import os
import subprocess
import sys
import textwrap
import threading
from functools import partial

import datasets
import pyarrow.parquet as pq
import pytest

from k3rl.chat import load_renderer
from k3rl.errors import UserError
from k3rl.store import ROLLOUT_SCHEMA, RunStore, rollout_row
from k3rl.types import Author, Channel, Problem, Segment, Trajectory

CONFIG = "kind: rl\nsteps: 3\nseed: 0\nray: {address: null}\nrollout: {groups: 2}\n"


def row(step: int, draw: int, sample: int) -> dict:
    return {"step": step, "problem_id": f"p{draw}", "draw": draw, "sample": sample, "fate": "trained"}


def test_a_run_goes_on_with_the_same_config_and_refuses_another(tmp_path):
    RunStore.create(tmp_path / "run", CONFIG).close()
    RunStore.create(tmp_path / "run", CONFIG.replace("steps: 3", "steps: 5")).close()
    RunStore.create(tmp_path / "run", CONFIG.replace("null", "auto").replace("steps: 3", "steps: 5")).close()
    with pytest.raises(UserError, match="'rollout.groups' was 2 and is 4"):
        RunStore.create(
            tmp_path / "run", CONFIG.replace("groups: 2", "groups: 4").replace("steps: 3", "steps: 5")
        )
    with pytest.raises(UserError, match="'steps' was 5 and is 3"):
        RunStore.create(tmp_path / "run", CONFIG)


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("one")
    with pytest.raises(UserError, match="exists and is not a run"):
        RunStore.create(tmp_path / "thesis", CONFIG)
    assert os.listdir(tmp_path / "thesis") == ["chapter.txt"]
    with pytest.raises(UserError, match="is not a run's folder"):
        RunStore.open(tmp_path / "nothing")


def test_one_writer_at_a_time_and_the_lock_of_a_killed_one_is_free(tmp_path):
    code = textwrap.dedent(f"""
        import os, sys
        from k3rl.store import RunStore
        store = RunStore.create({str(tmp_path / "run")!r}, {CONFIG!r})
        print("held", flush=True)
        sys.stdin.read()
    """)
    writer = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=f"another process \\(pid {writer.pid}\\) is writing this run"):
        RunStore.create(tmp_path / "run", CONFIG)
    writer.kill()
    writer.wait()
    RunStore.create(tmp_path / "run", CONFIG).close()


def test_resume_takes_back_what_came_after_the_checkpoint(tmp_path):
    store = RunStore.create(tmp_path / "run", CONFIG)
    for step in range(4):
        store.write_rollouts(step, [row(step, step, s) for s in range(2)])
        store.log_metrics(step, {"reward/mean": step / 2, "bad": float("nan")})
        with store.new_checkpoint(step, keep_last=2) as folder:
            (folder / "state").write_text(str(step))
    assert [p.name for p in store.checkpoints()] == ["step-000002", "step-000003"]
    store.truncate_after(2)
    assert store.latest_checkpoint().name == "step-000002"
    assert [p.name for p in store.rollout_files()] == [f"step-00000{i}.parquet" for i in range(3)]
    assert [m["step"] for m in store.metrics()] == [0, 1, 2]
    assert store.metrics()[1] == {"step": 1, "reward/mean": 0.5, "bad": None}


def test_a_checkpoint_that_was_not_finished_does_not_exist(tmp_path):
    store = RunStore.create(tmp_path / "run", CONFIG)

    def fill_the_disk():
        with store.new_checkpoint(0) as folder:
            (folder / "half").write_text("x")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fill_the_disk()
    assert store.latest_checkpoint() is None
    store.close()
    RunStore.create(tmp_path / "run", CONFIG).close()
    assert os.listdir(tmp_path / "run" / "checkpoints") == []


def test_a_metrics_line_cut_by_a_crash_is_dropped_not_glued_to_the_next(tmp_path):
    store = RunStore.create(tmp_path / "run", CONFIG)
    store.log_metrics(0, {"a": 1.0})
    with open(store.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 1, "a"')
    assert [m["step"] for m in store.metrics()] == [0]
    store.log_metrics(1, {"a": 2.0})
    lines = (store.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["a"] for line in lines] == [1.0, 2.0]


def test_the_datasets_library_reads_all_steps_with_one_schema(tmp_path):
    store = RunStore.create(tmp_path / "run", CONFIG)
    store.write_rollouts(0, [row(0, 0, 0)])
    store.write_rollouts(
        1, [{**row(1, 1, 0), "reward": 0.5, "logprobs": [-0.1, -0.2], "response_ids": [1, 2]}]
    )
    loaded = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "**/rollouts/*.parquet"), cache_dir=str(tmp_path / "cache")
    )["train"]
    assert loaded.num_rows == 2
    assert loaded[0]["logprobs"] is None or loaded[0]["logprobs"] == []
    assert loaded[1]["logprobs"] == pytest.approx([-0.1, -0.2])


def test_a_long_rollout_has_few_rows_beside_it_in_its_row_group(tmp_path):
    store = RunStore.create(tmp_path / "run", CONFIG)
    lengths = [10] * 1074 + [150_000] + [10] * 5 + [100_000] + [300_000, 10]
    rows = [{**row(0, i, 0), "response_ids": [7] * n, "logprobs": [-0.5] * n} for i, n in enumerate(lengths)]
    path = store.write_rollouts(0, rows)
    file = pq.ParquetFile(path).metadata
    groups = [file.row_group(i).num_rows for i in range(file.num_row_groups)]
    assert groups == [512, 512, 56, 1, 1, 1]
    table = pq.read_table(path)
    assert table.schema.remove_metadata() == ROLLOUT_SCHEMA
    assert table["draw"].to_pylist() == list(range(len(rows)))
    assert [len(ids) for ids in table["response_ids"].to_pylist()] == lengths
    assert pq.read_table(store.write_rollouts(1, [])).num_rows == 0


def test_numbers_of_sampled_tokens_stay_with_their_tokens():
    renderer = load_renderer("k3-nano")
    ids = renderer.encode_prompt([{"role": "user", "content": "four"}], [], None)[:4]
    t = Trajectory(problem_id="p", draw=0, sample=0, domain="d", effort=None, prompt_ids=ids)
    t.segments = [
        Segment(Author.MODEL, Channel.THINK, ids[:2], [-0.1, -0.2], 3),
        Segment(Author.ENVIRONMENT, Channel.OBSERVATION, ids[:1]),
        Segment(Author.MODEL, Channel.RESPONSE, ids[2:3], [-0.3], 5),
    ]
    t.trainer_logprobs = [-1.0, -2.0, -3.0]
    problem = Problem(id="p", domain="d", messages=[], reward={"name": "exact", "answer": "4"})
    made = partial(rollout_row, t, problem, "trained", step=6, version=6, renderer=renderer, thinking=True)
    found = made()
    assert found["sampled_mask"] == [True, True, False, True]
    assert found["channels"] == ["think", "think", "observation", "response"]
    assert found["logprobs"] == [-0.1, -0.2, None, -0.3]
    assert found["policy_versions"] == [3, 3, None, 5]
    assert found["trainer_logprobs"] == [-1.0, -2.0, None, -3.0]
    assert found["teacher_logprobs"] is None
    assert found["sampled_tokens"] == 3
    assert found["staleness_mean"] == pytest.approx((3 + 3 + 1) / 3)
    assert found["staleness_max"] == 3
    t.trainer_logprobs = [-1.0, -2.0]
    with pytest.raises(ValueError, match="2 values for 3 sampled tokens"):
        made()


def test_rollouts_written_beside_are_whole_before_their_checkpoint_is(tmp_path):
    store = RunStore.create(tmp_path / "run", CONFIG)
    go_on = threading.Event()

    def slow() -> list[dict]:
        go_on.wait(10)
        return [row(0, 0, 0)]

    store.write_rollouts_beside(0, slow)
    assert store.rollout_files() == []
    threading.Timer(0.2, go_on.set).start()
    with store.new_checkpoint(0) as folder:
        (folder / "model").write_text("weights")
        assert store.checkpoints() == []
    assert len(store.rollout_files()) == len(store.checkpoints()) == 1
    store.close()


def test_a_writer_that_fails_is_heard_of_and_hurts_nobody(tmp_path, caplog):
    store = RunStore.create(tmp_path / "run", CONFIG)
    store.write_rollouts_beside(0, lambda: [{"step": "no number"}])
    store.write_rollouts_beside(1, lambda: [row(1, 0, 0)])
    store.close()
    assert [p.name for p in store.rollout_files()] == ["step-000001.parquet"]
    assert "rollouts of a step were not written" in caplog.text
