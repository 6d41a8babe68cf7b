"""Which trajectories run, rest or are finished: partial rollout as a pure state machine.

Source: spec/02 §3 (K3 report §4.1.2). N problems with K samples each are kept running. A step

1. resumes what the last step paused, oldest first;
2. admits whole new groups until at least N·K trajectories are in flight (so fewer than N·K + K are);
3. is over when ⌈λ·N·K⌉ trajectories were completed in it, and ``min_groups`` groups were;
4. pauses the rest, which keep everything they have.

A group is handed over at the moment its K-th trajectory completes, whatever step each of them began in. So a
trajectory may span policy versions; how old its oldest token may become is ``max_staleness``.

No clock, no I/O, no processes: the pool tells it what happened and does what it answers. Every trajectory
is in one place at a time; a call that would lose one or count one twice is a `RunError`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from k3rl.errors import RunError

OnStale = Literal["drop", "restart", "keep"]


class Place(StrEnum):
    RUNNING = "running"  # with a worker, or in the queue for one
    PAUSED = "paused"  # with the controller, first to run in the next step
    DONE = "done"  # finished, waiting for its siblings


@dataclass(frozen=True, slots=True)
class Plan:
    """``pause_rest`` false is the asynchronous way: a step's end stops nobody, later completions count for
    the next step."""

    groups: int
    samples: int
    completion: float = 1.0
    min_groups: int = 1
    max_staleness: int | None = None
    on_stale: OnStale = "drop"
    pause_rest: bool = True

    def __post_init__(self) -> None:
        if self.groups < 1 or self.samples < 1:
            raise ValueError(f"groups and samples must be positive, got {self.groups} and {self.samples}")
        if not 0 < self.completion <= 1:
            raise ValueError(f"lambda must lie in (0, 1], got {self.completion}")
        if not 0 <= self.min_groups <= self.groups:
            raise ValueError(f"min_groups must lie in [0, {self.groups}], got {self.min_groups}")

    @property
    def in_flight(self) -> int:
        """N·K."""
        return self.groups * self.samples

    @property
    def target(self) -> int:
        """⌈λ·N·K⌉; 0.1 · 30 is 3, whatever floating point says."""
        return max(1, math.ceil(self.completion * self.in_flight - 1e-9))


@dataclass(slots=True)
class _Member:
    draw: int
    sample: int
    place: Place
    oldest_version: int | None = None  # of its sampled tokens

    @property
    def id(self) -> str:
        return f"{self.draw}.{self.sample}"


@dataclass(frozen=True, slots=True)
class StepStart:
    """What a step begins with. The pool does it in this order, then draws ``need_groups`` problems.

    resume      paused trajectories to run on, oldest first; they keep their tokens.
    restart     to run from their prompts, their tokens being too old; also in order of age.
    stale       dropped: the pool marks them failed with stop reason `STALE`.
    completed   draws of groups that a drop completed.
    """

    resume: list[str]
    restart: list[str]
    stale: list[str]
    completed: list[int]
    need_groups: int


@dataclass(slots=True)
class Scheduler:
    """See the module's docstring. Order of calls: `begin_step`, `admit` for each problem drawn,
    `on_finished` and `on_sampled` as things happen, `end_step` once `step_over`; again."""

    plan: Plan
    step: int = -1
    in_step: bool = False
    done_in_step: int = 0
    groups_in_step: int = 0
    next_draw: int = 0
    _members: dict[str, _Member] = field(default_factory=dict)  # of groups that are not complete
    _open: dict[int, int] = field(default_factory=dict)  # draw -> members not done
    _in_flight: int = 0
    _reentered: bool = False

    # -- a step --------------------------------------------------------------------------------------------

    def begin_step(self, step: int, version: int) -> StepStart:
        """``version`` is the trainer's when it will train on this step's groups."""
        if self._reentered and step == self.step:
            self._reentered = False  # a checkpoint from inside this step: its counts go on
        elif self.in_step or step <= self.step:
            raise RunError(f"rollout: step {step} cannot begin, step {self.step} is {self._phase()}")
        else:
            self.step, self.in_step = step, True
            if self.plan.pause_rest:
                self.done_in_step = self.groups_in_step = 0
        restart, stale, completed = self._retire_stale(version)
        resume = []
        for member in self._sorted():
            if member.place is Place.PAUSED:
                member.place = Place.RUNNING
                if member.id not in restart:
                    resume.append(member.id)
        return StepStart(resume, list(restart), stale, completed, self.need_groups())

    def need_groups(self) -> int:
        """So many whole groups are missing for N·K trajectories in flight, counting those this step
        completed."""
        started = self._in_flight + (self.done_in_step if self.plan.pause_rest else 0)
        return max(0, -(-(self.plan.in_flight - started) // self.plan.samples))

    def admit(self, draw: int) -> list[str]:
        """A new group: its K trajectories' ids. Draws come in order, each once."""
        if not self.in_step:
            raise RunError(f"rollout: draw {draw} was admitted outside a step")
        if draw != self.next_draw:
            raise RunError(f"rollout: draw {draw} came where draw {self.next_draw} was due")
        if self._in_flight >= self.plan.in_flight:
            raise RunError(f"rollout: draw {draw} was admitted with {self._in_flight} trajectories in flight")
        members = [_Member(draw, sample, Place.RUNNING) for sample in range(self.plan.samples)]
        self._members.update((m.id, m) for m in members)
        self._open[draw] = len(members)
        self._in_flight += len(members)
        self.next_draw += 1
        return [m.id for m in members]

    def on_sampled(self, id_: str, version: int) -> None:
        """Tokens of this version came. The oldest version is what staleness is measured by."""
        member = self._member(id_)
        if member.oldest_version is None or version < member.oldest_version:
            member.oldest_version = version

    def on_finished(self, id_: str) -> int | None:
        """A trajectory ended, however. Returns its draw if that completed the group.

        Those that end while they are being paused count for the step that is ending."""
        member = self._member(id_)
        if member.place is Place.DONE:
            raise RunError(f"rollout: trajectory {id_} finished twice")
        self.done_in_step += 1
        return self._finish(member)

    def step_over(self) -> bool:
        """Enough is complete, or nothing is left that could become so."""
        if not self.in_step:
            return True
        enough = self.done_in_step >= self.plan.target and self.groups_in_step >= self.plan.min_groups
        return enough or self._in_flight == 0

    def end_step(self) -> list[str]:
        """Close the step; ids of those to pause, oldest first."""
        if not self.in_step:
            raise RunError(f"rollout: step {self.step} ended twice")
        if not self.step_over():
            raise RunError(
                f"rollout: step {self.step} ended with {self.done_in_step} of {self.plan.target} done"
            )
        self.in_step = False
        if not self.plan.pause_rest:  # what completes from now on is the next step's
            self.done_in_step = self.groups_in_step = 0
            return []
        paused = [m for m in self._sorted() if m.place is Place.RUNNING]
        for member in paused:
            member.place = Place.PAUSED
        return [m.id for m in paused]

    # -- looking -------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Trajectories running or paused."""
        return self._in_flight

    def place(self, id_: str) -> Place:
        return self._member(id_).place

    def open_draws(self) -> set[int]:
        """Draws whose groups are not complete."""
        return set(self._open)

    def check(self) -> None:
        """Counts against places, over everything. `RunError` where they differ."""
        in_flight, unfinished = 0, dict.fromkeys(self._open, 0)
        for member in self._members.values():
            if member.draw not in unfinished:
                raise RunError(f"rollout: trajectory {member.id} belongs to no open group")
            if member.place is not Place.DONE:
                in_flight += 1
                unfinished[member.draw] += 1
        if in_flight != self._in_flight or unfinished != self._open:
            raise RunError(f"rollout: {self._in_flight} trajectories should be in flight, {in_flight} are")
        if len(self._members) != len(self._open) * self.plan.samples:
            raise RunError("rollout: an open group lacks a trajectory")

    # -- checkpoint ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """JSON. Valid at any moment; what runs is saved as paused, since nobody runs it after a restart."""
        return {
            "samples": self.plan.samples,
            "step": self.step,
            "in_step": self.in_step,
            "done_in_step": self.done_in_step,
            "groups_in_step": self.groups_in_step,
            "next_draw": self.next_draw,
            "members": [[m.draw, m.sample, m.place is Place.DONE, m.oldest_version] for m in self._sorted()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """``groups`` and ``completion`` may differ from the saved run's, ``samples`` may not (`RunError`)."""
        if state["samples"] != self.plan.samples:
            raise RunError(
                f"rollout: the checkpoint's groups have {state['samples']} samples, the config asks for "
                f"{self.plan.samples}"
            )
        self.step, self.in_step = state["step"], state["in_step"]
        self.done_in_step, self.groups_in_step = state["done_in_step"], state["groups_in_step"]
        self.next_draw, self._reentered = state["next_draw"], state["in_step"]
        self._members, self._open, self._in_flight = {}, {}, 0
        for draw, sample, done, oldest in state["members"]:
            member = _Member(draw, sample, Place.DONE if done else Place.PAUSED, oldest)
            self._members[member.id] = member
            self._open[draw] = self._open.get(draw, 0) + (not done)
            self._in_flight += not done
        self.check()

    # -- inside --------------------------------------------------------------------------------------------

    def _retire_stale(self, version: int) -> tuple[dict[str, None], list[str], list[int]]:
        """Apply the cap to everything that has tokens, finished ones that wait for siblings included: so
        no token that is trained on can be older."""
        restart: dict[str, None] = {}
        stale: list[str] = []
        completed: list[int] = []
        cap = self.plan.max_staleness
        if cap is None or self.plan.on_stale == "keep":
            return restart, stale, completed
        for member in self._sorted():
            if member.oldest_version is None or version - member.oldest_version <= cap:
                continue
            if self.plan.on_stale == "restart":
                self._reopen(member)
                restart[member.id] = None
                continue
            stale.append(member.id)
            member.oldest_version = None  # its tokens are not trained on any more
            if member.place is not Place.DONE:
                draw = self._finish(member)
                completed += [] if draw is None else [draw]
        return restart, stale, completed

    def _reopen(self, member: _Member) -> None:
        if member.place is Place.DONE:
            self._open[member.draw] += 1
            self._in_flight += 1
        member.place, member.oldest_version = Place.PAUSED, None

    def _finish(self, member: _Member) -> int | None:
        member.place = Place.DONE
        self._in_flight -= 1
        self._open[member.draw] -= 1
        if self._open[member.draw]:
            return None
        del self._open[member.draw]
        for sample in range(self.plan.samples):
            del self._members[f"{member.draw}.{sample}"]
        self.groups_in_step += 1
        return member.draw

    def _member(self, id_: str) -> _Member:
        member = self._members.get(id_)
        if member is None:
            raise RunError(f"rollout: trajectory {id_} is in no open group; was it finished twice?")
        return member

    def _sorted(self) -> Iterator[_Member]:
        """Oldest first."""
        return iter(sorted(self._members.values(), key=lambda m: (m.draw, m.sample)))

    def _phase(self) -> str:
        return "still running" if self.in_step else "over"
