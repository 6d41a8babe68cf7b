"""`k3rl profile`: numbers of a run whose times are known, and a trace that a viewer can lay out."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from k3rl.cli import app
from k3rl.errors import UserError
from k3rl.profile import increases, profile, runs_in, write_trace
from k3rl.store import RunStore

CONFIG = {"kind": "rl", "rollout": {"workers": 2, "mode": "partial"}, "trainer": {"parallel": {"ranks": 2}}}


def make_run(folder: Path, rows: list[dict[str, float]]) -> Path:
    store = RunStore.create(folder, yaml.safe_dump(CONFIG))
    for step, row in enumerate(rows):
        store.log_metrics(step, row)
    with store.new_checkpoint(len(rows)) as checkpoint:
        (checkpoint / "model").write_bytes(b"x" * 1000)
    store.close()
    return folder


def step(busy: tuple[float, float], rollout: float = 4.0, train: float = 5.0) -> dict[str, float]:
    return {
        "time/rollout_s": rollout, "time/train_s": train, "time/publish_s": 1.0,
        "time/step_s": rollout + train + 1.0, "train/seconds_s": train - 0.5, "weights/bytes": 100.0,
        "weights/load_seconds_s": 0.25, "rollout/busy_s": sum(busy), "rollout/busy_s/worker/0": busy[0],
        "rollout/busy_s/worker/1": busy[1], "rollout/tokens_per_s": 7.0,
    }  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three steps of 10 s; before the third the process began anew, so its counters did too."""
    return make_run(tmp_path / "run", [step((3.0, 1.0)), step((6.0, 2.0)), step((3.5, 1.0))])


def test_counters_of_a_resumed_run_begin_anew():
    rows = [{"c": 2.0}, {"c": 5.0}, {"c": 1.0}, {}, {"c": 4.0}]
    assert increases(rows, "c") == [2.0, 3.0, 1.0, 0.0, 4.0]


def test_phases_idle_shares_overhead_and_bytes(run: Path):
    p = profile(run)
    assert (p.steps, p.seconds_s) == (3, 30.0)
    assert list(p.phases_s.items()) == [("rollout", 12.0), ("train", 15.0), ("publish", 3.0)]
    idle = {w.name.strip(): (w.count, pytest.approx(w.idle)) for w in p.workers}
    assert idle == {
        "rollout workers": (2, 1 - 12.5 / 60),
        "rollout worker 0": (1, 1 - 9.5 / 30),
        "rollout worker 1": (1, 1 - 3.0 / 30),
        "trainer ranks": (2, 1 - 13.5 / 30),
    }
    assert p.overhead_s == pytest.approx({"rollout": 12 - 9.5, "train": 1.5, "publish": 3 - 0.75})
    assert p.moved_bytes == {
        "weights published, to all engines": 600,
        "checkpoints on disk, those kept": 1000,
    }


def test_the_trace_lays_steps_out_one_after_another(run: Path, tmp_path: Path):
    events = json.loads(write_trace(run, tmp_path / "trace.json").read_text())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    for track in {(e["pid"], e["tid"]) for e in slices}:
        mine = sorted((e["ts"], e["dur"]) for e in slices if (e["pid"], e["tid"]) == track)
        assert all(a + length <= b + 1e-6 for (a, length), (b, _) in pairwise(mine))
    phases = [e for e in slices if (e["pid"], e["tid"]) == (1, 1)]
    assert [e["name"] for e in phases] == ["rollout", "train", "publish"] * 3
    assert sum(e["dur"] for e in phases) == pytest.approx(30e6)
    generating = [e["dur"] / 1e6 for e in slices if e["pid"] == 2 and e["tid"] == 0]
    assert generating == pytest.approx([3.0, 3.0, 3.5])
    assert {e["name"] for e in events if e["ph"] == "C"} == {"rollout/tokens_per_s"}


def test_the_command_prints_tables_numbers_and_says_what_is_wrong(run: Path, tmp_path: Path):
    said = CliRunner().invoke(app, ["profile", str(run)])
    assert said.exit_code == 0
    assert "3 steps, 30.0 s, 10.00 s a step" in said.output
    numbers = json.loads(CliRunner().invoke(app, ["profile", str(run), "--json"]).stdout)
    assert numbers[0]["phases_s"]["train"] == 15.0
    with pytest.raises(UserError, match=r"no run with a metrics\.jsonl"):
        runs_in(tmp_path / "nothing")
    empty = make_run(tmp_path / "empty", [])
    (empty / "metrics.jsonl").touch()
    with pytest.raises(UserError, match="no step has finished"):
        profile(empty)
    make_run(tmp_path / "other", [step((1.0, 1.0))])
    both = CliRunner().invoke(app, ["profile", str(tmp_path), "--trace", str(tmp_path / "t.json")])
    assert isinstance(both.exception, UserError)
