"""Everything the pool knows, and decides, without touching a process: trajectories, groups, queue, ledger.

The pool tells it of events, of workers that died and of free room; it answers with work. It holds every
token that a worker has reported, so a trajectory can go on anywhere from what is here. Pure: no clock, no
I/O, no processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from k3rl.config.rollout import RolloutConfig
from k3rl.errors import RunError
from k3rl.types import Group, Problem, Status, StopReason, Trajectory, stream_key
from rollout.agent_loop import TrajectoryWork
from rollout.dispatch import WorkQueue
from rollout.ledger import Ledger
from rollout.length import LengthBook
from rollout.record import (
    Event,
    Finished,
    Record,
    Released,
    Sampled,
    problem_from_json,
    problem_to_json,
    trajectory_from_json,
    trajectory_to_json,
)
from rollout.scheduler import Plan, Scheduler
from rollout.worker import SavedState

STATE_FORMAT = 1


def plan_of(config: RolloutConfig) -> Plan:
    return Plan(
        groups=config.groups,
        samples=config.samples,
        completion=config.lambda_,
        min_groups=config.min_groups,
        max_staleness=config.max_staleness,
        on_stale=config.on_stale,
        pause_rest=config.mode == "partial",
    )


@dataclass(slots=True)
class Entry:
    """A trajectory in flight. ``worker`` has it now; ``home`` had it last, or should have it; ``faults``
    counts workers that died with it since its last new token."""

    problem: Problem
    record: Record
    home: int
    dispatch: int = 0
    worker: int | None = None
    faults: int = 0
    sampled_at_dispatch: int = 0
    expected: float = 0.0  # tokens it adds to its home's load

    @property
    def trajectory(self) -> Trajectory:
        return self.record.trajectory


@dataclass(slots=True)
class WorkerOrders:
    """What a worker is to be told besides new work."""

    forget: list[str] = field(default_factory=list)
    discard: list[str] = field(default_factory=list)


class Controller:
    """See the module's docstring. ``surfaced`` are complete groups on their way to the recipe: the pool
    takes them out; they stay in ``handed_over`` until they are settled."""

    def __init__(self, config: RolloutConfig, run_seed: int) -> None:
        self.config, self.run_seed = config, run_seed
        self.scheduler = Scheduler(plan_of(config))
        self.ledger = Ledger()
        self.lengths = LengthBook(default=config.max_tokens / 2)
        self.queue = WorkQueue(config.workers)
        self.entries: dict[str, Entry] = {}  # in flight
        self.groups: dict[int, Group] = {}  # incomplete
        self.surfaced: deque[Group] = deque()
        self.handed_over: dict[int, Group] = {}
        self.holds: list[set[str]] = [set() for _ in range(config.workers)]
        self.orders = [WorkerOrders() for _ in range(config.workers)]
        self.counts: dict[str, int] = dict.fromkeys(
            ("tokens", "finished", "failed", "restarted", "stale", "worker_faults", "stolen", "void_events"),
            0,
        )
        self.pausing = False  # what comes back from workers rests
        self._step_lengths: dict[str, list[int]] = {}  # effort -> sampled tokens, trajectories
        self._load = [0.0] * config.workers
        self._suspects: set[str] = set()  # those with whom workers died repeatedly
        self._quarantine: deque[str] = deque()  # of the suspects, those that wait
        self._isolator: int | None = None  # the worker that tries them one at a time

    # -- a step --------------------------------------------------------------------------------------------

    def begin_step(self, step: int, version: int) -> int:
        """Queue what was paused; returns how many groups to `admit`."""
        self._step_lengths = {}
        begun = self.scheduler.begin_step(step, version)
        for id_ in begun.stale:
            self._retire(
                id_, StopReason.STALE, f"a token is older than max_staleness {self.config.max_staleness}"
            )
        for draw in begun.completed:
            self._surface(draw)
        for id_ in begun.restart:
            self._restart(id_)
        for id_ in [*begun.resume, *begun.restart]:
            self._enqueue(id_, resumed=True)
        return begun.need_groups

    def admit(self, draw: int, problem: Problem) -> None:
        """A new group, at home with the least loaded worker."""
        step = self.scheduler.step
        ids = self.scheduler.admit(draw)
        self.ledger.opened(draw, problem.id)
        home = min(range(len(self._load)), key=lambda w: (self._load[w], w))
        trajectories = [
            Trajectory(problem.id, draw, sample, problem.domain, problem.effort, [], started_step=step)
            for sample in range(len(ids))
        ]
        self.groups[draw] = Group(problem, draw, trajectories)
        for id_, trajectory in zip(ids, trajectories, strict=True):
            self.entries[id_] = Entry(problem, Record(trajectory), home)
            self._enqueue(id_, resumed=False)

    def end_step(self) -> None:
        """Close the step. Every worker that was told to pause has answered, or died."""
        for id_ in self.scheduler.end_step():
            entry = self.entries[id_]
            if entry.worker is not None:
                raise RunError(
                    f"rollout: trajectory {id_} still runs on worker {entry.worker} at the step's end"
                )
            self._dequeue(id_)
            entry.trajectory.status = Status.PAUSED
        self.check()

    def check(self) -> None:
        """Nothing is lost or twice: scheduler, ledger, groups and entries agree."""
        self.scheduler.check()
        self.ledger.check(self.groups, self.handed_over)
        if self.scheduler.open_draws() != set(self.groups):
            raise RunError("rollout: the scheduler's groups are not those that are held")
        if len(self.entries) != self.scheduler.in_flight:
            raise RunError(
                f"rollout: {self.scheduler.in_flight} trajectories in flight, {len(self.entries)} are held"
            )

    # -- work ----------------------------------------------------------------------------------------------

    def next_work(self, worker: int, steal: bool) -> TrajectoryWork | None:
        """A waiting trajectory for this worker, now its own."""
        id_ = self._next_suspect(worker) if self._quarantine else self.queue.take(worker, steal)
        if id_ is None:
            return None
        entry = self.entries[id_]
        if entry.home != worker:
            self.orders[entry.home].forget.append(id_)
            self._move(entry, worker)
        entry.worker = worker
        entry.dispatch += 1
        entry.sampled_at_dispatch = entry.record.sampled
        trajectory = entry.trajectory
        trajectory.status = Status.RUNNING
        self.holds[worker].add(id_)
        key = stream_key(self.run_seed, trajectory.problem_id, trajectory.draw, trajectory.sample)
        return TrajectoryWork(entry.problem, trajectory, key, entry.dispatch)

    def take_orders(self, worker: int) -> WorkerOrders:
        orders, self.orders[worker] = self.orders[worker], WorkerOrders()
        return orders

    def receive(self, worker: int, events: Iterable[Event]) -> None:
        """What a worker reports. Events of a dispatch that is over are void: somebody else has the
        trajectory."""
        for event in events:
            entry = self.entries.get(event.id)
            if entry is None or entry.worker != worker or entry.dispatch != event.dispatch:
                self.counts["void_events"] += 1
                continue
            entry.record.apply(event)
            if isinstance(event, Sampled):
                self.counts["tokens"] += len(event.token_ids)
                self.scheduler.on_sampled(event.id, event.version)
                entry.faults = 0
                self._suspects.discard(event.id)
            elif isinstance(event, Finished):
                self._finish(event.id, entry)
            elif isinstance(event, Released):
                self._let_go(event.id, entry)
                if not event.parked:
                    entry.sampled_at_dispatch = entry.record.sampled
                if self._runs_on():
                    self._enqueue(event.id, resumed=True)

    def lost(self, worker: int) -> None:
        """A worker died. Its trajectories go on elsewhere from what is here; one that brought down several
        workers without a new token fails."""
        self.counts["worker_faults"] += 1
        self.orders[worker] = WorkerOrders()
        for id_ in sorted(self.holds[worker], key=_age):
            entry = self.entries[id_]
            self._let_go(id_, entry)
            entry.faults += 1
            if entry.faults > 1:
                self._suspects.add(id_)
            if entry.faults >= self.config.max_retries:
                self._retire(
                    id_, StopReason.ERROR, f"its worker died {entry.faults} times without a new token"
                )
                draw = self.scheduler.on_finished(id_)
                if draw is not None:
                    self._surface(draw)
            elif self._runs_on():
                self._enqueue(id_, resumed=True)
            else:
                entry.trajectory.status = Status.PAUSED

    def steal(self, thief: int) -> tuple[int, list[str]] | None:
        """Nothing waits and ``thief`` is idle: whom to take running trajectories from, and which."""
        victim = max(range(len(self.holds)), key=lambda w: len(self.holds[w]))
        held = self.holds[victim]
        if victim == thief or len(held) < 2:
            return None
        movable = [
            i
            for i in held
            if not self.entries[i].record.awaits_environment and self.entries[i].home == victim
        ]
        # Longest to go first, and of those the shortest so far: worth the move, and cheap to compute again.
        movable.sort(key=lambda i: (self._expected(self.entries[i]) * -1, self.entries[i].record.length))
        chosen = movable[: len(held) // 2]
        for id_ in chosen:
            self._move(self.entries[id_], thief)
        self.counts["stolen"] += len(chosen)
        return (victim, chosen) if chosen else None

    def step_lengths(self) -> dict[str, float]:
        """Mean sampled tokens of what finished in this step, by effort."""
        return {effort: tokens / n for effort, (tokens, n) in sorted(self._step_lengths.items())}

    # -- settling ------------------------------------------------------------------------------------------

    def take_surfaced(self) -> Iterator[Group]:
        while self.surfaced:
            yield self.surfaced.popleft()

    def settle(self, draw: int, dropped: str = "") -> None:
        """The recipe trained on a group, or dropped it for a reason."""
        self.ledger.settle(draw, dropped)
        if self.handed_over.pop(draw, None) is None:
            raise RunError(f"rollout: group {draw} was settled before it was complete")

    # -- checkpoint ----------------------------------------------------------------------------------------

    def saved(self, worker: int, state: SavedState) -> None:
        """An environment that rests at its home was saved. One that went on meanwhile keeps what it has."""
        entry = self.entries.get(state.id)
        if entry is not None and (entry.worker, entry.home, entry.record.length) == (None, worker, state.at):
            entry.trajectory.environment_state, entry.trajectory.sandbox = (
                state.environment_state,
                state.sandbox,
            )

    def sandboxes(self) -> dict[str, dict[str, str]]:
        """By sandbox id: the records by which trajectories in flight find theirs."""
        records = [e.trajectory.sandbox for e in self.entries.values()]
        return {r["id"]: r for r in records if r}

    def state_dict(self) -> dict[str, Any]:
        """JSON, valid at any moment: what runs is saved as far as it was reported."""
        groups = {**self.groups, **self.handed_over}
        return {
            "format": STATE_FORMAT,
            "run_seed": self.run_seed,
            "scheduler": self.scheduler.state_dict(),
            "ledger": self.ledger.state_dict(),
            "lengths": self.lengths.state_dict(),
            "handed_over": sorted(self.handed_over),
            "groups": [
                {
                    "draw": group.draw,
                    "problem": problem_to_json(group.problem),
                    "trajectories": [trajectory_to_json(t) for t in group.trajectories],
                }
                for _, group in sorted(groups.items())
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Into a fresh controller. Groups that were handed over and not settled are handed over again."""
        if state["format"] != STATE_FORMAT:
            raise RunError(f"rollout: the checkpoint has format {state['format']}, this is {STATE_FORMAT}")
        if state["run_seed"] != self.run_seed:
            raise RunError(f"rollout: the checkpoint is of run seed {state['run_seed']}, not {self.run_seed}")
        if self.entries or self.handed_over:
            raise RunError("rollout: a checkpoint is loaded before the first step")
        self.scheduler.load_state_dict(state["scheduler"])
        self.ledger.load_state_dict(state["ledger"])
        self.lengths.load_state_dict(state["lengths"])
        handed_over = set(state["handed_over"])
        for data in state["groups"]:
            draw, problem = data["draw"], problem_from_json(data["problem"])
            group = Group(problem, draw, [trajectory_from_json(t) for t in data["trajectories"]])
            if draw in handed_over:
                self.handed_over[draw] = group
                self.surfaced.append(group)
                continue
            self.groups[draw] = group
            home = draw % len(self._load)
            for trajectory in group.trajectories:
                if not trajectory.done:
                    trajectory.status = Status.PAUSED
                    self.entries[trajectory.id] = Entry(problem, Record(trajectory), home)
        self.check()

    # -- inside --------------------------------------------------------------------------------------------

    def _runs_on(self) -> bool:
        """Is what comes back from a worker to go on at once? Not at the end of a synchronous step."""
        return not self.scheduler.plan.pause_rest or (self.scheduler.in_step and not self.pausing)

    def _next_suspect(self, worker: int) -> str | None:
        """One worker tries the suspects, one at a time among those that proved harmless; the others go on."""
        if self._isolator is None:
            self._isolator = worker
        if worker != self._isolator:
            return self.queue.take(worker, steal=True)
        if self._suspects & self.holds[worker]:
            return None
        id_ = self._quarantine.popleft()
        if not self._quarantine:
            self._isolator = None
        return id_

    def _expected(self, entry: Entry) -> float:
        return self.lengths.remaining(entry.problem, entry.trajectory.draw, entry.record.sampled)

    def _enqueue(self, id_: str, resumed: bool) -> None:
        entry, trajectory = self.entries[id_], self.entries[id_].trajectory
        trajectory.status = Status.PAUSED if entry.record.length else Status.QUEUED
        if id_ in self._suspects:
            self._quarantine.append(id_)
            return
        self._set_load(entry, self._expected(entry))
        probe = not self.lengths.known(entry.problem, trajectory.draw) and trajectory.sample == 0
        ordered = self.config.longest_first
        self.queue.add(
            id_,
            trajectory.draw,
            trajectory.sample,
            entry.home,
            resumed=resumed,
            expected=entry.expected if ordered else 0.0,
            probe=probe and ordered,
        )

    def _finish(self, id_: str, entry: Entry) -> None:
        trajectory = entry.trajectory
        self.counts["finished"] += 1
        self.counts["failed"] += trajectory.status is Status.FAILED
        self._over(id_, entry)
        if trajectory.status is not Status.FAILED:
            seen = self._step_lengths.setdefault(str(trajectory.effort or ""), [0, 0])
            seen[0] += entry.record.sampled
            seen[1] += 1
            self.lengths.finished(entry.problem, trajectory.draw, entry.record.sampled)
            if self.config.longest_first:
                self.queue.reorder(trajectory.draw, self.lengths.total(entry.problem, trajectory.draw))
        draw = self.scheduler.on_finished(id_)
        if draw is not None:
            self._surface(draw)

    def _retire(self, id_: str, reason: StopReason, error: str) -> None:
        """It fails by our decision; its tokens stay to be looked at. One that had finished can become
        stale too."""
        draw, sample = _age(id_)
        entry = self.entries.get(id_)
        trajectory = self.groups[draw].trajectories[sample] if entry is None else entry.trajectory
        self.counts["stale" if reason is StopReason.STALE else "failed"] += 1
        trajectory.status, trajectory.stop_reason, trajectory.error = Status.FAILED, reason, error
        if entry is not None:
            self.orders[entry.home if entry.worker is None else entry.worker].discard.append(id_)
            self._let_go(id_, entry)
            self._over(id_, entry)

    def _over(self, id_: str, entry: Entry) -> None:
        self._let_go(id_, entry)
        self._dequeue(id_)
        self._suspects.discard(id_)
        self._set_load(entry, 0.0)
        entry.trajectory.finished_step = self.scheduler.step
        del self.entries[id_]

    def _restart(self, id_: str) -> None:
        """From its prompt again, as if nothing had been sampled; also one that had finished."""
        draw, sample = _age(id_)
        group, entry = self.groups[draw], self.entries.get(id_)
        old = group.trajectories[sample]
        fresh = Trajectory(
            old.problem_id, draw, sample, old.domain, old.effort, [], started_step=self.scheduler.step
        )
        group.trajectories[sample] = fresh
        home, dispatch = draw % len(self._load), 0
        if entry is not None:
            home, dispatch = entry.home, entry.dispatch
            self.orders[entry.home if entry.worker is None else entry.worker].discard.append(id_)
            self._let_go(id_, entry)
            self._dequeue(id_)
            self._set_load(entry, 0.0)
        self.counts["restarted"] += 1
        self.entries[id_] = Entry(group.problem, Record(fresh), home, dispatch)

    def _surface(self, draw: int) -> None:
        group = self.groups.pop(draw)
        if not group.done:
            raise RunError(f"rollout: group {draw} was handed over with unfinished trajectories")
        self.lengths.group_over(draw)
        self.handed_over[draw] = group
        self.surfaced.append(group)

    def _dequeue(self, id_: str) -> None:
        self.queue.remove(id_)
        if id_ in self._suspects and id_ in self._quarantine:
            self._quarantine.remove(id_)
            if not self._quarantine:
                self._isolator = None

    def _let_go(self, id_: str, entry: Entry) -> None:
        if entry.worker is not None:
            self.holds[entry.worker].discard(id_)
            entry.worker = None

    def _move(self, entry: Entry, home: int) -> None:
        expected = entry.expected
        self._set_load(entry, 0.0)
        entry.home = home
        self._set_load(entry, expected)

    def _set_load(self, entry: Entry, expected: float) -> None:
        self._load[entry.home] += expected - entry.expected
        entry.expected = expected


def _age(id_: str) -> tuple[int, int]:
    draw, _, sample = id_.partition(".")
    return int(draw), int(sample)
