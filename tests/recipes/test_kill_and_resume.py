"""`kill -9` of a whole run at any moment, then the same command: every trajectory is in the store once, the books
balance, and the result is the one of a run that nobody killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from safetensors.torch import load_file

JOB = {
    "kind": "rl",
    "name": "run",
    "model": {"path": "k3-nano", "overrides": {"num_hidden_layers": 2, "attn_res_block_size": 1}},
    "data": {
        "type": "callable",
        "function": "k3rl.data.tasks:keyboard_walk",
        "efforts": {"low": 1, "high": 1, "max": 1},
    },
    "steps": 4,
    "rollout": {
        "groups": 4,
        "samples": 2,
        "lambda": 0.5,
        "max_tokens": 24,
        "max_context": 128,
        "engine": {"type": "native", "max_slots": 4, "deterministic": True},
    },
    "trainer": {"optimizer": {"lr": 1.0e-3}, "deterministic": True},
    "colocation": "turns",
}


def start(folder: Path) -> subprocess.Popen:
    """`k3rl run` in a process group of its own."""
    job = {**JOB, "runs": str(folder), "rewards": {"parts": [{"reward": f"{folder / 'letters.py'}:letters"}]}}
    (folder / "letters.py").write_text(
        "def letters(s):\n"
        "    text = s.reasoning + s.content\n"
        "    return sum(c.isalpha() for c in text) / (1 + len(text))\n"
    )
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return subprocess.Popen(
        [sys.executable, "-m", "k3rl.cli", "run", str(folder / "job.yaml")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def finish(folder: Path) -> str:
    process = start(folder)
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    return output


def kill_after(folder: Path, seconds: float) -> None:
    process = start(folder)
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def check_books(run: Path, steps: int) -> list[tuple]:
    """Nothing lost, nothing twice. Returns what was trained on, in order."""
    rows = [
        r for file in sorted((run / "rollouts").glob("*.parquet")) for r in pq.read_table(file).to_pylist()
    ]
    seen = Counter((r["draw"], r["sample"]) for r in rows)
    assert max(seen.values()) == 1
    ledger = json.loads((run / "ledger.json").read_text())
    draws = {r["draw"] for r in rows}
    still_open = {draw for draw, _ in ledger["open"]}
    assert draws | still_open == set(range(ledger["next_draw"]))
    assert not draws & still_open
    assert ledger["trained"] + sum(ledger["dropped"].values()) == len(draws)
    assert all(seen[draw, sample] for draw in draws for sample in range(JOB["rollout"]["samples"]))
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == list(range(steps))
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    return [
        (r["step"], r["draw"], r["sample"], tuple(r["response_ids"]), r["reward"], r["fate"]) for r in rows
    ]


def final_weights(run: Path) -> dict:
    return load_file(run / f"checkpoints/step-{JOB['steps'] - 1:06d}/trainer/model/model.safetensors")


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_like_one_that_was_not(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    began = time.monotonic()
    finish(whole)
    length = time.monotonic() - began
    rng = random.Random(seed := random.randrange(1000))
    print(f"seed {seed}, an unbroken run takes {length:.1f} s")
    for _ in range(5):
        kill_after(broken, rng.uniform(0.4, 1.0) * length)
    finish(broken)
    assert check_books(broken / "run", JOB["steps"]) == check_books(whole / "run", JOB["steps"])
    ours, theirs = final_weights(broken / "run"), final_weights(whole / "run")
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)
