"""Load of experts under drifting preferences: no balancing, the sign update, and quantile balancing.

    python benchmarks/quantile_balancing.py --out benchmarks/results/quantile_balancing.cpu.json

Each step routes fresh tokens by the bias that earlier steps made, then lets the rule move the bias. Tastes of experts
start apart and walk at random. The number is the busiest expert's load over the mean load, averaged over the last 20
steps and over seeds. Even a perfect bias leaves the noise of drawing tokens; `floor` is the same number with the bias
that 65,536 other tokens of the same step ask for. The sign update is shown at the best of its speeds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from k3rl.optim import QuantileBalancing, RouterBalancing
from k3rl.optim.balancing import RouterBalance
from k3rl.optim.quantile_balancing import Bins, exact_quantile, margins, next_bias, sign_step

Rule = Callable[[Tensor, Tensor, Tensor, int], Tensor]  # (scores, bias, load, top_k) -> next bias
SPEEDS = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
STEPS, LAST, DRIFT, SPREAD = 60, 20, 0.05, 1.0


class Scores:
    """Scores [T, E] of one step after another; the same for a seed whatever asks for them."""

    def __init__(self, experts: int, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.taste_E = SPREAD * torch.randn(experts, generator=self.generator)

    def step(self, tokens: int) -> Tensor:
        self.taste_E = self.taste_E + DRIFT * torch.randn(self.taste_E.shape, generator=self.generator)
        return self.draw(tokens, self.generator)

    def draw(self, tokens: int, generator: torch.Generator) -> Tensor:
        return torch.sigmoid(self.taste_E + torch.randn(tokens, len(self.taste_E), generator=generator))


def exact(scores: Tensor, bias: Tensor, load: Tensor, top_k: int) -> Tensor:
    return next_bias(exact_quantile(margins(scores, bias, top_k), top_k), bias)


def histogram(ema: float) -> Rule:
    def rule(scores: Tensor, bias: Tensor, load: Tensor, top_k: int) -> Tensor:
        bins = Bins.around(bias, 1000)
        return next_bias(bins.quantile(bins.count(margins(scores, bias, top_k)), top_k), bias, ema)

    return rule


def sign(speed: float) -> Rule:
    return lambda scores, bias, load, top_k: sign_step(load, bias, speed)


RULES: dict[str, Rule] = {
    "none": lambda scores, bias, load, top_k: bias,
    **{f"sign {s:g}": sign(s) for s in SPEEDS},
    "quantile exact": exact,
    "quantile histogram": histogram(0.0),
    "quantile histogram, average 0.5": histogram(0.5),
}


def routed(scores: Tensor, bias: Tensor, top_k: int) -> tuple[Tensor, float]:
    ids = (scores + bias).topk(top_k, -1, sorted=False).indices
    load = torch.bincount(ids.flatten(), minlength=scores.shape[1])
    return load, float(load.max() / load.double().mean())


def curves(experts: int, top_k: int, tokens: int, seed: int) -> dict[str, list[float]]:
    """Busiest expert's load over the mean at each step, for every rule and for the floor."""
    source, other = Scores(experts, seed), torch.Generator().manual_seed(1000 + seed)
    biases = {name: torch.zeros(experts) for name in RULES}
    out: dict[str, list[float]] = {name: [] for name in (*RULES, "floor")}
    ideal = torch.zeros(experts)
    for step in range(STEPS):
        scores = source.step(tokens)
        for name, rule in RULES.items():
            load, ratio = routed(scores, biases[name], top_k)
            out[name].append(ratio)
            biases[name] = rule(scores, biases[name], load, top_k)
        if step >= STEPS - LAST:
            # Settled by repetition on its own draw: this bias knows the present tastes.
            many = source.draw(65536 * 64 // max(64, experts), other)
            for _ in range(3):
                ideal = exact(many, ideal, torch.empty(0), top_k)
            out["floor"].append(routed(scores, ideal, top_k)[1])
    return out


def compare(experts: int, top_k: int, tokens: int, seeds: int) -> list[dict[str, Any]]:
    runs = [curves(experts, top_k, tokens, seed) for seed in range(seeds)]
    mean = {n: sum(sum(r[n][-LAST:]) / LAST for r in runs) / seeds for n in runs[0]}
    best = min((f"sign {s:g}" for s in SPEEDS), key=mean.__getitem__)
    rows = []
    for name in ("none", best, *(n for n in RULES if "quantile" in n), "floor"):
        fifth = max(r[name][5] for r in runs) if name != "floor" else None
        rows.append(
            {
                "metric": f"max load/{experts} experts, top {top_k}, {tokens} tokens/{name}",
                "value": round(mean[name], 4),
                "unit": f"x mean, last {LAST} steps",
                "seeds": seeds,
                "after_5_steps_worst_seed": None if fifth is None else round(fifth, 4),
                "peer": best,
                "peer_value": round(mean[best], 4),
                "ratio": round(mean[best] / mean[name], 4),
            }
        )
        print(
            f"{rows[-1]['metric']:66s} {mean[name]:8.3f}   after 5 steps {fifth or float('nan'):.3f}",
            flush=True,
        )
    return rows


def within_one_bin(experts: int, top_k: int) -> dict[str, Any]:
    """Largest distance of the histogram's quantile from the exact one, in bins, over drifting steps."""
    source, bias, worst = Scores(experts, 9), torch.zeros(experts), 0.0
    for _ in range(10):
        r = margins(source.step(2048), bias, top_k)
        bins = Bins.around(bias, 1000)
        quantile = bins.quantile(bins.count(r), top_k)
        worst = max(worst, float((quantile - exact_quantile(r, top_k)).abs().max()) / bins.width)
        bias = next_bias(quantile, bias)
    print(f"histogram against exact, {experts} experts: {worst:.3f} bins", flush=True)
    return {
        "metric": f"histogram against exact/{experts} experts",
        "value": round(worst, 4),
        "unit": "bins",
        "bound": 1,
    }


# -- ranks


def biases_of(ranks: int, rank: int, micro_batches: int) -> Tensor:
    """Ten steps of one token stream, this rank's share of it in so many micro-batches."""
    source, bias, config = Scores(64, 4), torch.zeros(64), QuantileBalancing()
    balancing = RouterBalancing(nn.Module(), config)
    balancing.routers["router"] = balance = RouterBalance(bias, 4, config)
    for _ in range(10):
        for part in source.step(2048).tensor_split(ranks)[rank].tensor_split(micro_batches):
            balance.observe(part, (part + bias).topk(4, -1).indices)
        balancing.step()
    return bias


def over_ranks(ranks: int, micro_batches: int) -> dict[str, Any]:
    """Start gloo ranks, collect their biases, compare bits with one rank and one micro-batch."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    env = dict(os.environ, OMP_NUM_THREADS="1")
    command = [sys.executable, __file__, "--ranks", str(ranks), "--micro-batches", str(micro_batches)]
    children = [
        subprocess.Popen(
            [*command, "--rank", str(r), "--address", address], env=env, stdout=subprocess.PIPE, text=True
        )
        for r in range(ranks)
    ]
    outputs = [c.communicate(timeout=300)[0] for c in children]
    if any(c.returncode for c in children):
        raise SystemExit("a rank failed")
    alone = biases_of(1, 0, 1).view(torch.int32).tolist()
    same = all(json.loads(text.splitlines()[-1]) == alone for text in outputs)
    print(f"{ranks} gloo ranks x {micro_batches} micro-batches, bits equal to one rank: {same}", flush=True)
    return {
        "metric": f"{ranks} ranks x {micro_batches} micro-batches equal one rank",
        "value": int(same),
        "unit": "bits",
    }


def as_rank(args: argparse.Namespace) -> None:
    dist.init_process_group(
        "gloo", init_method=f"tcp://{args.address}", rank=args.rank, world_size=args.ranks
    )
    print(json.dumps(biases_of(args.ranks, args.rank, args.micro_batches).view(torch.int32).tolist()))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=3)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        as_rank(args)
        return
    rows = [over_ranks(args.ranks, args.micro_batches), within_one_bin(64, 4), within_one_bin(896, 16)]
    for experts, top_k, tokens, seeds in ((64, 4, 2048, 3), (896, 16, 2048, 3), (896, 16, 8192, 1)):
        rows += compare(experts, top_k, tokens, seeds)
    result = {
        "name": "quantile_balancing",
        "machine": "cpu",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "command": "python benchmarks/quantile_balancing.py",
        "setting": {"steps": STEPS, "drift": DRIFT, "spread": SPREAD, "sign_speeds": SPEEDS},
        "rows": rows,
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
