"""What the controller costs for each trajectory it completes, with up to 10,000 in flight.

    python benchmarks/controller_overhead.py --out benchmarks/results/controller_overhead.cpu.json

Four workers over an engine without a model, whose tokens are a hash: lengths are between 1 and 80, most short, five
tokens a slice. The clock runs while the controller decides and takes events in: admission, queue, orders, records,
groups, ledger, the ends of steps; not in workers, and not in copies that stand for the transport's.
"""

from __future__ import annotations

import argparse
import hashlib
import pickle
import random
import sys
import time
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

sys.path.append(sys.path.pop(0))  # this folder has a rewards.py too
from harness import Result

from k3rl.chat import load_renderer
from k3rl.config.rollout import RolloutConfig
from k3rl.types import Problem, StopReason
from rollout.controller import Controller
from rollout.engine import EngineStats, Generation
from rollout.worker import Orders, RolloutWorker

WORKERS, SAMPLES, LONGEST, TOKENS = 4, 8, 80, 5


@lru_cache(maxsize=1 << 18)
def hashed(key: int, position: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{key}:{position}".encode(), digest_size=6).digest(), "little")


class Simulated:
    """As much of an `Engine` as generation needs."""

    def __init__(self) -> None:
        self.running: dict[str, Generation] = {}

    def submit(self, generations: Iterable[Generation]) -> None:
        self.running |= {g.id: g for g in generations}

    def step(self) -> list[Generation]:
        done = []
        for g in self.running.values():
            length = 1 + int(LONGEST * (hashed(g.key, -1) % 10_000 / 10_000) ** 3)
            for _ in range(min(TOKENS, length - len(g.token_ids))):
                at = len(g.token_ids)
                g.token_ids.append(100 + hashed(g.key, at) % 64)
                g.logprobs.append(-1.0)
                g.versions.append(0)
            if len(g.token_ids) == length:
                g.stop_reason = StopReason.END_OF_TURN
                done.append(g)
        for g in done:
            del self.running[g.id]
        return done

    def pending(self) -> int:
        return len(self.running)

    def abort(self, ids: Iterable[str]) -> list[Generation]:
        return [self.running.pop(i) for i in ids if i in self.running]

    def pause(self) -> list[Generation]:
        out, self.running = list(self.running.values()), {}
        return out

    def stats(self) -> EngineStats:
        return EngineStats(len(self.running), 0, 0.0, 0, 0, 0)


class Stopwatch:
    def __init__(self) -> None:
        self.spent_s = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.spent_s += time.perf_counter() - self._began


def overhead_s(groups: int, steps: int) -> float:
    """Seconds of controller for each trajectory that finished."""
    config = RolloutConfig.model_validate(
        {"groups": groups, "samples": SAMPLES, "lambda": 0.75, "workers": WORKERS, "max_tokens": 200}
        | {"max_in_flight": groups * SAMPLES}
    )
    renderer, rng, clock = load_renderer("k3-nano"), random.Random(0), Stopwatch()
    controller = Controller(config, run_seed=7)
    workers = [RolloutWorker(config, Simulated(), renderer, 4096, name=f"w{i}") for i in range(WORKERS)]

    def settle() -> None:
        for group in controller.take_surfaced():
            controller.settle(group.draw)

    for step in range(steps):
        with clock:
            for _ in range(controller.begin_step(step, version=0)):
                draw = controller.scheduler.next_draw
                message = {"role": "user", "content": f"What is {draw} + {draw}?"}
                controller.admit(draw, Problem(f"p{draw % 1000}", "general", [message], {"name": "none"}))
        while not controller.scheduler.step_over():
            index = rng.randrange(WORKERS)
            with clock:
                told, work = controller.take_orders(index), []
                while (item := controller.next_work(index, steal=False)) is not None:
                    work.append(item)
            orders = pickle.loads(pickle.dumps(Orders(told.forget, told.discard, [], work)))
            report = pickle.loads(pickle.dumps(workers[index].advance(orders, 1e-9)))
            with clock:
                controller.receive(index, report.events)
                settle()
        controller.pausing = True
        for index, worker in enumerate(workers):
            report = pickle.loads(pickle.dumps(worker.pause()))
            with clock:
                controller.receive(index, report.events)
                settle()
        controller.pausing = False
        with clock:
            controller.end_step()
    return clock.spent_s / controller.counts["finished"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--in-flight", type=int, nargs="*", default=[1_000, 3_000, 10_000])
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    result = Result("controller_overhead", "cpu")
    for count in args.in_flight:
        cost_ms = 1e3 * overhead_s(count // SAMPLES, args.steps)
        result.row(f"{count} in flight: controller for each trajectory", cost_ms, "ms", "limit", 1.0)
    result.write(args.out)


if __name__ == "__main__":
    main()
