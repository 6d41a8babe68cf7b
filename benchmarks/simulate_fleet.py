"""K3's rollout on a fleet: the real pool, controller, scheduler, queue and publication; engines and clock simulated.

    python benchmarks/simulate_fleet.py --out benchmarks/results/simulate_fleet.cpu.json
    python benchmarks/simulate_fleet.py --gpus 1024 --lambdas 0.5 1

An engine advances by `fleet_model.py`'s arithmetic for K3's sizes, on a virtual clock. One token of the real records
stands for a unit of many, so that contexts of a million tokens fit. Lengths are log-normal, p99/p50 = 8, a quarter of
the variance between problems. Fleets are colocated: rollout, then training, then publication. Of each setting: use,
tail, staleness, memory and network needs, and what the controller itself costs in real time.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

sys.path.append(sys.path.pop(0))  # this folder has a rewards.py too
from fleet_model import Costs, costs
from harness import Result

from k3rl.config.rollout import RolloutConfig
from k3rl.types import Channel, Group, Problem, Status, StopReason
from k3rl.weights import Ack, Handshake, Publication
from k3rl.weights.publication import TensorInfo
from rollout.agent_loop import TrajectoryWork
from rollout.engine import EngineStats
from rollout.pool import RolloutPool
from rollout.record import Event, Finished, Released, Sampled, Started, TurnEnded
from rollout.worker import Hello, Orders, Report

TAIL, BETWEEN, PROBLEMS = 8.0, 0.25, 4096
SIGMA = math.log(TAIL) / 2.3263  # p99 / p50 of a log-normal is exp(2.3263 sigma)


@dataclass(frozen=True)
class Fleet:
    """A setting. Lengths in tokens; ``slots`` sequences run at once in one engine."""

    model: str
    gpus: int
    engine_gpus: int
    slots: int
    completion: float = 0.75  # lambda
    groups: int = 0  # N; 0: what keeps 1.5 times the slots in flight
    samples: int = 8  # K
    median: int = 65536
    longest: int = 1 << 20
    prompt: int = 8192
    unit: int = 1024  # tokens that one of the records stands for
    slice_s: float = 300.0
    resume: str = "recompute"

    @property
    def engines(self) -> int:
        return self.gpus // self.engine_gpus

    @property
    def n(self) -> int:
        return self.groups or max(1, round(1.5 * self.engines * self.slots / self.samples))


@lru_cache(maxsize=1 << 20)
def length_units(median: int, longest: int, draw: int, key: int) -> int:
    """Response of a trajectory: its problem's share of the luck, and its own."""
    luck = math.sqrt(BETWEEN) * random.Random(f"problem {draw % PROBLEMS}").gauss(0, 1)
    luck += math.sqrt(1 - BETWEEN) * random.Random(f"own {key}").gauss(0, 1)
    return min(longest, max(1, round(median * math.exp(SIGMA * luck))))


@dataclass(slots=True)
class Running:
    """A trajectory in an engine; counts in tokens, ``units`` are those reported."""

    work: TrajectoryWork
    context: float
    left: float
    length: int  # response, units
    units: int
    cached: bool


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Observed:
    """What happened in engines since it was cleared: (begin, seconds, sequences) by decode stretch, and sums."""

    stretches: list[tuple[float, float, int]] = field(default_factory=list)
    decoded_tokens: float = 0.0
    prefilled_tokens: float = 0.0
    prefill_s: float = 0.0
    evicted: int = 0
    published: tuple[int, int] = (-1, 0)  # version and bytes
    inside_s: float = 0.0  # real seconds of simulated workers


