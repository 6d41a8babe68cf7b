"""What partial rollout is worth under a long tail: lambda 1.0, 0.9, 0.75, 0.5 on a real engine, and length-aware order.

    python benchmarks/partial_rollout.py --learn-from runs/quickstart/sft \\
        --out benchmarks/results/partial_rollout.cpu.json

K3-nano with random weights on the native engine, through the pool, in this process. Responses end after a drawn number
of tokens: log-normal, median 40, p99/p50 = 8, a quarter of the variance between problems and the rest within a group.
A resumed trajectory's cache is computed again, as after new weights. Counted after warm-up steps: sampled tokens of
the groups handed over for training, trajectories finished, steps ended; each per second of rollout. 32 trajectories in
flight keep a decode step's time nearly flat in their number, as on a GPU. `--learn-from` adds whole training: the
quickstart's RL (whose lengths are not long-tailed) at each lambda, rewards after equal wall time.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

sys.path.append(sys.path.pop(0))  # this folder has a rewards.py too
from harness import Result

from k3rl.chat import Renderer, load_renderer
from k3rl.config.load import load_job
from k3rl.config.rollout import RolloutConfig
from k3rl.models import ModelConfig, build_model
from k3rl.models.base import LanguageModel
from k3rl.recipes.run import run_job
from k3rl.store import RunStore
from k3rl.types import Group, Problem
from rollout.engine import Generation
from rollout.native import NativeEngine
from rollout.pool import RolloutPool
from rollout.transport import InlineTransport
from rollout.worker import RolloutWorker

MEDIAN, TAIL = 40, 8.0
SIGMA = math.log(TAIL) / 2.3263  # p99 / p50 of a log-normal is exp(2.3263 sigma)
BETWEEN = 0.25  # share of the variance of log length that is the problem's
PROBLEMS = 48
LONGEST = 1500


def length_of(draw: int, key: int) -> int:
    """Response tokens of a trajectory: its problem's share of the luck, and its own."""
    problem = random.Random(f"problem {draw % PROBLEMS}").gauss(0, 1)
    own = random.Random(f"own {key}").gauss(0, 1)
    log_length = math.log(MEDIAN) + SIGMA * (math.sqrt(BETWEEN) * problem + math.sqrt(1 - BETWEEN) * own)
    return min(LONGEST, max(1, round(math.exp(log_length))))


class LongTailed(NativeEngine):
    """The native engine, with responses that end where `length_of` says."""

    def submit(self, generations: Iterable[Generation]) -> None:
        generations = list(generations)
        for g in generations:
            g.sampling = dataclasses.replace(
                g.sampling, max_tokens=length_of(int(g.group), g.key), stop_token_ids=(), ignore_eos=True
            )
        super().submit(generations)


def measure(
    model: LanguageModel, renderer: Renderer, groups: int, slots: int, steps: int, warm: int, **fields: Any
) -> dict[str, float]:
    """Rates per second over ``steps`` steps after ``warm`` others."""
    config = RolloutConfig.model_validate(
        {"groups": groups, "samples": 4, "max_tokens": LONGEST, "min_groups": 0, "progress_s": 3600.0}
        | {"engine": {"type": "native", "max_slots": slots}, "max_in_flight": slots}
        | fields
    )

    def make(index: int) -> RolloutWorker:
        return RolloutWorker(config, LongTailed(model, slots, 2048), renderer, 2048, get=lambda x: x)

    def problem(number: int) -> Problem:
        message = {"role": "user", "content": f"Question {number % PROBLEMS}"}
        return Problem(f"p{number % PROBLEMS}", "general", [message], {"name": "none"})

    pool = RolloutPool(config, make, run_seed=1, transport=InlineTransport(make))
    tokens = finished = 0
    began = before = 0.0
    for step in range(warm + steps):
        if step == warm:
            tokens, finished, began = 0, 0, time.perf_counter()
            before = pool.metrics()["rollout/finished"]
        for event in pool.rollout(step, lambda: (pool.next_draw, problem(pool.next_draw))):
            if isinstance(event, Group):
                tokens += sum(t.sampled_tokens for t in event.trajectories)
                pool.settle(event.draw)
    took = time.perf_counter() - began
    finished = pool.metrics()["rollout/finished"] - before
    pool.close()
    return {"trained tokens": tokens / took, "trajectories": finished / took, "steps": steps / took}


