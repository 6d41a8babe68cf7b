"""A whole run whose reward misbehaves: it goes on, marks what was not scored, and the books balance."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest

from k3rl.config.load import load_job
from k3rl.recipes.run import run_job

REWARD = """
import os, time
from rewards import Scored, reward

@reward()
def moody(scored: Scored) -> float:
    sample, draw = scored.trajectory.sample, scored.trajectory.draw
    if draw % 4 == 1 and sample == 0:
        while True:
            pass
    if draw % 4 == 2 and sample == 1:
        os.abort()
    if draw % 4 == 3 and sample == 2:
        return float("nan")
    return float(sample)
"""

CONFIG = """
kind: rl
name: hostile
runs: {folder}
model: {{path: k3-nano}}
data: {{type: callable, function: "k3rl.data.tasks:keyboard_walk", arguments: {{part: train}}}}
steps: 2
rollout: {{groups: 8, samples: 3, max_context: 96, max_tokens: 12, engine: {{type: native, max_slots: 24}}}}
rewards:
  parts: [{{reward: "{file}:moody"}}]
  timeout_s: 1.0
  retries: 0
  on_error: {on_error}
"""


@pytest.mark.slow
@pytest.mark.parametrize("on_error", ["drop_group", "zero"])
def test_a_run_goes_on_whatever_its_reward_does(tmp_path, on_error):
    file = tmp_path / "moody.py"
    file.write_text(REWARD)
    config = tmp_path / "hostile.yaml"
    config.write_text(CONFIG.format(folder=tmp_path, file=file, on_error=on_error))
    run = run_job(load_job(config))
    assert json.loads((run / "status.json").read_text())["steps_done"] == 2
    rows = [row for path in sorted(run.glob("rollouts/*.parquet")) for row in pq.read_table(path).to_pylist()]
    failures = {(1, 0): "timed_out", (2, 1): "grader_failed", (3, 2): "grader_failed"}
    seen = set()
    for row in rows:
        kind = (row["draw"] % 4, row["sample"])
        expected = failures.get(kind, "scored")
        assert row["reward_outcome"] == expected
        bad_group = row["draw"] % 4 != 0
        if on_error == "drop_group":
            assert row["reward"] == (None if expected != "scored" else float(row["sample"]))
            assert row["fate"].startswith("dropped:reward:") is bad_group
        else:
            assert row["reward"] == (0.0 if expected != "scored" else float(row["sample"]))
            assert not row["fate"].startswith("dropped:reward:")
        seen.add(kind)
    assert set(failures) <= seen