class Worker:
    """Answers a pool's calls as a `RolloutWorker` would, in zero real time and ``seconds`` of virtual time."""

    def __init__(self, fleet: Fleet, cost: Costs, observed: Observed) -> None:
        self.fleet, self.cost, self.observed = fleet, cost, observed
        self.running: dict[str, Running] = {}
        self.waiting: deque[Running] = deque()
        self.resting: dict[str, float] = {}  # caches kept for paused trajectories: tokens
        self.version = 0
        self.events: list[Event] = []

    def call(self, method: str, arguments: Sequence[Any], at_s: float) -> tuple[Any, float]:
        """The outcome, and how long it took."""
        if method == "advance":
            return self.advance(*arguments[:2], at_s=at_s)
        if method == "pause":
            self._release([*self.running, *(r.work.trajectory.id for r in self.waiting)])
            return self._report(0.0), 0.0
        if method == "load_weights":
            (publication,) = arguments
            self.version = publication.version
            if self.fleet.resume == "recompute":
                self.resting.clear()
            if self.observed.published[0] != self.version:
                self.observed.published = (self.version, publication.nbytes)
            seconds = self.cost.publish_s(self.observed.published[1])
            return Ack("engine", publication.version, publication.checksum, seconds_s=seconds), seconds
        if method == "hello":
            return Hello("engine", 0, self.version, Handshake()), 0.0
        return None, 0.0

    def advance(self, orders: Orders, slice_s: float, at_s: float) -> tuple[Report, float]:
        for id_ in [*orders.forget, *orders.discard]:
            self.resting.pop(id_, None)
        self._release(orders.release)
        for work in orders.work:
            self._accept(work)
        spent, busy = 0.0, 0.0
        while spent < slice_s and (self.running or self.waiting):
            prefill = self._admit()
            spent, busy = spent + prefill, busy + prefill
            step = self._stretch(max(slice_s - spent, 1e-3), at_s + spent)
            spent, busy = spent + step, busy + step
        for run in self.running.values():
            self._flush(run)
        return self._report(busy), spent

    def _accept(self, work: TrajectoryWork) -> None:
        t, unit, fleet = work.trajectory, self.fleet.unit, self.fleet
        prompt = fleet.prompt // unit
        if not t.prompt_ids:
            self.events.append(Started(t.id, work.dispatch, 0, [0] * prompt, {}, None))
        done = sum(map(len, t.segments))
        tokens = length_units(fleet.median, fleet.longest - fleet.prompt, t.draw, work.key)
        total = max(1, round(tokens / unit))
        cached = self.resting.pop(t.id, -1.0) >= 0 and done > 0
        context = float((prompt + done) * unit)
        self.waiting.append(Running(work, context, (total - done) * unit, total, done, cached))

    def _admit(self) -> float:
        """From the queue into free slots and memory; seconds of prefill."""
        seconds = 0.0
        budget, used = self.cost.cache_budget_bytes, self._used()
        while self.waiting and len(self.running) < self.fleet.slots:
            run = self.waiting[0]
            used += self.cost.cache_bytes(run.context + self.fleet.unit)
            if used > budget and self.running:
                break
            self.waiting.popleft()
            if not run.cached:
                seconds += self.cost.prefill_s(run.context)
                self.observed.prefilled_tokens += run.context
            self.running[run.work.trajectory.id] = run
        self.observed.prefill_s += seconds
        return seconds

    def _stretch(self, limit_s: float, at_s: float) -> float:
        """Decode until a sequence ends, or the limit."""
        runs, batch = self.running, len(self.running)
        step_s = self.cost.decode_step_s(batch, sum(r.context for r in runs.values()))
        tokens = min(limit_s / step_s, min(r.left for r in runs.values()))
        for run in runs.values():
            run.left -= tokens
            run.context += tokens
        seconds = tokens * step_s
        self.observed.stretches.append((at_s, seconds, batch))
        self.observed.decoded_tokens += tokens * batch
        for run in [r for r in runs.values() if r.left <= 1e-6]:
            self._finish(run)
        while len(runs) > 1 and self._used() > self.cost.cache_budget_bytes:
            run = runs.pop(next(reversed(runs)))  # the last to come is computed again later
            run.cached = False
            self.waiting.appendleft(run)
            self.observed.evicted += 1
        return seconds

    def _used(self) -> float:
        tokens = sum(r.context for r in self.running.values())
        return len(self.running) * self.cost.state_bytes + tokens * self.cost.kv_bytes_per_token

    def _flush(self, run: Running, everything: bool = False) -> None:
        done = run.length if everything else min(run.length - 1, int(run.length - run.left / self.fleet.unit))
        new = done - run.units
        if new > 0:
            t = run.work.trajectory
            sampled = Sampled(t.id, run.work.dispatch, run.units, [0] * new, [0.0] * new, self.version)
            self.events.append(sampled)
            run.units = done

    def _finish(self, run: Running) -> None:
        self._flush(run, everything=True)
        id_, dispatch = run.work.trajectory.id, run.work.dispatch
        del self.running[id_]
        self.events.append(TurnEnded(id_, dispatch, run.length, [(Channel.RESPONSE, run.length)]))
        ended = (Status.COMPLETE, StopReason.END_OF_TURN, "", {}, None, {})
        self.events.append(Finished(id_, dispatch, run.length, *ended))

    def _release(self, ids: Sequence[str]) -> None:
        gone = set(ids)
        for run in [*(self.running[i] for i in ids if i in self.running), *self.waiting]:
            t = run.work.trajectory
            if t.id not in gone:
                continue
            if t.id in self.running:
                self._flush(run)
                del self.running[t.id]
                if self.fleet.resume == "keep_cache":
                    self.resting[t.id] = run.context
            self.events.append(Released(t.id, run.work.dispatch, run.units, {}, None, {}, False))
        self.waiting = deque(r for r in self.waiting if r.work.trajectory.id not in gone)

    def _report(self, busy_s: float) -> Report:
        events, self.events = self.events, []
        return Report(events, EngineStats(len(self.running), 0, 0.0, 0, 0, self.version), 0, 0, 0, busy_s)


