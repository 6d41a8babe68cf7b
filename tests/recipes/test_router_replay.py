"""`record_routing` in whole runs: with replay the trainer takes the engine's experts on every token, without it the
disagreeing share is a metric."""

import json
import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from k3rl.config.load import validate
from k3rl.recipes.run import run_job

pytestmark = pytest.mark.slow

STEPS = 2


def job(folder: Path, replay: bool) -> dict:
    letters = folder / "letters.py"
    letters.write_text(
        "def letters(s):\n    return sum(c.isalpha() for c in s.reasoning + s.content) / 100\n"
    )
    return {
        "kind": "rl",
        "name": "run",
        "runs": str(folder),
        "model": {"path": "k3-nano", "overrides": {"num_hidden_layers": 2, "attn_res_block_size": 1}},
        "data": {"type": "callable", "function": "k3rl.data.tasks:keyboard_walk", "efforts": {"low": 1}},
        "steps": STEPS,
        "checkpoint_every": 1,
        "rollout": {
            "groups": 4,
            "samples": 2,
            "lambda": 0.5,
            "max_tokens": 24,
            "max_context": 128,
            "slice_s": 0.005,
            "engine": {"type": "native", "max_slots": 4, "record_routing": True},
        },
        "rewards": {"parts": [{"reward": f"{letters}:letters"}]},
        "trainer": {"optimizer": {"lr": 2.0e-3}, "minibatches": 2, "replay_routing": replay},
    }


def paused_in(run: Path) -> list[dict]:
    state = json.loads(max((run / "checkpoints").glob("step-*/rollout.json")).read_text())
    trajectories = [t for g in state["controller"]["groups"] for t in g["trajectories"]]
    return [t for t in trajectories if t["status"] == "paused" and t["segments"]]


@pytest.mark.parametrize("replay", [True, False])
def test_a_run_counts_where_trainer_and_engine_take_other_experts(tmp_path, replay):
    run = run_job(validate(job(tmp_path, replay), {}, "test"))
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [r for f in sorted((run / "rollouts").glob("*.parquet")) for r in pq.read_table(f).to_pylist()]
    assert len(metrics) == STEPS
    paused = paused_in(run)
    assert paused
    for t in paused:
        tokens = len(t["prompt_ids"]) + sum(len(ids) for _, _, ids, _, _ in t["segments"])
        assert t["routing"]["shape"][0] == tokens - 1
    found = []
    for m in metrics:
        trained = [r for r in rows if r["step"] == m["step"] and r["fate"] == "trained"]
        assert trained
        tokens = sum(len(r["prompt_ids"]) + len(r["response_ids"]) for r in trained)
        # Every token of what was trained on was compared, but each trajectory's newest, which no engine read.
        compared = m["moe/recorded_share"] * tokens
        assert math.isclose(compared, tokens - len(trained), rel_tol=1e-6)
        found.append(m["moe/replay_disagreement"])
        print(
            f"step {m['step']}: {compared:.0f} of {tokens} tokens compared, {found[-1]:.4f} with other experts"
        )
    if replay:
        assert found == [0.0] * STEPS
    else:
        assert max(found) > 0.01
