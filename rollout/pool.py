"""`RolloutPool`: groups of trajectories from a set of workers, whatever happens to the workers.

    pool = RolloutPool(config, make_worker, run_seed=0)
    for event in pool.rollout(step, draw_problem):     # groups as they complete, progress now and then
        ...
    pool.publish(publication)                          # every worker acknowledges the new version

One loop drives all: replace the dead, give work, wait for any answer, take it in, look at the deadlines. The
`Controller` decides who runs what and holds every token that was reported; the `Fleet` keeps the workers
alive; here the two meet.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from k3rl.config.rollout import RolloutConfig
from k3rl.errors import RunError
from k3rl.types import Group, Problem
from k3rl.weights import Ack, Publication
from rollout.controller import Controller
from rollout.fleet import CALLS_UNDER_WAY, POLL_S, Fleet, Member
from rollout.pump import Pump
from rollout.transport import MakeWorker, RayTransport, Transport
from rollout.worker import Orders, Report, SavedState

DrawProblem = Callable[[], tuple[int, Problem] | None]
"""The next draw's ordinal and problem; ``None`` when there are no more."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a step is. ``by_effort``: mean sampled tokens of those finished in it."""

    step: int
    done: int
    wanted: int
    groups_done: int
    in_flight: int
    waiting: int
    workers: int
    tokens: int
    tokens_per_s: float
    seconds_s: float
    by_effort: dict[str, float]


WORKERS_SHOWN = 64
"""In larger fleets the metrics have no line for each worker."""
DETERMINISTIC_SLICE = 8
"""Engine steps between two reports in deterministic mode."""