def learning(result: Result, sft: str, lambdas: list[float], steps: int) -> None:
    """The quickstart's RL at each lambda from one checkpoint: mean reward of the last three steps within equal time."""
    template = load_job("configs/quickstart.yaml").jobs["rl"]
    curves: dict[float, list[tuple[float, float, float]]] = {}
    with tempfile.TemporaryDirectory() as runs:
        for lambda_ in lambdas:
            rollout = template.rollout.model_copy(update={"lambda_": lambda_})
            named = {
                "name": f"lambda-{lambda_}",
                "runs": runs,
                "steps": round(steps / lambda_),
                "rollout": rollout,
            }
            job = template.model_copy(update=named | {"model": ModelConfig(path=sft)})
            passed, curves[lambda_] = 0.0, []
            for m in RunStore.open(run_job(job)).metrics():
                passed += m["time/step_s"]
                curves[lambda_].append((passed, m["reward/mean"], m["train/tokens"]))
    limit_s = min(curve[-1][0] for curve in curves.values())
    plain = None
    for lambda_, curve in curves.items():
        within = [(reward, tokens) for passed, reward, tokens in curve if passed <= limit_s]
        reward = sum(r for r, _ in within[-3:]) / len(within[-3:])
        rate = sum(t for _, t in within) / limit_s
        result.row(f"quickstart, lambda {lambda_}: reward after {limit_s:.0f} s", reward, "")
        peer = ("lambda 1.0", plain) if plain else ()
        result.row(f"quickstart, lambda {lambda_}: trained tokens, all phases", rate, "tokens/s", *peer)
        plain = plain or rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--groups", type=int, default=8, help="N; K is 4")
    parser.add_argument(
        "--steps", type=int, default=50, help="at lambda 1; as many trajectories at the others"
    )
    parser.add_argument(
        "--learn-from", help="an SFT run of the quickstart: also train from it at each lambda"
    )
    parser.add_argument(
        "--learn-steps", type=int, default=12, help="at lambda 1; as many trajectories at the others"
    )
    parser.add_argument("--lambdas", type=float, nargs="*", default=[1.0, 0.9, 0.75, 0.5])
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, renderer = build_model(ModelConfig(path="k3-nano"), seed=0), load_renderer("k3-nano")
    lengths = sorted(length_of(d, 4 * d + k) for d in range(5000) for k in range(4))
    p50, p99 = lengths[len(lengths) // 2], lengths[len(lengths) * 99 // 100]
    result = Result("partial_rollout", "cuda" if torch.cuda.is_available() else "cpu")
    result.row("response length, p50", p50, "tokens")
    result.row("response length, p99 / p50", p99 / p50, "")
    all_at_once = args.groups * 4
    plain: dict[str, float] = {}
    for lambda_ in args.lambdas:
        steps = round(args.steps / lambda_)
        rates = measure(model, renderer, args.groups, all_at_once, steps, 4, **{"lambda": lambda_})
        for what, rate in rates.items():
            peer = ("lambda 1.0", plain[what]) if plain else ()
            result.row(f"lambda {lambda_}: {what}", rate, f"{what.split()[-1]}/s", *peer)
        plain = plain or rates
    # Order can only matter where not everything runs at once: half as many slots as trajectories.
    for lambda_ in (1.0, 0.75):
        drawn = None
        for ordered in (False, True):
            rates = measure(
                model, renderer, args.groups, all_at_once // 2, round(args.steps / lambda_), 4,
                longest_first=ordered, **{"lambda": lambda_},
            )  # fmt: skip
            rate, name = rates["trained tokens"], "longest first" if ordered else "as drawn"
            peer = ("as drawn", drawn) if drawn else ()
            result.row(f"lambda {lambda_}, half the slots, {name}: trained tokens", rate, "tokens/s", *peer)
            drawn = rate
    if args.learn_from:
        learning(result, args.learn_from, args.lambdas, args.learn_steps)
    result.write(args.out)


if __name__ == "__main__":
    main()
