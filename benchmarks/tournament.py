"""Tournaments before imperfect judges: how well the ranking is recovered, for how many calls.

    python benchmarks/tournament.py --out benchmarks/results/tournament.cpu.json

Candidates have normally distributed qualities. A judge sees the difference of two with logistic noise, scaled so that
it is right about a random pair as often as its accuracy says, and leans to the first seat by half of its noise's scale.
Each pair is judged in both orders. Spearman's correlation of ratings with qualities, mean over trials. Where noise is
all that keeps a ranking from being right, half the calls are half the information, whichever pairs they are spent on.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
from pathlib import Path

import numpy as np

sys.path.append(sys.path.pop(0))  # this folder has a rewards.py too
from harness import Result

from rewards.grm import bradley_terry, play
from rewards.grm.tournament import KINDS

BIAS = 0.5


def noise_for(accuracy: float) -> float:
    """Scale of logistic noise under which a judge without bias is right about two random candidates this often."""
    differences = np.abs(np.random.default_rng(0).normal(size=20_000) * math.sqrt(2))
    low, high = 1e-3, 1e3
    for _ in range(60):
        middle = math.sqrt(low * high)
        right = float((1 / (1 + np.exp(-differences / middle))).mean())
        low, high = (middle, high) if right > accuracy else (low, middle)
    return low


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Of ranks; equal values share theirs."""
    ranks = []
    for values in (np.round(a, 9), np.round(b, 9)):
        below = (values[:, None] > values[None, :]).sum(1)
        equal = (values[:, None] == values[None, :]).sum(1) - 1
        ranks.append(below + equal / 2 - (len(values) - 1) / 2)
    size = math.sqrt(float((ranks[0] ** 2).sum() * (ranks[1] ** 2).sum()))
    return float((ranks[0] * ranks[1]).sum()) / size if size else 0.0


def trial(kind: str, count: int, scale: float, bias: float, seed: int) -> tuple[float, int, float]:
    """(Spearman, calls, share of pairs that turned with the seats)."""
    rng = random.Random(seed)
    quality = np.array([rng.gauss(0, 1) for _ in range(count)])

    async def judge(i: int, j: int) -> float:
        u = min(max(rng.random(), 1e-12), 1 - 1e-12)
        return float(quality[i] - quality[j]) + scale * (bias + math.log(u / (1 - u)))

    result = asyncio.run(play(kind, count, judge))
    return (
        spearman(bradley_terry(count, result.played), quality),
        result.judgements,
        result.health().get("order_bias_rate", 0.0),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--trials", type=int, default=400)
    args = parser.parse_args()
    result = Result("tournament", "cpu")
    for count in (4, 8, 16):
        for accuracy in (0.6, 0.7, 0.8, 0.9, 0.95):
            scale, plain = noise_for(accuracy), (0.0, 0.0)
            for kind in KINDS:
                found = [trial(kind, count, scale, BIAS, 1000 * count + n) for n in range(args.trials)]
                rho, calls, turned = (sum(f[k] for f in found) / len(found) for k in range(3))
                name = f"K {count}, judge right {accuracy:.0%}, {kind}"
                plain = (rho, calls) if kind == "all_pairs" else plain
                result.row(f"{name}: Spearman", rho, "", "all pairs", plain[0])
                result.row(f"{name}: calls", calls, "", "all pairs", plain[1])
                if kind == "all_pairs":
                    result.row(f"{name}: verdicts that turn with the seats", turned, "share")
    result.write(args.out)


if __name__ == "__main__":
    main()
