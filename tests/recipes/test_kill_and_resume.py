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
    "steps": 8,
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

PHASES = ("rollout", "reward", "train", "publish", "checkpoint")
KILLS = 20
LATER = 6
"""Kills that wait for the phase's second turn, so that the run gets on by a step."""
# The job, with a line in a file whenever a phase begins: kills are aimed by it.
AIMED = """
import sys
from contextlib import contextmanager
from k3rl import cli
from k3rl.tracking.progress import Progress

phase, path = Progress.phase, sys.argv.pop()

@contextmanager
def told(self, name):
    with open(path, "a") as file:
        print(name, file=file)
    with phase(self, name):
        yield

Progress.phase = told
cli.main()
"""


def start(folder: Path) -> subprocess.Popen:
    """`k3rl run` in a process group of its own."""
    job = {**JOB, "runs": str(folder), "rewards": {"parts": [{"reward": f"{folder / 'letters.py'}:letters"}]}}
    (folder / "letters.py").write_text(
        "def letters(s):\n"
        "    text = s.reasoning + s.content\n"
        "    return sum(c.isalpha() for c in text) / (1 + len(text))\n"
    )
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    (folder / "phases").write_text("")
    return subprocess.Popen(
        [sys.executable, "-c", AIMED, "run", str(folder / "job.yaml"), str(folder / "phases")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def finish(folder: Path) -> str:
    process = start(folder)
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output
    return output


def kill_in(folder: Path, phase: str, turn: int, delay_s: float) -> str:
    """SIGKILL so long after the phase begins for the turn-th time. Returns the phase that it was by then."""
    process = start(folder)
    end_s = time.monotonic() + 600
    while (folder / "phases").read_text().split().count(phase) < turn:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end_s, f"'{phase}' did not begin"
        time.sleep(0.002)
    time.sleep(delay_s)
    died_in = (folder / "phases").read_text().split()[-1]
    assert process.poll() is None, "the run ended before it was killed"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    return died_in


def rollouts(run: Path) -> list[dict]:
    """All that the store holds of every trajectory, but measured times."""
    rows = [
        r for file in sorted((run / "rollouts").glob("*.parquet")) for r in pq.read_table(file).to_pylist()
    ]
    return [{name: v for name, v in row.items() if name != "timings_json"} for row in rows]


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


def final_state(run: Path) -> dict:
    """Weights, moments and whatever else the last checkpoint has in tensors, by file and name."""
    folder = run / f"checkpoints/step-{JOB['steps'] - 1:06d}/trainer"
    files = sorted(folder.rglob("*.safetensors"))
    assert {f.parent.name for f in files} >= {"model", "state"}
    return {(f.relative_to(folder), n): t for f in files for n, t in load_file(f).items()}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_killed_at_random_moments_of_every_phase_ends_like_one_that_was_not(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    began = time.monotonic()
    finish(whole)
    metrics = [json.loads(line) for line in (whole / "run" / "metrics.jsonl").read_text().splitlines()]
    rng = random.Random(seed := random.randrange(1000))
    print(f"seed {seed}, an unbroken run takes {time.monotonic() - began:.1f} s")
    aims = list(PHASES) * (KILLS // len(PHASES))
    rng.shuffle(aims)
    later = set(rng.sample(range(KILLS), LATER))
    died: Counter[str] = Counter()
    for i, phase in enumerate(aims):
        takes_s = min(m[f"time/{phase}_s"] for m in metrics)
        died[kill_in(broken, phase, 2 if i in later else 1, rng.uniform(0, takes_s))] += 1
        done = len((broken / "run" / "metrics.jsonl").read_text().splitlines()) if i in later else "-"
        print(f"kill {i + 1}, aimed at {phase}: {dict(died)}, steps done {done}", flush=True)
    finish(broken)
    print(f"{KILLS} kills and the end: {time.monotonic() - began:.0f} s, by phase {dict(died)}")
    assert set(PHASES) <= set(died)
    assert check_books(broken / "run", JOB["steps"]) == check_books(whole / "run", JOB["steps"])
    assert rollouts(broken / "run") == rollouts(whole / "run")
    ours, theirs = final_state(broken / "run"), final_state(whole / "run")
    assert ours.keys() == theirs.keys()
    assert any("exp_avg" in name for _, name in ours)
    assert all(ours[name].equal(theirs[name]) for name in ours)
