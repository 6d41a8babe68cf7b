"""configs/agent_nano.yaml as it stands, killed in the middle: the reward rises, trajectories span steps and the kill,
and every file that one reads holds what its problem put there."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean

import pyarrow.parquet as pq
import pytest

from k3rl.data.shell_lookup import shell_lookup

ROOT = Path(__file__).parents[2]
KILLED_AFTER = 4  # steps of reinforcement learning
READ = re.compile(
    r'key="command" type="string"<\|sep\|>cat (\w)<\|close\|>argument.*?message role="tool" tool="bash" '
    r'index="1"<\|sep\|>(.*?)<\|close\|>message',
    re.S,
)


def start(runs: Path, log: Path) -> subprocess.Popen[bytes]:
    """`k3rl run` in a process group of its own."""
    command = [sys.executable, "-m", "k3rl.cli", "run", "configs/agent_nano.yaml", f"runs={runs}"]
    with open(log, "ab") as file:
        return subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True, env=dict(os.environ)
        )


def metrics_of(run: Path) -> list[dict[str, float]]:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def kill_after(process: subprocess.Popen[bytes], run: Path, steps: int) -> None:
    while len(metrics_of(run)) < steps:
        assert process.poll() is None, "it ended before"
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def trajectories(run: Path) -> list[dict]:
    return [r for f in sorted((run / "rollouts").glob("*.parquet")) for r in pq.read_table(f).to_pylist()]


def paused_with_snapshots(run: Path) -> list[dict]:
    newest = max((run / "checkpoints").glob("step-*/rollout.json"))
    groups = json.loads(newest.read_text())["controller"]["groups"]
    paused = [t for g in groups for t in g["trajectories"] if t["status"] == "paused"]
    return [t for t in paused if (t["sandbox"] or {}).get("snapshot")]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_an_agent_learns_through_a_kill_in_the_middle(tmp_path):
    run, log = tmp_path / "agent_nano" / "rl", tmp_path / "log"
    kill_after(start(tmp_path, log), run, KILLED_AFTER)
    rested = paused_with_snapshots(run)
    assert rested
    second = start(tmp_path, log)
    assert second.wait(3000) == 0, log.read_text()[-2000:]

    steps = metrics_of(run)
    assert [int(m["step"]) for m in steps] == list(range(len(steps)))
    rewards = [m["reward/mean"] for m in steps]
    print("reward by step:", " ".join(f"{r:.2f}" for r in rewards))
    assert fmean(rewards[-3:]) > fmean(rewards[:3]) + 0.2
    assert all(m["sandbox/lost"] == 0 for m in steps)
    assert steps[-1]["sandbox/recovered"] > 0
    assert 0.3 < steps[-1]["sandbox/pause_share"] < 1

    rows = trajectories(run)
    assert len({(r["draw"], r["sample"]) for r in rows}) == len(rows)
    assert sum(r["status"] == "failed" for r in rows) == 0
    spanning = [r for r in rows if r["finished_step"] > r["started_step"] and r["turns"] > 1]
    assert len(spanning) > 20
    through = {f"{t['draw']}.{t['sample']}" for t in rested}
    assert through <= {f"{r['draw']}.{r['sample']}" for r in rows}
    files = {p.id: p.metadata["task"]["files"] for p in shell_lookup(size=2000, level=2, terse=True)}
    seen = 0
    for row in rows:
        for name, said in READ.findall(row["response_text"]):
            if name in files[row["problem_id"]]:
                assert said + "\n" == files[row["problem_id"]][name], row["response_text"]
                seen += 1
    assert seen > 300
    assert not list((run / "sandboxes" / "snapshots").iterdir())
    assert not list((run / "sandboxes" / "live").iterdir())
