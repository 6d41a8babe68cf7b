"""The workers' lives: they are started, called with deadlines, and replaced when they die or do not answer.

Knows nothing of trajectories: who owns the fleet is told of a worker that was lost, and gives the ready ones
their work. A call says what it is for, when it must be answered by, and what is done with the answer. Calls to
one worker are done in the order they were made. A worker is ready once it said who it is and acknowledged
the weights that are published now; a replacement loads them before it does anything else.

Owner of what: a call is the fleet's from `call` until its answer was taken in or its worker was replaced.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from k3rl.config.rollout import RolloutConfig
from k3rl.errors import RunError
from k3rl.weights import Ack, Publication
from rollout.transport import Transport, WorkerDied
from rollout.worker import Hello, Report

log = logging.getLogger(__name__)

CALLS_UNDER_WAY = 2
"""Slices that are asked of a worker at once, so that it works on while its last report is read."""
POLL_S = 0.5
SAME_FAILURES = 3
"""Workers that fail with the same words one after another, nothing finished between: the run stops."""
CLOSE_S = 20.0
"""Workers that have not closed their environments by then are killed."""


@dataclass(slots=True)
class _Call:
    ticket: Any
    what: str
    deadline_s: float
    then: Callable[[Any], None]


@dataclass(slots=True)
class Member:
    """A worker as its owner sees it. ``ready``: it has the current weights and takes orders. ``advances``
    counts slices under way; ``release`` are trajectories it is about to be asked back; ``told`` which sandboxes are
    still needed."""

    index: int
    calls: deque[_Call] = field(default_factory=deque)
    ready: bool = False
    dead: bool = False
    asleep: bool = False
    told: bool = False
    advances: int = 0
    release: list[str] = field(default_factory=list)
    last: Report | None = None
    busy_s: float = 0.0


class Fleet:
    """``on_lost`` is called with the index of each worker that died, before it is replaced; ``on_wait`` says
    in words what else its owner waits for. ``version`` is that of the weights that workers start with."""

    def __init__(
        self,
        config: RolloutConfig,
        transport: Transport,
        version: int,
        clock: Callable[[], float],
        on_lost: Callable[[int], None],
        on_wait: Callable[[], list[str]],
    ) -> None:
        self.config, self.version, self.transport = config, version, transport
        self._clock, self._on_lost, self._on_wait = clock, on_lost, on_wait
        self.members = [Member(i) for i in range(config.workers)]
        self.asleep = False
        self._publication: Publication | None = None
        self._acks: dict[int, Ack] = {}
        self._hello: Hello | None = None
        self._faults_in_row = 0
        self._failures: list[str] = []  # what exceptions said, since something was finished
        self._last_news_s = clock()
        for member in self.members:
            self._start(member)

    # -- calls ---------------------------------------------------------------------------------------------

    def call(
        self,
        member: Member,
        method: str,
        what: str,
        timeout_s: float,
        then: Callable[[Any], None],
        *arguments: Any,
    ) -> None:
        """``what`` names the answer in messages; ``then`` gets it, within some later `turn`."""
        try:
            ticket = self.transport.call(member.index, method, *arguments)
        except Exception as error:  # a dead actor can refuse a call at once
            self.fault(member, f"{what} could not be asked for: {type(error).__name__}: {error}")
            return
        ahead_s = self.config.call_timeout_s * len(member.calls)
        member.calls.append(_Call(ticket, what, self._clock() + timeout_s + ahead_s, then))

    def everywhere(self, method: str, *arguments: Any) -> None:
        """Call it on all ready workers and wait until each has done it, or died."""
        for member in self.members:
            if member.ready:
                limit_s = self.config.start_timeout_s
                self.call(member, method, f"its {method}", limit_s, lambda _: None, *arguments)
        self.until(lambda: not any(m.calls for m in self.members if m.ready), f"every worker's {method}")

    def turn(self, wait_s: float) -> None:
        """Replace the dead, wait for an answer, take it in, look at the deadlines."""
        first = [(m, m.calls[0]) for m in self.members if m.calls]
        now = self._clock()
        wait_s = max(0.0, min([wait_s, *(c.deadline_s - now for _, c in first)]))
        arrived = set(self.transport.wait([c.ticket for _, c in first], wait_s))
        for member, call in first:
            if call.ticket in arrived:
                self._take(member, call)
        now = self._clock()
        for member in self.members:
            if member.calls and now > member.calls[0].deadline_s:
                self.fault(member, f"{member.calls[0].what} did not come in time", stacks=True)
        if now - self._last_news_s > self.config.stall_timeout_s:
            raise RunError(
                f"rollout: nothing happened for {now - self._last_news_s:.0f} s; {self._waiting_for()}"
            )

    def until(self, done: Callable[[], bool], what: str, turn: Callable[[float], None] | None = None) -> None:
        """Turn until it is so. Bounded: every call has its deadline, and the whole wait has one too."""
        limit_s = self._clock() + self.config.start_timeout_s + self.config.call_timeout_s * CALLS_UNDER_WAY
        while not done():
            if self._clock() > limit_s:
                raise RunError(f"rollout: {what} did not come; {self._waiting_for()}")
            self.revive()
            (turn or self.turn)(POLL_S)

    def _take(self, member: Member, call: _Call) -> None:
        try:
            value = self.transport.result(call.ticket)
        except RunError:
            raise
        except WorkerDied as error:
            self.fault(member, f"it died during {call.what}: {error}")
        except Exception as error:  # the border of the worker: its failure is the worker's end, not the run's
            why = f"{call.what} failed: {type(error).__name__}: {error}"
            self._failures.append(why)
            if (
                self._failures[-SAME_FAILURES:] == [why] * SAME_FAILURES
            ):  # no accident: the next will fail too
                raise RunError(f"rollout: every worker fails alike: {why}") from error
            self.fault(member, why)
        else:
            member.calls.popleft()
            for later in member.calls:  # calls are done one after another
                later.deadline_s = max(later.deadline_s, self._clock() + self.config.call_timeout_s)
            call.then(value)

    # -- lives ---------------------------------------------------------------------------------------------

    def revive(self) -> None:
        """Start replacements of the dead. Not while the fleet sleeps: their memory is somebody else's."""
        for member in self.members:
            if member.dead and not self.asleep:
                self._start(member)

    def news(self, progress: bool = False) -> None:
        """Something happened; ``progress``: something was finished."""
        self._last_news_s = self._clock()
        if progress:
            self._faults_in_row = 0
            self._failures.clear()

    def fault(self, member: Member, why: str, stacks: bool = False) -> None:
        """Kill it, to be replaced; what it had goes on from what its owner holds."""
        if stacks and (text := self.transport.stacks(member.index)):
            log.warning("rollout worker %d does not answer; it was here:\n%s", member.index, text)
        log.warning("rollout worker %d is replaced: %s", member.index, why)
        self.transport.kill(member.index)
        member.calls.clear()
        member.release, member.advances = [], 0
        member.ready, member.dead = False, True
        self._acks.pop(member.index, None)
        self._faults_in_row += 1
        if self._faults_in_row > self.config.max_worker_faults:
            raise RunError(
                f"rollout: {self._faults_in_row} workers died and nothing finished between; last: {why}"
            )
        self._on_lost(member.index)

    def _start(self, member: Member) -> None:
        member.dead = member.ready = member.asleep = member.told = False
        self.transport.start(member.index)
        limit_s = self.config.start_timeout_s
        self.call(member, "hello", "its start", limit_s, lambda hello: self._started(member, hello))

    def _started(self, member: Member, hello: Hello) -> None:
        if self._hello is None:
            self._hello = hello
        self._hello.handshake.require(hello.handshake, hello.name)
        self.news()
        if self._publication is not None:
            self._load(member, self._publication)
        elif hello.version != self.version:
            raise RunError(f"{hello.name} starts with weights version {hello.version}, not {self.version}")
        else:
            member.ready = True

    def close(self, over: bool = False) -> None:
        """``over``: nothing that is in flight will go on; what was asked of workers last is waited for."""
        deadline_s = self._clock() + min(CLOSE_S, self.config.call_timeout_s)
        while over and any(m.calls for m in self.members if m.ready) and self._clock() < deadline_s:
            self.turn(POLL_S)
        tickets = [
            self.transport.call(m.index, "close", over) for m in self.members if m.ready and not m.calls
        ]
        deadline_s = self._clock() + min(CLOSE_S, self.config.call_timeout_s)
        while tickets and (left_s := deadline_s - self._clock()) > 0:
            done = self.transport.wait(tickets, left_s)
            tickets = [t for t in tickets if t not in done]
        self.transport.close()

    # -- weights and memory --------------------------------------------------------------------------------

    def publish(self, publication: Publication, turn: Callable[[float], None]) -> list[Ack]:
        """All workers load it; their acknowledgements in order. ``turn`` also gives work meanwhile."""
        self._publication, self.version, self._acks = publication, publication.version, {}
        for member in self.members:
            if member.ready:
                self._load(member, publication)
        everybody = len(self.members)
        self.until(lambda: len(self._acks) == everybody, f"weights version {publication.version}", turn)
        return [self._acks[i] for i in sorted(self._acks)]

    def _load(self, member: Member, publication: Publication) -> None:
        member.ready = False

        def then(ack: Ack) -> None:
            if (ack.version, ack.checksum) != (publication.version, publication.checksum):
                raise RunError(
                    f"{ack.receiver} holds weights version {ack.version} after "
                    f"{publication.version} was loaded"
                )
            self.news()
            if publication is self._publication:
                self._acks[member.index] = ack
                member.ready = True

        what = f"weights version {publication.version}"
        self.call(member, "load_weights", what, self.config.start_timeout_s, then, publication)

    def sleep(self, level: int) -> None:
        self.asleep = True
        self.everywhere("sleep", level)
        for member in self.members:
            member.asleep = member.ready

    def wake(self) -> None:
        self.asleep = False
        for member in self.members:
            if member.ready and member.asleep:
                self.call(member, "wake", "its wake-up", self.config.start_timeout_s, lambda _: None)
            member.asleep = False
        self.until(lambda: not any(m.calls for m in self.members), "the workers' wake-up")

    def _waiting_for(self) -> str:
        calls = [f"{c.what} from worker {m.index}" for m in self.members for c in m.calls]
        return "waiting for " + ("; ".join(calls + self._on_wait()) or "nothing")
