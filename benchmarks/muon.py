"""Per-head Muon, whole-matrix Muon and AdamW on one small model, at equal steps.

    python benchmarks/muon.py --out benchmarks/results/muon.cpu.json

A k3-nano learns Python's standard library byte by byte. Each optimiser trains at several learning rates with the first
seed; the rate with the lowest loss is then run with the other seeds. Batches depend on the seed alone, so that all see
the same. The number is the loss on held-out files at the end, in nats per byte; spread is over seeds. Everything is
reported, whichever wins.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from k3rl.config.trainer import AdamWConfig, ScheduleConfig
from k3rl.models import LanguageModel, ModelConfig, build_model
from k3rl.optim import MuonConfig
from k3rl.trainer.optimizer import build_optimizer, clip_gradients, rate, set_rate

RATES = {"adamw": (1e-3, 3e-3, 1e-2), "muon whole": (3e-3, 1e-2, 3e-2), "muon per head": (3e-3, 1e-2, 3e-2)}
HELD_OUT = ("random.py", "textwrap.py", "shutil.py", "statistics.py", "queue.py")
DECAY = 0.1


def corpus() -> tuple[Tensor, Tensor]:
    """(training bytes, held-out bytes) of the standard library's top-level modules, in alphabetical order."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))
    as_bytes = lambda chosen: torch.tensor(list(b"".join(p.read_bytes() for p in chosen)))  # noqa: E731
    return (
        as_bytes(p for p in files if p.name not in HELD_OUT),
        as_bytes(p for p in files if p.name in HELD_OUT),
    )


def batch(data: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """[count, length + 1] bytes from random places."""
    starts = torch.randint(0, len(data) - length - 1, (count,), generator=generator)
    return torch.stack([data[s : s + length + 1] for s in starts])


def loss_of(model: LanguageModel, rows: Tensor) -> Tensor:
    count, width = rows.shape
    cu = torch.arange(count + 1) * (width - 1)
    logits = model.logits(model(rows[:, :-1].flatten(), cu))
    return F.cross_entropy(logits, rows[:, 1:].flatten())


def config_of(optimizer: str, lr: float) -> AdamWConfig | MuonConfig:
    if optimizer == "adamw":
        return AdamWConfig(lr=lr, weight_decay=DECAY)
    return MuonConfig(lr=lr, weight_decay=DECAY, per_head=optimizer == "muon per head")


def train(optimizer: str, lr: float, seed: int, steps: int, data: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Final held-out loss and the training curve."""
    model = build_model(ModelConfig(path="k3-nano", overrides={"vocab_size": 256}), seed).train()
    targets = dict(model.named_parameters())
    stepper = build_optimizer(config_of(optimizer, lr), targets, model)
    warmup = max(1, steps // 20)
    schedule = ScheduleConfig(
        shape="cosine", warmup_steps=warmup, decay_steps=steps - warmup, final_fraction=0.1
    )
    generator = torch.Generator().manual_seed(seed)
    curve, began = [], time.monotonic()
    for step in range(steps):
        loss = loss_of(model, batch(data[0], 8, 128, generator))
        loss.backward()
        clip_gradients(targets.values(), 1.0)
        set_rate(stepper, rate(schedule, step))
        stepper.step()
        stepper.zero_grad()
        curve.append(float(loss.detach()))
    with torch.no_grad():
        fixed = torch.Generator().manual_seed(12345)
        held = statistics.fmean(
            float(loss_of(model.eval(), batch(data[1], 16, 128, fixed))) for _ in range(8)
        )
    seconds = time.monotonic() - began
    print(f"{optimizer:14s} lr {lr:<7g} seed {seed}: held-out {held:.4f} ({seconds:.0f} s)", flush=True)
    return {
        "optimizer": optimizer,
        "lr": lr,
        "seed": seed,
        "loss": held,
        "curve": curve[:: max(1, steps // 20)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    data = corpus()
    runs: list[dict[str, Any]] = []
    best: dict[str, list[float]] = {}
    rates: dict[str, float] = {}
    for optimizer, choices in RATES.items():
        first = [train(optimizer, lr, 0, args.steps, data) for lr in choices]
        winner = min(first, key=lambda r: r["loss"])
        more = [train(optimizer, winner["lr"], seed, args.steps, data) for seed in range(1, args.seeds)]
        runs += first + more
        rates[optimizer] = winner["lr"]
        best[optimizer] = [winner["loss"], *(r["loss"] for r in more)]
    rows = []
    reference = statistics.fmean(best["adamw"])
    for optimizer, losses in best.items():
        mean = statistics.fmean(losses)
        spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
        rows.append(
            {
                "metric": f"held-out loss/{optimizer}",
                "value": round(mean, 4),
                "unit": "nats per byte",
                "spread": round(spread, 4),
                "losses": [round(x, 4) for x in losses],
                "lr": rates[optimizer],
                "peer": "adamw",
                "peer_value": round(reference, 4),
                "ratio": round(reference / mean, 4),
            }
        )
        print(f"{optimizer:14s} {mean:.4f} +- {spread:.4f} at lr {rates[optimizer]:g}")
    result = {
        "name": "muon",
        "machine": "cpu",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "command": f"python benchmarks/muon.py --steps {args.steps} --seeds {args.seeds}",
        "rows": rows,
        "runs": runs,
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
