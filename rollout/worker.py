"""`RolloutWorker`: one engine, driven in slices, and the trajectories that are in it.

A plain class for one thread. The controller calls `advance` over and over; each call runs the engine for
about a slice and returns what happened as events, so that the controller always holds all but the last
slice. Between two calls everything is at rest.

Owner of what: the engine's generations and the live environments are the worker's. A trajectory is here
from the order that brings it until its `Finished` or `Released` event; a parked environment outlives the
latter, until the trajectory comes back, or the controller says that it went elsewhere (`forget`) or is
over (`discard`).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from k3rl.chat.renderer import Renderer
from k3rl.config.rollout import RolloutConfig
from k3rl.errors import RunError
from k3rl.types import Problem, StopReason
from k3rl.weights import Ack, Handshake, Publication, deliver
from rollout.agent_loop import AgentLoop, Ask, Generate, Next, Run, TrajectoryWork
from rollout.background import Background
from rollout.engine import Engine, EngineStats, Generation
from rollout.environment import Environment, HoldsSandbox, environment_factory, make_environment
from rollout.environments.sandboxes import Sandboxes
from rollout.record import Event, Record
from rollout.tools import abandoned_tools

log = logging.getLogger(__name__)
MEASURE_S = 5.0
"""Time limit of asking what the sandboxes measured."""


@dataclass(slots=True)
class Orders:
    """What the controller wants of a worker in a slice, done in the order of the fields."""

    forget: list[str] = field(default_factory=list)  # they run elsewhere: drop what is left, close nothing
    discard: list[str] = field(default_factory=list)  # they are over: stop them, close their environments
    release: list[str] = field(default_factory=list)  # hand them back, to run elsewhere
    work: list[TrajectoryWork] = field(default_factory=list)
    keep: dict[str, Any] | None = None  # told once: sandboxes and snapshots that the run's trajectories need


@dataclass(frozen=True, slots=True)
class Report:
    """What happened in a slice, in order."""

    events: list[Event]
    stats: EngineStats
    waiting: int  # trajectories whose environment works
    parked: int  # resting environments
    abandoned_tools: int
    busy_s: float
    sandboxes: dict[str, float] = field(default_factory=dict)  # see `Sandboxes.measured`


@dataclass(frozen=True, slots=True)
class SavedState:
    """A resting environment after `RolloutWorker.save`, ``at`` so many response tokens."""

    id: str
    at: int
    environment_state: dict[str, Any]
    sandbox: dict[str, str] | None


@dataclass(frozen=True, slots=True)
class Hello:
    """Who a worker is."""

    name: str
    process_id: int
    version: int
    handshake: Handshake


class RolloutWorker:
    """``handshake`` says what this side's numbers mean (see `k3rl.weights.Handshake`); ``get`` replaces
    `ray.get` where weights come through shared memory without Ray. ``sandboxes`` are for environments that use them;
    the worker closes them."""

    def __init__(
        self,
        config: RolloutConfig,
        engine: Engine,
        renderer: Renderer,
        max_context: int,
        *,
        name: str = "rollout-0",
        handshake: Handshake | None = None,
        device: str = "cpu",
        environment: Callable[[Problem], Environment | None] | None = None,
        sandboxes: Sandboxes | None = None,
        get: Callable[[Any], Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if environment is None and config.agent.environment is not None:
            environment_factory(config.agent.environment)  # a wrong name is told now, not by each trajectory
        self.name, self.engine = name, engine
        self.handshake = handshake or Handshake(
            tokenizer=renderer.fingerprint(), vocab_size=renderer.vocab_size
        )
        self._device, self._get, self._clock = device, get, clock
        self._sandboxes = sandboxes
        make = environment or (lambda p: make_environment(p, config.agent, sandboxes))
        self._loop = AgentLoop(config, renderer, make, max_context)
        self._step_timeout_s = config.agent.step_timeout_s
        self._background: Background | None = None
        self._runs: dict[str, Run] = {}
        self._parked: dict[str, Run] = {}
        self._tickets: dict[int, Run | None] = {}  # whose answer it will be; None: nobody waits for it
        self._ticket_of: dict[str, int] = {}
        self._early: dict[str, Any] = {}  # answers to parked runs
        self._events: list[Event] = []

    def hello(self) -> Hello:
        return Hello(self.name, os.getpid(), self.engine.stats().version, self.handshake)

    # -- generating ----------------------------------------------------------------------------------------

    def advance(self, orders: Orders, slice_s: float, slice_steps: int = 0) -> Report:
        """Do the orders, then run for about ``slice_s``, or for ``slice_steps`` engine steps where that is set; less if
        nothing is left to do."""
        started, steps = self._clock(), 0
        if orders.keep is not None and self._sandboxes is not None:
            self._sandboxes.keep = orders.keep
        self._forget(orders.forget)
        self._discard(orders.discard)
        self._release(orders.release)
        for work in orders.work:
            self._accept(work)
        idle_s = 0.0
        while True:
            self._take_answers(0.0)
            if self.engine.pending():
                for generation in self.engine.step():
                    self._turn_ended(generation)
                steps += 1
            elif self._ticket_of:
                before = self._clock()
                self._take_answers(max(0.0, started + slice_s - before))
                idle_s += self._clock() - before
            else:
                break
            counted = slice_steps > 0 and self.engine.pending() > 0
            if steps >= slice_steps if counted else self._clock() - started >= slice_s:
                break
        for run in list(self._runs.values()):
            self._flush(run)
        return self._report(self._clock() - started - idle_s)

    def _accept(self, work: TrajectoryWork) -> None:
        if work.id in self._runs:
            raise RunError(f"{self.name}: trajectory {work.id} came twice")
        parked = self._parked.pop(work.id, None)
        run = Run(work, Record(work.trajectory), self._events)
        if parked is not None and parked.record.length == run.record.length:
            run.environment = parked.environment
            if work.id in self._ticket_of:  # its tools went on working
                self._runs[work.id] = run
                run.asking = run.opened = True
                run.counters = parked.counters
                run.since_s = time.monotonic()
                self._tickets[self._ticket_of[work.id]] = run
                return
            if work.id in self._early:
                self._runs[work.id] = run
                run.asking = run.opened = True
                run.counters = parked.counters
                answer = self._early.pop(work.id)
                self._guard(run, lambda: self._loop.answered(run, answer))
                return
        elif parked is not None:
            self._drop(parked)
            self._leave_behind(parked)
        self._runs[work.id] = run
        self._guard(run, lambda: self._loop.start(run))

    def _guard(self, run: Run, what: Callable[[], Next]) -> None:
        """Do what the loop says comes next. A problem or environment that raises fails its own trajectory."""
        try:
            self._do(run, what())
        except RunError:
            raise
        except Exception as error:  # the border of the environment: failure is normal here, and is kept
            log.warning("trajectory %s failed", run.id, exc_info=True)
            run.asking = True  # do not ask it for its state
            self._loop.end(run, StopReason.ERROR, f"{type(error).__name__}: {error}")
            self._leave(run)

    def _do(self, run: Run, what: Next) -> None:
        if isinstance(what, Generate):
            self.engine.submit([what.generation])
        elif isinstance(what, Ask):
            ticket = self._in_background().submit(what.call, self._step_timeout_s)
            self._tickets[ticket] = run
            self._ticket_of[run.id] = ticket
        else:
            self._leave(run)

    def _turn_ended(self, generation: Generation) -> None:
        run = self._runs.get(generation.id)
        if run is None or run.generation is not generation:
            return  # found finished when it was submitted, and paused before the engine could say so
        self._cut_loop(run)
        self._guard(run, lambda: self._loop.turn_ended(run, generation))

    def _flush(self, run: Run) -> None:
        generation = run.generation
        if generation is None:
            return
        if self._cut_loop(run):
            self.engine.abort([run.id])
            generation.stop_reason = StopReason.REPETITION
            self._guard(run, lambda: self._loop.turn_ended(run, generation))
        else:
            self._loop.flush(run)

    def _cut_loop(self, run: Run) -> bool:
        """End the generation where it began to repeat itself, if it does."""
        end, generation = self._loop.looping_from(run), run.generation
        if end is None or generation is None:
            return False
        for tokens in (generation.token_ids, generation.logprobs, generation.versions):
            del tokens[end:]
        generation.stop_reason = StopReason.REPETITION
        return True

    def _take_answers(self, wait_s: float) -> None:
        if self._background is None:
            return
        for answer in self._background.take(wait_s):
            run = self._tickets.pop(answer.ticket, None)
            if run is None:
                if isinstance(answer.value, BaseException):
                    log.warning("%s: closing an environment failed: %s", self.name, answer.value)
                continue
            self._ticket_of.pop(run.id, None)
            if run.id in self._parked:
                self._early[run.id] = answer.value
                continue
            self._guard(run, lambda r=run, a=answer: self._loop.answered(r, a.value))

    def _leave(self, run: Run) -> None:
        """It has ended: close its environment, and do not wait for that."""
        del self._runs[run.id]
        self._close([run])

    def _close(self, runs: Iterable[Run]) -> None:
        for run in runs:
            if run.environment is not None:
                ticket = self._in_background().submit(run.environment.close(), self._step_timeout_s)
                self._tickets[ticket] = None

    # -- letting go ----------------------------------------------------------------------------------------

    def pause(self) -> Report:
        """Everything rests: generations leave the engine, idle environments are paused, busy ones go on.
        Answers that come meanwhile are kept. The events hand every trajectory back."""
        started = self._clock()
        self._take_answers(0.0)
        for run in list(self._runs.values()):
            self._flush(run)
        self.engine.pause()
        self._rest(list(self._runs.values()))
        return self._report(self._clock() - started)

    def _rest(self, runs: list[Run]) -> None:
        idle = [r for r in runs if r.environment is not None and r.opened and not r.asking]
        calls = [r.environment.pause() for r in idle if r.environment is not None]
        results = self._in_background().finish(calls, self._step_timeout_s) if calls else []
        failed = {r.id: e for r, e in zip(idle, results, strict=True) if isinstance(e, BaseException)}
        for run in runs:
            if run.id in failed:
                error = failed[run.id]
                run.asking = True
                self._loop.end(run, StopReason.ERROR, f"environment: pause: {type(error).__name__}: {error}")
                self._leave(run)
                continue
            keep = run.environment is not None
            self._loop.release(run, parked=keep)
            del self._runs[run.id]
            if keep:
                self._parked[run.id] = run

    def _release(self, ids: Iterable[str]) -> None:
        """Hand these back now, where they are generating. One whose environment is busy stays."""
        runs = [self._runs[i] for i in ids if i in self._runs and not self._runs[i].asking]
        for run in runs:
            self._flush(run)
        runs = [r for r in runs if r.id in self._runs and not r.asking]
        self.engine.abort([r.id for r in runs])
        self._rest(runs)
        self._forget([r.id for r in runs])

    def _forget(self, ids: Iterable[str]) -> None:
        for id_ in ids:
            run = self._runs.pop(id_, None) or self._parked.pop(id_, None)
            if run is not None:
                self._drop(run)
                self._leave_behind(run)

    def _leave_behind(self, run: Run) -> None:
        """It goes on without the environment that is here. What it needs is not closed."""
        if isinstance(run.environment, HoldsSandbox):
            ticket = self._in_background().submit(run.environment.leave(), self._step_timeout_s)
            self._tickets[ticket] = None

    def _discard(self, ids: Iterable[str]) -> None:
        for id_ in ids:
            run = self._runs.pop(id_, None) or self._parked.pop(id_, None)
            if run is not None:
                self._drop(run)
                self._close([run])

    def _drop(self, run: Run) -> None:
        self.engine.abort([run.id])
        self._early.pop(run.id, None)
        ticket = self._ticket_of.pop(run.id, None)
        if ticket is not None:
            self._tickets.pop(ticket, None)
            self._in_background().cancel(ticket)

    # -- checkpoints ---------------------------------------------------------------------------------------

    def save(self) -> list[SavedState]:
        """Resting environments snapshot their sandboxes; the states that name the snapshots. One that cannot is left
        out, and is recovered from what its trajectory says."""
        resting = [r for r in self._parked.values() if r.opened and not r.asking]
        held = [(r, r.environment) for r in resting if isinstance(r.environment, HoldsSandbox)]
        calls = [environment.save() for _, environment in held]
        ended = self._in_background().finish(calls, self._step_timeout_s) if calls else []
        saved = []
        for (run, _), error in zip(held, ended, strict=True):
            if isinstance(error, BaseException):
                log.warning("%s: trajectory %s: no snapshot: %r", self.name, run.id, error)
            else:
                saved.append(SavedState(run.id, run.record.length, run.state(), run.sandbox()))
        return saved

    def drop_snapshots(self, ids: list[str]) -> None:
        """Snapshots that no checkpoint needs any more."""
        if self._sandboxes is not None:
            (ended,) = self._in_background().finish(
                [self._sandboxes.drop_snapshots(ids)], self._step_timeout_s
            )
            if isinstance(ended, BaseException):  # the next sweep finds them
                log.warning("%s: old snapshots stay: %r", self.name, ended)

    # -- weights, memory, scoring --------------------------------------------------------------------------

    def load_weights(self, publication: Publication) -> Ack:
        """Between two slices; what runs goes on under the new version."""
        return deliver(
            publication,
            self.engine,
            receiver=self.name,
            handshake=self.handshake,
            device=self._device,
            get=self._get,
        )

    def sleep(self, level: int = 1) -> None:
        """Nothing may run: `pause` first."""
        self.engine.sleep(level)

    def wake(self) -> None:
        self.engine.wake()

    def score(self, sequences: list[list[int]], starts: list[int]) -> list[list[float]]:
        """See `rollout.engine.Engine.score`."""
        return self.engine.score(sequences, starts)

    def close(self, over: bool = False) -> None:
        """Close every environment that is here. Where the run is not ``over``, sandboxes that trajectories need to go
        on are kept as far as their backend can keep them."""
        runs = [*self._runs.values(), *self._parked.values()]
        self._runs, self._parked = {}, {}
        background, self._background = self._background, None
        if background is None:
            return  # no environment was ever here, or this is the second time
        kept = () if over else (HoldsSandbox,)
        calls = [r.environment.close() for r in runs if r.environment and not isinstance(r.environment, kept)]
        results = background.finish(calls, self._step_timeout_s)
        if self._sandboxes is not None:
            results += background.finish([self._sandboxes.close(over)], self._step_timeout_s)
        for result in results:
            if isinstance(result, BaseException):
                log.warning("%s: closing an environment failed: %s", self.name, result)
        background.close()

    def _in_background(self) -> Background:
        if self._background is None:
            self._background = Background(f"{self.name}-environments")
        return self._background

    def _report(self, busy_s: float) -> Report:
        events, self._events = self._events, []
        for run in self._runs.values():
            run.events = self._events
        stats, parked, abandoned = self.engine.stats(), len(self._parked), abandoned_tools()
        return Report(events, stats, len(self._ticket_of), parked, abandoned, busy_s, self._measured())

    def _measured(self) -> dict[str, float]:
        """Of the sandboxes; asked for where they live, since they change there."""
        if self._sandboxes is None or not self._sandboxes.opened:
            return {}
        (found,) = self._in_background().finish([self._sandboxes.measured()], MEASURE_S)
        return found if isinstance(found, dict) else {}