class VirtualTransport:
    """A `rollout.transport.Transport` of simulated workers. `wait` moves the clock to the next outcome."""

    def __init__(self, fleet: Fleet, cost: Costs, clock: Clock, observed: Observed) -> None:
        self.fleet, self.cost, self.clock, self.observed = fleet, cost, clock, observed
        self.workers: dict[int, Worker] = {}
        self.free_s: dict[int, float] = {}
        self.due: dict[int, tuple[float, Any]] = {}
        self.next = 0

    def start(self, index: int) -> None:
        self.workers[index] = Worker(self.fleet, self.cost, self.observed)
        self.free_s[index] = self.clock.now_s

    def call(self, index: int, method: str, *arguments: Any) -> int:
        began = time.perf_counter()
        at_s = max(self.clock.now_s, self.free_s[index])
        value, seconds = self.workers[index].call(method, arguments, at_s)
        self.free_s[index] = at_s + seconds
        self.next += 1
        self.due[self.next] = (at_s + seconds, value)
        self.observed.inside_s += time.perf_counter() - began
        return self.next

    def wait(self, tickets: Sequence[int], timeout_s: float) -> list[int]:
        """Nothing happens before the next outcome, so the limit of time is passed over."""
        if not tickets:
            self.clock.now_s += timeout_s
            return []
        self.clock.now_s = max(self.clock.now_s, min(self.due[t][0] for t in tickets))
        return [t for t in tickets if self.due[t][0] <= self.clock.now_s]

    def result(self, ticket: int) -> Any:
        return self.due.pop(ticket)[1]

    def stacks(self, index: int) -> str:
        return ""

    def kill(self, index: int) -> None:
        self.workers.pop(index, None)

    def close(self, over: bool = False) -> None:
        self.workers = {}


def publication_of(model: str) -> tuple[TensorInfo, ...]:
    """Every tensor that a publication of this model carries, from the model itself on the meta device."""
    import torch

    from k3rl.models.config import preset
    from k3rl.models.k3.model import K3Model

    made = K3Model(preset(model), torch.bfloat16, "meta")
    return tuple(TensorInfo.of(name, tensor) for name, tensor in made.named_weights())


@dataclass
class Step:
    """One step's numbers; see `COLUMNS`."""

    rollout_s: float
    train_s: float
    publish_s: float
    tokens: float
    decode_use: float
    tail: float
    ages: list[tuple[int, int]]  # tokens by version distance
    paused_bytes: float
    prefill_share: float


def simulate(fleet: Fleet, tensors: tuple[TensorInfo, ...], warm: int, steps: int) -> dict[str, float]:
    """Numbers of ``steps`` steps after ``warm`` others."""
    cost, clock, observed = costs(fleet.model, fleet.engine_gpus), Clock(), Observed()
    config = RolloutConfig.model_validate(
        {"groups": fleet.n, "samples": fleet.samples, "lambda": fleet.completion, "min_groups": 0}
        | {"workers": fleet.engines, "max_tokens": 1 << 30, "slice_s": fleet.slice_s, "resume": fleet.resume}
        | {"engine": {"type": "native", "max_slots": fleet.slots}, "progress_s": 1e9}
        | {"call_timeout_s": 1e12, "start_timeout_s": 1e12, "stall_timeout_s": 1e12}
    )
    pool = RolloutPool(
        config, lambda i: None, transport=VirtualTransport(fleet, cost, clock, observed), clock=clock
    )
    draws: Iterator[int] = iter(range(1 << 62))

    def draw() -> tuple[int, Problem]:
        number = next(draws)
        return number, Problem(f"p{number % PROBLEMS}", "agent", [], {"name": "none"})

    def publish(version: int) -> float:
        began = clock.now_s
        pool.publish(Publication(version, "nccl", None, tensors, checksum=f"{version}"))
        return clock.now_s - began

    publish(0)
    done, began_s, inside_s, finished = [], time.perf_counter(), 0.0, 0
    for step in range(warm + steps):
        if step == warm:
            began_s, inside_s = time.perf_counter(), observed.inside_s
            finished = pool.controller.counts["finished"]
        one = run_step(pool, fleet, cost, clock, observed, draw, step)
        one.publish_s = publish(step + 1)
        done.append(one)
    controller_s = time.perf_counter() - began_s - (observed.inside_s - inside_s)
    finished = pool.controller.counts["finished"] - finished
    nbytes = Publication(0, "nccl", None, tensors).nbytes
    return summary(fleet, cost, done[warm:], nbytes) | {
        "controller ms a trajectory": 1e3 * controller_s / max(1, finished),
        "stolen": float(pool.controller.counts["stolen"]),
    }


