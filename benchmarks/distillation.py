"""Nine teachers on one device: what a swap of packed weights moves and costs, and what nine teachers add to a step
over one. Models are random: nothing here depends on what they know.

    python benchmarks/distillation.py --out benchmarks/results/distillation.cpu.json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from harness import Result

from distill.teachers import Teachers
from k3rl.models import ModelConfig, build_model, load_model, save_model
from k3rl.quant.config import QatConfig

TEACHERS = 9
DOMAINS, EFFORTS = ("general", "agent", "coding"), ("low", "high", "max")


def make_models(folder: Path, preset: str, dtype: str, count: int) -> list[ModelConfig]:
    """Random checkpoints of one architecture, trained for MXFP4 as far as anybody can tell."""
    for seed in range(count):
        model = build_model(ModelConfig(path=preset, dtype=dtype), seed=seed)
        save_model(model, folder / f"{preset}-{seed}", "k3rl/chat/nano" if preset == "k3-nano" else None)
    paths = [str(folder / f"{preset}-{seed}") for seed in range(count)]
    return [ModelConfig(path=path, dtype=dtype, qat=QatConfig()) for path in paths]


def swaps(result: Result, models: list[ModelConfig], device: str, what: str) -> None:
    """Seconds and bytes of a swap, packed and not, beside reading the checkpoint from disk again."""
    began = time.monotonic()
    load_model(models[0], device)
    reload_s = time.monotonic() - began
    rng = random.Random(0)
    questions = [(i, [rng.randrange(3, 500) for _ in range(64)], 8) for i in range(len(models))]
    seconds: dict[str, float] = {}
    for storage in ("as_loaded", "mxfp4"):
        teachers = Teachers(models, device, 256, torch.get_num_threads(), storage)
        if storage == "as_loaded" and device == "cpu":
            continue  # nothing moves: all stay loaded
        teachers.score(questions)
        before = teachers.statistics()
        teachers.score(questions[::-1])
        after = teachers.statistics()
        count = after["teacher/swaps"] - before["teacher/swaps"]
        seconds[storage] = (after["teacher/moved_s"] - before["teacher/moved_s"]) / count
        moved = (after["teacher/moved_bytes"] - before["teacher/moved_bytes"]) / count
        result.row(f"{what}, {storage}: bytes of a swap", moved / 2**20, "MiB")
        result.row(
            f"{what}, {storage}: time of a swap", 1e3 * seconds[storage], "ms", "from disk", 1e3 * reload_s
        )


def job(models: list[ModelConfig], folder: Path, teachers: int, steps: int) -> object:
    from k3rl.config.load import validate

    cells = [(d, e) for d in DOMAINS for e in EFFORTS]
    routed = [
        {"name": f"{d}-{e}", "model": models[i % teachers].model_dump(), "domains": [d], "efforts": [e]}
        for i, (d, e) in enumerate(cells)
    ]
    source = {
        "type": "callable",
        "function": "k3rl.data.tasks:keyboard_walk",
        "efforts": dict.fromkeys(EFFORTS, 1),
    }
    rings = zip(DOMAINS, ("keyboard", "alphabet", "punctuation"), strict=True)
    plain = {
        "kind": "distill",
        "name": f"teachers-{teachers}",
        "runs": str(folder),
        "model": models[-1].model_dump(),
        "teachers": routed,
        "data": {
            "type": "mix",
            "sources": [{**source, "arguments": {"domain": d, "ring": r}} for d, r in rings],
        },
        "steps": steps,
        "checkpoint_every": steps,
        "rollout": {
            "groups": 72,
            "samples": 2,
            "max_context": 256,
            "max_tokens": 64,
            "engine": {"type": "native", "max_slots": 128},
        },
        "trainer": {"optimizer": {"lr": 1e-5}},
        "token_rewards": {"compare_every": 0},
    }
    return validate(plain, {}, "benchmark")


def step_seconds(models: list[ModelConfig], folder: Path, teachers: int, steps: int) -> tuple[float, float]:
    """Median seconds of a step and of its scoring, the first two steps left out."""
    from k3rl.recipes.run import run_job

    run = run_job(job(models, folder, teachers, steps))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][2:]
    return tuple(statistics.median(r[name] for r in rows) for name in ("time/step_s", "time/teachers_s"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--presets", nargs="+", default=["k3-nano"])
    parser.add_argument("--no-run", action="store_true", help="swaps only")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result = Result("distillation", "h200" if device == "cuda" else "cpu")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for preset in arguments.presets:
            dtype = "bfloat16" if device == "cuda" else "float32"
            swaps(result, make_models(folder, preset, dtype, TEACHERS), device, preset)
        if not arguments.no_run:
            models = [ModelConfig(path=str(folder / f"k3-nano-{seed}")) for seed in range(TEACHERS)]
            one, scoring_one = step_seconds(models, folder / "runs", 1, arguments.steps)
            nine, scoring_nine = step_seconds(models, folder / "runs", TEACHERS, arguments.steps)
            result.row("step with nine teachers", nine, "s", "one teacher", one)
            result.row("scoring in a step, nine teachers", scoring_nine, "s", "one teacher", scoring_one)
    result.write(arguments.out)


if __name__ == "__main__":
    main()
