"""Whole jobs: a teacher's server that goes away in the middle of a run; collecting what teachers write, and SFT on
it."""

import json
import threading
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from teacher_server import TeacherServer

from k3rl.chat import load_renderer
from k3rl.config.load import load_job, validate
from k3rl.errors import RunError, UserError
from k3rl.models import ModelConfig, build_model, save_model
from k3rl.recipes.distill_cli import collect
from k3rl.recipes.run import run_job

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    overrides = {"num_hidden_layers": 2, "attn_res_block_size": 1}
    for seed in range(3):
        save_model(
            build_model(ModelConfig(overrides=overrides), seed=seed), folder / str(seed), "k3rl/chat/nano"
        )
    return [str(folder / str(seed)) for seed in range(3)]


def job(models, folder, url, steps):
    walk = {"type": "callable", "function": "k3rl.data.tasks:keyboard_walk", "efforts": {"low": 1, "max": 1}}
    remote = {"url": url, "attempts": 6, "backoff_s": 0.2, "timeout_s": 10.0}
    plain = {
        "kind": "distill",
        "name": "run",
        "runs": str(folder),
        "model": {"path": models[0]},
        "teachers": [
            {"name": "far", "model": {"path": models[1]}, "remote": remote, "domains": ["general"]},
            {"name": "near", "model": {"path": models[2]}},
        ],
        "data": {
            "type": "mix",
            "sources": [walk, {**walk, "arguments": {"domain": "agent", "ring": "alphabet"}}],
        },
        "steps": steps,
        "rollout": {"groups": 8, "samples": 2, "max_context": 96, "max_tokens": 24},
        "token_rewards": {"largest_gaps": 3},
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(plain))
    return load_job(path)


def test_a_run_outlives_its_teachers_server(models, tmp_path):
    server = TeacherServer(ModelConfig(path=models[1]))
    try:
        gone = threading.Thread(target=away, args=(server, 12, 1.0))
        gone.start()
        run = run_job(job(models, tmp_path, server.url, 3))
        gone.join()
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [r["step"] for r in rows] == [0, 1, 2]
        assert rows[-1]["teacher/retries"] > 0
        assert {"teacher/kl/teacher/far", "teacher/kl/teacher/near", "teacher/kl/cell/agent.max"} <= rows[
            -1
        ].keys()
        assert rows[0]["teacher/disagreement"] > 0
        gaps = [json.loads(line) for line in (run / "gaps.jsonl").read_text().splitlines()]
        assert [g["step"] for g in gaps] == [0] * 3 + [1] * 3 + [2] * 3

        server.stop()
        with pytest.raises(UserError, match="teacher 'far': .* did not answer in 6 tries"):
            run_job(job(models, tmp_path, server.url, 5))
        server.start()
        gone = threading.Thread(target=away, args=(server, server.answered + 6, 30.0))
        gone.start()
        with pytest.raises(
            RunError, match=r"teacher 'far': .* start it again and run the same command to go on"
        ):
            run_job(job(models, tmp_path, server.url, 5))
        gone.join()
        run = run_job(job(models, tmp_path, server.url, 5))
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [r["step"] for r in rows] == [0, 1, 2, 3, 4]
    finally:
        server.stop()


def away(server: TeacherServer, after: int, seconds: float) -> None:
    """Stop the server once it has answered so often, and start it again."""
    while server.answered < after:
        time.sleep(0.005)
    server.stop()
    time.sleep(seconds)
    server.start()


def test_what_teachers_wrote_is_collected_and_learnt_from(models, tmp_path, capsys):
    """`k3rl distill collect` on a distill config with a teacher that reads no effort message; then SFT on its rows."""
    path = tmp_path / "job.yaml"
    job(models, tmp_path, "http://127.0.0.1:9/v1", 1)
    plain = yaml.safe_load(path.read_text())
    plain["teachers"] = [
        {"name": "blind", "model": {"path": models[1]}, "prompt_effort": "none", "domains": ["general"]},
        {"name": "near", "model": {"path": models[2]}},
    ]
    path.write_text(yaml.safe_dump(plain))
    collect(path, [], problems=6, samples=2)
    run = Path(capsys.readouterr().out.strip().splitlines()[-1])
    rows = pq.read_table(run / "rollouts/step-000000.parquet").to_pylist()
    assert len(rows) == 12
    assert {row["domain"] for row in rows} == {"general", "agent"}
    renderer = load_renderer("k3-nano")
    for row in rows:  # the student's prompt asks for the effort, whatever the teacher read
        assert row["prompt_ids"] == renderer.encode_prompt(
            json.loads(row["messages_json"]), (), row["effort"]
        )
    whole = [r for r in rows if r["status"] == "complete"]
    data = {"type": "rollouts", "path": str(run)}
    sft = {"kind": "sft", "name": "sft", "runs": str(tmp_path), "model": {"path": models[0]}, "data": data}
    if not whole:
        with pytest.raises(UserError, match="no trajectory"):
            run_job(validate({**sft, "steps": 2, "batch_size": 4}, {}, "test"))
        return
    trained = run_job(validate({**sft, "steps": 2, "batch_size": len(whole)}, {}, "test"))
    first = json.loads((trained / "metrics.jsonl").read_text().splitlines()[0])
    assert first["train/trained_tokens"] == sum(sum(row["sampled_mask"]) for row in whole)


def test_a_remote_teacher_cannot_be_collected_from(models, tmp_path):
    job(models, tmp_path, "http://127.0.0.1:9/v1", 1)
    with pytest.raises(UserError, match="teachers: 'far' is remote, and a server only scores"):
        collect(tmp_path / "job.yaml", [], problems=6, samples=2)