def run_step(
    pool: RolloutPool, fleet: Fleet, cost: Costs, clock: Clock, observed: Observed, draw: Any, step: int
) -> Step:
    """Rollout, then training as time that passes."""
    observed.stretches.clear()
    observed.decoded_tokens = observed.prefill_s = observed.prefilled_tokens = 0.0
    began, groups = clock.now_s, []
    for event in pool.rollout(step, draw):
        if isinstance(event, Group):
            groups.append(event)
    rollout_s = max(clock.now_s - began, 1e-9)
    trained = [t for g in groups for t in g.trajectories]
    flops = sum(cost.forward_flops(fleet.unit * (len(t.prompt_ids) + t.sampled_tokens)) for t in trained)
    train_s = cost.train_s(flops, fleet.gpus)
    clock.now_s += train_s
    for group in groups:
        pool.settle(group.draw)
    contexts = [
        fleet.unit * (len(e.trajectory.prompt_ids) + e.record.length)
        for e in pool.controller.entries.values()
    ]
    mean = observed.decoded_tokens and sum(s * b for _, s, b in observed.stretches)
    best = best_rate(fleet, cost)
    engine_s = fleet.engines * rollout_s
    return Step(
        rollout_s=rollout_s,
        train_s=train_s,
        publish_s=0.0,
        tokens=fleet.unit * sum(t.sampled_tokens for t in trained),
        decode_use=observed.decoded_tokens / (engine_s * best) if mean else 0.0,
        tail=tail_share(observed.stretches, began, rollout_s),
        ages=[(step - s.policy_version, len(s)) for t in trained for s in t.segments],
        paused_bytes=sum(map(cost.cache_bytes, contexts)),
        prefill_share=observed.prefill_s / engine_s,
    )


def best_rate(fleet: Fleet, cost: Costs) -> float:
    """Tokens per second of an engine that is always as full as memory and slots allow, at the mean context."""
    context = fleet.prompt + fleet.median * math.exp(SIGMA**2 / 2) / 2
    batch = max(1, min(fleet.slots, int(cost.cache_budget_bytes / cost.cache_bytes(context))))
    return batch / cost.decode_step_s(batch, batch * context)