class RolloutPool:
    """``make_worker`` builds worker i in its process. ``version`` is that of the weights it starts with.

    ``transport`` None: Ray actors with ``actor_options``. All methods are for one thread; in the
    asynchronous modes a thread of the pool's own keeps the workers busy between them.
    """

    def __init__(
        self,
        config: RolloutConfig,
        make_worker: MakeWorker,
        *,
        run_seed: int = 0,
        version: int = 0,
        transport: Transport | None = None,
        actor_options: dict[str, Any] | None = None,
        placement_group: Any = None,
        bundles: list[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self._clock = config, clock
        self.controller = Controller(config, run_seed)
        transport = transport or RayTransport(
            make_worker, options=actor_options, placement_group=placement_group, bundles=bundles
        )
        self.fleet = Fleet(config, transport, version, clock, self.controller.lost, self._holding)
        # Who is where when a step ends must not depend on the clock: slices are counted in engine steps, one at a time.
        self._in_step = config.engine.type == "native" and config.engine.deterministic
        self._calls = 1 if self._in_step else CALLS_UNDER_WAY
        self._open = True  # workers may take work
        self._draw: DrawProblem | None = None
        self._step_tokens = 0
        self._step_started_s = clock()
        self._lock = threading.RLock()
        self._pump: Pump | None = None
        self._snapshots: set[str] = set()  # that the last checkpoint names

    @property
    def version(self) -> int:
        """Of the weights that the workers serve."""
        return self.fleet.version

    # -- generating ----------------------------------------------------------------------------------------

    def rollout(self, step: int, draw_problem: DrawProblem) -> Iterator[Group | Progress]:
        """One step: its groups as they complete, and `Progress` every ``progress_s``. The step is over,
        and what is unfinished rests (or runs on, in the asynchronous modes), when this ends. A consumer
        that stops early leaves the pool within the step."""
        self._draw = draw_problem
        with self._locked():
            if not (
                self.controller.scheduler.in_step and self.controller.scheduler.step == step and self._pump
            ):
                self._begin(step)
        next_progress_s = self._clock() + self.config.progress_s
        over = False
        while not over:
            with self._locked():
                over = self.controller.scheduler.step_over()
                if not over:
                    self._turn(min(POLL_S, self.config.progress_s))
                groups = list(self.controller.take_surfaced())
            yield from groups
            if self._clock() >= next_progress_s:
                next_progress_s = self._clock() + self.config.progress_s
                yield self.progress()
        with self._locked():
            last = self.progress()
            self._end(step)
            groups = list(self.controller.take_surfaced())
        yield from groups
        yield last

    def _begin(self, step: int, ahead: bool = False) -> None:
        self._open = True
        self.fleet.news()
        self._step_started_s = self._clock()
        self._step_tokens = self.controller.counts["tokens"]
        # What is generated while the weights are being trained is trained on by the next ones.
        need = self.controller.begin_step(step, self.version + ahead)
        for _ in range(need):
            drawn = self._draw() if self._draw is not None else None
            if drawn is None:
                break
            self.controller.admit(*drawn)

    def _end(self, step: int) -> None:
        if self.config.mode == "partial":
            self._rest()
            self.controller.end_step()
            return
        self.controller.end_step()
        self.controller.check()
        self._begin(step + 1, ahead=True)
        if self._pump is None:
            self._pump = Pump(self._turn, self._lock)
            self._pump.start()

    def _rest(self) -> None:
        """Every worker hands everything back. One that dies meanwhile has reported all but its last
        slices."""
        self.controller.pausing = True
        try:
            self._pause_workers()
        finally:
            self.controller.pausing = False

    def _pause_workers(self) -> None:
        self._open = False
        for member in self.fleet.members:
            if member.ready and not member.asleep:
                then = functools.partial(self._reported, member)
                self.fleet.call(member, "pause", "its pause", self.config.call_timeout_s, then)
        self.fleet.until(lambda: not any(self.controller.holds), "the workers' pause")

    def progress(self) -> Progress:
        controller, scheduler = self.controller, self.controller.scheduler
        seconds = max(1e-9, self._clock() - self._step_started_s)
        tokens = controller.counts["tokens"] - self._step_tokens
        return Progress(
            step=scheduler.step,
            done=scheduler.done_in_step,
            wanted=scheduler.plan.target,
            groups_done=scheduler.groups_in_step,
            in_flight=scheduler.in_flight,
            waiting=len(controller.queue),
            workers=sum(m.ready for m in self.fleet.members),
            tokens=tokens,
            tokens_per_s=tokens / seconds,
            seconds_s=seconds,
            by_effort=controller.step_lengths(),
        )

    def settle(self, draw: int, dropped: str = "") -> None:
        """The recipe trained on this group, or dropped it for a reason. Each group it was given, exactly
        once."""
        with self._locked():
            self.controller.settle(draw, dropped)

    # -- weights and memory --------------------------------------------------------------------------------

    def publish(self, publication: Publication) -> list[Ack]:
        """All workers load it and acknowledge its version and checksum; `RunError` where one does not.

        At rest in ``partial``; ``one_step_off`` rests for it and goes on; ``in_flight`` changes weights
        under what runs. A worker that dies meanwhile loads it when it is replaced."""
        with self._locked():
            if self.fleet.asleep:
                raise RunError("rollout: weights cannot be published to sleeping workers: wake them first")
            if self.config.mode == "one_step_off":
                self._pause_workers()
            acks = self.fleet.publish(publication, self._turn)
            self._open = True
            return acks

    def sleep(self, level: int = 1) -> None:
        """Free the engines' memory; nothing may run. After level 2 the next `publish` brings the weights
        back."""
        with self._locked():
            if any(self.controller.holds):
                raise RunError("rollout: workers cannot sleep within a step")
            self.fleet.sleep(level)

    def wake(self) -> None:
        with self._locked():
            self.fleet.wake()

    def score(self, sequences: list[list[int]], starts: list[int]) -> list[list[float]]:
        """Log-probs of ``sequence[start:]`` under the workers' weights, spread over them; one that dies is
        asked again."""
        members, what = self.fleet.members, "its scores"
        parts: dict[int, list[list[float]]] = {}
        rows = [list(range(m.index, len(sequences), len(members))) for m in members]

        def all_there() -> bool:
            for member, mine in zip(members, rows, strict=True):
                asked = any(c.what == what for c in member.calls)
                if member.index not in parts and member.ready and not asked:
                    arguments = ([sequences[i] for i in mine], [starts[i] for i in mine])
                    then = functools.partial(parts.__setitem__, member.index)
                    self.fleet.call(member, "score", what, self.config.start_timeout_s, then, *arguments)
            return len(parts) == len(members)

        with self._locked():
            self.fleet.until(all_there, "the workers' scores")
        out: list[list[float]] = [[] for _ in sequences]
        for index, mine in enumerate(rows):
            for i, row in zip(mine, parts[index], strict=True):
                out[i] = row
        return out

    # -- checkpoint, metrics, end --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """JSON: everything in flight, the scheduler, the ledger. See `Controller.state_dict`."""
        with self._locked():
            self.controller.check()
            return {"controller": self.controller.state_dict(), "version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Before the first step. The weights of that version are published afterwards, as always."""
        with self._locked():
            self.controller.load_state_dict(state["controller"])
            self._snapshots = snapshots_in(state)

    def save_sandboxes(self) -> None:
        """Resting trajectories' sandboxes are snapshotted, so that the next `state_dict` names them as they are now.
        In modes in which trajectories run on, theirs are recovered by their calls instead."""
        with self._locked():
            for member in self.fleet.members:
                if member.ready and not member.asleep:
                    then = functools.partial(self._saved, member.index)
                    self.fleet.call(member, "save", "its snapshots", self.config.start_timeout_s, then)
            self.fleet.until(
                lambda: not any(c.what == "its snapshots" for m in self.fleet.members for c in m.calls),
                "the workers' snapshots",
            )

    def _saved(self, worker: int, states: list[SavedState]) -> None:
        for state in states:
            self.controller.saved(worker, state)

    def checkpointed(self, state: dict[str, Any]) -> None:
        """This `state_dict` is safely stored: snapshots that only the one before it named are deleted."""
        with self._locked():
            needed = snapshots_in(state)
            old, self._snapshots = sorted(self._snapshots - needed), needed
            ready = [m for m in self.fleet.members if m.ready and not m.asleep]
            if old and ready:
                what, limit_s = "its deletions", self.config.call_timeout_s
                self.fleet.call(ready[0], "drop_snapshots", what, limit_s, lambda _: None, old)

    @property
    def next_draw(self) -> int:
        """Ordinal of the next problem to draw: where the stream of problems stands."""
        return self.controller.ledger.next_draw

    def metrics(self) -> dict[str, float]:
        """Counts since the start."""
        out = {f"rollout/{name}": float(value) for name, value in self.controller.counts.items()}
        reports = [m.last for m in self.fleet.members if m.last is not None]
        out["rollout/busy_s"] = sum(m.busy_s for m in self.fleet.members)
        if 1 < len(self.fleet.members) <= WORKERS_SHOWN:
            out |= {f"rollout/busy_s/worker/{m.index}": m.busy_s for m in self.fleet.members}
        out["rollout/prefilled_tokens"] = float(sum(r.stats.prefilled_tokens for r in reports))
        out["rollout/abandoned_tools"] = float(sum(r.abandoned_tools for r in reports))
        return out | sandbox_metrics([r.sandboxes for r in reports if r.sandboxes])

    def close(self, over: bool = False) -> None:
        """``over``: nobody will go on with what is in flight, so that no sandbox is kept for it."""
        if self._pump is not None:
            self._pump.stop()
        self.fleet.close(over)

    # -- the loop ------------------------------------------------------------------------------------------

    def _locked(self) -> threading.RLock:
        if self._pump is not None:
            self._pump.check()
        return self._lock

    def _turn(self, wait_s: float) -> None:
        self.fleet.revive()
        if self._open:
            self._give_work()
        self.fleet.turn(wait_s)

    def _give_work(self) -> None:
        """Own work first for everybody, then others'; workers with least get first."""
        ready = sorted((m for m in self.fleet.members if m.ready and not m.asleep), key=self._held)
        work: dict[int, list[Any]] = {m.index: [] for m in ready if m.advances < self._calls}
        for steal in (False, True):
            for member in ready:
                if member.index in work:
                    self._fill(member, work[member.index], steal)
        if self.config.work_stealing and not len(self.controller.queue):
            self._steal(ready)
        for member in ready:
            if member.index in work and (self._held(member) or self._orders_wait(member)):
                self._advance(member, work[member.index])

    def _fill(self, member: Member, work: list[Any], steal: bool) -> None:
        for _ in range(self.config.in_flight_per_worker() - self._held(member)):
            item = self.controller.next_work(member.index, steal)
            if item is None:
                return
            work.append(item)

    def _steal(self, ready: list[Member]) -> None:
        for thief in ready:
            if self._held(thief) == 0 and not any(m.release for m in self.fleet.members):
                stolen = self.controller.steal(thief.index)
                if stolen is not None:
                    self.fleet.members[stolen[0]].release += stolen[1]

    def _advance(self, member: Member, work: list[Any]) -> None:
        told = self.controller.take_orders(member.index)
        orders = Orders(told.forget, told.discard, member.release, work)
        if not member.told:
            named = {id_: {"snapshot": id_} for id_ in self._snapshots}
            orders.keep, member.told = named | self.controller.sandboxes(), True
        member.release = []
        member.advances += 1

        def then(report: Report) -> None:
            member.advances -= 1
            self._reported(member, report)

        limit_s = self.config.call_timeout_s
        slice_ = (self.config.slice_s, DETERMINISTIC_SLICE) if self._in_step else (self.config.slice_s,)
        self.fleet.call(member, "advance", "its report", limit_s, then, orders, *slice_)

    def _reported(self, member: Member, report: Report) -> None:
        member.last = report
        member.busy_s += report.busy_s
        finished = self.controller.counts["finished"]
        self.controller.receive(member.index, report.events)
        if report.events:
            self.fleet.news(progress=self.controller.counts["finished"] > finished)

    def _held(self, member: Member) -> int:
        return len(self.controller.holds[member.index])

    def _orders_wait(self, member: Member) -> bool:
        orders = self.controller.orders[member.index]
        return bool(orders.forget or orders.discard or member.release)

    def _holding(self) -> list[str]:
        held = [f"worker {m.index} has {self._held(m)} trajectories" for m in self.fleet.members]
        return [*held, f"{len(self.controller.queue)} wait"]


def snapshots_in(state: dict[str, Any]) -> set[str]:
    """Ids of the sandboxes' snapshots that a pool's `state_dict` names."""
    trajectories = [t for group in state["controller"]["groups"] for t in group["trajectories"]]
    return {t["sandbox"]["snapshot"] for t in trajectories if (t["sandbox"] or {}).get("snapshot")}


def sandbox_metrics(of_workers: list[dict[str, float]]) -> dict[str, float]:
    """Counts of all workers together, their mean of medians and shares, their largest 99th percentile."""
    out: dict[str, float] = {}
    for name in sorted({name for one in of_workers for name in one}):
        values = [one[name] for one in of_workers if name in one]
        if name.endswith("_p99_s"):
            out[f"sandbox/{name}"] = max(values)
        elif name.endswith(("_s", "_share")):
            out[f"sandbox/{name}"] = sum(values) / len(values)
        else:
            out[f"sandbox/{name}"] = sum(values)
    return out
