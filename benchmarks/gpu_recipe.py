"""A pipeline of `k3rl run` on this machine, and where its seconds and bytes went: one set of rows per job.

    python benchmarks/gpu_recipe.py configs/k3_mini_gpu.yaml --out benchmarks/results/k3_mini_gpu.h200.json
    python benchmarks/gpu_recipe.py configs/qwen3_shape_gpu.yaml --out benchmarks/results/qwen3_shape_gpu.h200.json
    python benchmarks/gpu_recipe.py configs/quickstart.yaml device=cuda --out benchmarks/results/quickstart.h200.json

A run that is there already is gone on with, as always; rows cover all its steps but the first two of a job, in which
kernels are compiled.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import yaml

sys.path.append(sys.path.pop(0))  # this folder has a rewards.py too
from harness import Result

WARM_UP = 2
SHOWN = {
    "rollout/tokens_per_s": "tokens/s",
    "train/tokens_per_s": "tokens/s",
    "weights/load_seconds_s": "s",
    "weights/canary_gap": "nats",
    "memory/rollout_gib": "GiB",
    "memory/train_gib": "GiB",
    "memory/publish_gib": "GiB",
    "qat/relative_error": "relative",
}


def job_rows(result: Result, name: str, folder: Path) -> None:
    """Means over a job's steps; reward at its beginning and end."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    result.row(f"{name}: steps", len(steps), "steps")
    warm = steps[WARM_UP:] or steps
    phases = sorted(k for k in warm[-1] if k.startswith("time/") and k.endswith("_s"))
    for key in [*phases, *SHOWN]:
        values = [s[key] for s in warm if key in s]
        if values:
            result.row(f"{name}: {key}", statistics.fmean(values), "s" if key in phases else SHOWN[key])
    rewards = [s["reward/mean"] for s in steps if "reward/mean" in s]
    if len(rewards) >= 6:
        first, last = statistics.fmean(rewards[:3]), statistics.fmean(rewards[-3:])
        result.row(f"{name}: reward, last three steps", last, "reward", "first three steps", first)


def evaluation_rows(result: Result, name: str, folder: Path) -> None:
    for cell in json.loads((folder / "evaluation.json").read_text()):
        what = f"{name}: {cell['stage']}, {cell['domain']}/{cell['effort']}"
        result.row(f"{what}: reward", cell["reward"], "reward")
        result.row(f"{what}: thinking", cell["thinking_tokens"], "tokens")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", help="key=value, as for `k3rl run`")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--machine", default="h200")
    args = parser.parse_args()
    given = dict(o.split("=", 1) for o in args.overrides)
    name = given.get("name") or yaml.safe_load(args.config.read_text())["name"]
    folder = Path(given.get("runs", "runs")) / name
    fresh = not folder.exists()
    began = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-m", "k3rl.cli", "run", str(args.config), *args.overrides], check=False
    )
    seconds = time.monotonic() - began
    result = Result(name, args.machine)
    if fresh:
        result.row("whole pipeline, starts included", seconds, "s")
    for job in sorted((p.parent for p in folder.glob("*/metrics.jsonl")), key=lambda p: p.stat().st_ctime):
        job_rows(result, job.name, job)
        if (job / "evaluation.json").exists():
            evaluation_rows(result, job.name, job)
    result.write(args.out)
    sys.exit(run.returncode)


if __name__ == "__main__":
    main()