def tail_share(
    stretches: list[tuple[float, float, int]], began: float, seconds: float, bins: int = 400
) -> float:
    """Share of a step's rollout at its end in which fewer than half as many sequences run as in its middle."""
    running = [0.0] * bins
    width = seconds / bins
    for at, length, batch in stretches:
        first, last = (at - began) / width, (at + length - began) / width
        for i in range(max(0, int(first)), min(bins, int(last) + 1)):
            running[i] += batch * max(0.0, min(i + 1, last) - max(i, first))
    full = sorted(running)[bins // 2]
    below = next((n for n, x in enumerate(reversed(running)) if x >= full / 2), bins)
    return below / bins


COLUMNS = {
    "use": "share", "decode use": "share", "tail": "share", "recompute": "share", "staleness mean": "versions",
    "staleness p99": "versions", "staleness max": "versions", "step": "s", "rollout": "s", "train": "s",
    "publish": "s", "trained": "tokens/s per GPU", "paused caches per host": "GB", "trainer state per host": "GB",
    "publication as published": "GB", "publication packed": "GB", "network per GPU": "GB each step",
    "controller ms a trajectory": "ms", "stolen": "trajectories",
}  # fmt: skip


def summary(fleet: Fleet, cost: Costs, done: list[Step], nbytes: int) -> dict[str, float]:
    """Means over steps. ``use``: share of the wall time in which GPUs generate at full speed or train."""
    ages: dict[int, int] = {}
    for step in done:
        for age, count in step.ages:
            ages[age] = ages.get(age, 0) + count
    total = max(1, sum(ages.values()))
    upto, p99 = 0, 0
    for age in sorted(ages):
        upto += ages[age]
        if upto >= 0.99 * total:
            p99 = age
            break
    n = len(done)
    wall = sum(s.rollout_s + s.train_s + s.publish_s for s in done)
    hosts = max(1.0, fleet.gpus / cost.hardware.per_host)
    working = sum(s.rollout_s * s.decode_use + s.train_s for s in done)
    packed = cost.served_bytes
    return {
        "use": working / wall,
        "decode use": sum(s.decode_use for s in done) / n,
        "tail": sum(s.tail for s in done) / n,
        "recompute": sum(s.prefill_share for s in done) / n,
        "staleness mean": sum(a * c for a, c in ages.items()) / total,
        "staleness p99": float(p99),
        "staleness max": float(max(ages, default=0)),
        "step": wall / n,
        "rollout": sum(s.rollout_s for s in done) / n,
        "train": sum(s.train_s for s in done) / n,
        "publish": sum(s.publish_s for s in done) / n,
        "trained": sum(s.tokens for s in done) / wall / fleet.gpus,
        "paused caches per host": max(s.paused_bytes for s in done) / hosts / 1e9,
        "trainer state per host": cost.trainer_bytes() / hosts / 1e9,
        "publication as published": nbytes / 1e9,
        "publication packed": packed / 1e9,
        "network per GPU": nbytes / fleet.engine_gpus / 1e9,
    }


K3 = {"model": "k3-full", "engine_gpus": 32, "slots": 512}
MINI = {"model": "k3-mini", "engine_gpus": 1, "slots": 64, "median": 4096, "longest": 131072, "prompt": 512}
MINI |= {"unit": 64, "slice_s": 10.0}


def settings(args: argparse.Namespace) -> list[Fleet]:
    """Fleets from 1 to 4,096 GPUs; then lambda, N, K and the cache one at a time at ``--gpus``."""
    if args.lambdas or args.groups or args.samples:
        base = Fleet(gpus=args.gpus, **K3)
        return [
            Fleet(**{**vars(base), "completion": c, "groups": g, "samples": k})
            for c in args.lambdas or [base.completion]
            for g in args.groups or [0]
            for k in args.samples or [base.samples]
        ]
    sizes = [Fleet(gpus=g, **MINI) for g in (1, 8)]
    sizes.append(Fleet(gpus=16, **{**K3, "engine_gpus": 16, "slots": 64}))
    sizes += [Fleet(gpus=g, **K3) for g in (64, 128, 256)]
    sizes += [Fleet(**{**K3, "gpus": g, "slice_s": 600.0}) for g in (1024, 4096)]
    at = Fleet(gpus=args.gpus, **K3)
    vary: list[Fleet] = [Fleet(**{**vars(at), "completion": c}) for c in (0.25, 0.5, 0.9, 1.0)]
    slots = at.engines * at.slots / at.samples
    vary += [Fleet(**{**vars(at), "groups": round(f * slots)}) for f in (1.0, 2.0, 3.0)]
    vary += [Fleet(**{**vars(at), "samples": k}) for k in (4, 16, 32)]
    vary.append(Fleet(**{**vars(at), "resume": "keep_cache"}))
    return sizes + [f for f in vary if f not in sizes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--gpus", type=int, default=128, help="of the fleet in which lambda, N and K vary")
    parser.add_argument("--lambdas", type=float, nargs="*")
    parser.add_argument("--groups", type=int, nargs="*", help="N")
    parser.add_argument("--samples", type=int, nargs="*", help="K")
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    result, tensors = Result("simulate_fleet", "cpu"), {}
    for fleet in settings(args):
        if fleet.model not in tensors:
            tensors[fleet.model] = publication_of(fleet.model)
        label = (
            f"{fleet.gpus} GPUs, {fleet.model}, lambda {fleet.completion:g}, N {fleet.n}, K {fleet.samples}"
        )
        label += ", caches kept" if fleet.resume == "keep_cache" else ""
        for name, value in simulate(fleet, tensors[fleet.model], args.warm, args.steps).items():
            result.row(f"{label}: {name}", value, COLUMNS[name])
            result.rows[-1] |= {
                "gpus": fleet.gpus,
                "lambda": fleet.completion,
                "N": fleet.n,
                "K": fleet.samples,
            }
            result.rows[-1] |= {"model": fleet.model, "resume": fleet.resume, "what": name}
    result.write(args.out)


if __name__ == "__main__":
    main()
