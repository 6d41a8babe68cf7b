"""`RolloutPool`: groups of trajectories from a set of workers, whatever happens to the workers.

    pool = RolloutPool(config, make_worker, run_seed=0)
    for event in pool.rollout(step, draw_problem):     # groups as they complete, progress now and then
        ...
    pool.publish(publication)                          # every worker acknowledges the new version

One loop drives all: give work, wait for any answer, take it in, look at the deadlines. Each call to a
worker has a deadline and says what it is for; a worker that dies or does not answer is killed and
replaced, gets the current weights, and its trajectories go on from the controller's copies. Two calls are
under way to each worker, so that it works on while its last report is read.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from k3rl.config.rollout import RolloutConfig
from k3rl.errors import RunError
from k3rl.types import Group, Problem
from k3rl.weights import Ack, Publication
from rollout.controller import Controller
from rollout.transport import MakeWorker, RayTransport, Transport, WorkerDied
from rollout.worker import Hello, Orders, Report

log = logging.getLogger(__name__)

DrawProblem = Callable[[], tuple[int, Problem] | None]
"""The next draw's ordinal and problem; ``None`` when there are no more."""

CALLS_UNDER_WAY = 2
POLL_S = 0.5


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


@dataclass(slots=True)
class _Call:
    ticket: Any
    what: str
    deadline_s: float
    then: Callable[[Any], None]


@dataclass(slots=True)
class _Worker:
    """``ready``: it has the current weights and takes orders."""

    index: int
    calls: deque[_Call] = field(default_factory=deque)
    ready: bool = False
    dead: bool = False
    asleep: bool = False
    advances: int = 0
    release: list[str] = field(default_factory=list)
    last: Report | None = None
    busy_s: float = 0.0


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
        self.config, self.version = config, version
        self.controller = Controller(config, run_seed)
        self._transport = transport or RayTransport(
            make_worker, options=actor_options, placement_group=placement_group, bundles=bundles
        )
        self._clock = clock
        self._workers = [_Worker(i) for i in range(config.workers)]
        self._publication: Publication | None = None
        self._acks: dict[int, Ack] = {}
        self._hello: Hello | None = None
        self._open = True  # workers may take work
        self._asleep = False
        self._faults_in_row = 0
        self._last_news_s = clock()
        self._draw: DrawProblem | None = None
        self._step_tokens = 0
        self._step_started_s = clock()
        self._lock = threading.RLock()
        self._pump: _Pump | None = None
        for worker in self._workers:
            self._start(worker)

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
        self._last_news_s = self._step_started_s = self._clock()
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
            self._pump = _Pump(self)

    def _rest(self) -> None:
        """Every worker hands everything back. One that dies meanwhile has reported all but its last
        slices."""
        self._open, self.controller.pausing = False, True
        try:
            for worker in self._workers:
                if worker.ready and not worker.asleep:
                    self._call(
                        worker, "pause", "its pause", self.config.call_timeout_s, self._reported(worker)
                    )
            self._until(lambda: not any(self.controller.holds), "the workers' pause")
        finally:
            self.controller.pausing = False

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
            workers=sum(w.ready for w in self._workers),
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
            if self._asleep:
                raise RunError("rollout: weights cannot be published to sleeping workers: wake them first")
            if self.config.mode == "one_step_off":
                self._rest_for_weights()
            self._publication, self.version, self._acks = publication, publication.version, {}
            for worker in self._workers:
                if worker.ready:
                    self._load(worker)
            self._until(
                lambda: len(self._acks) == len(self._workers), f"weights version {publication.version}"
            )
            self._open = True
            return [self._acks[i] for i in sorted(self._acks)]

    def _rest_for_weights(self) -> None:
        self._open = False
        for worker in self._workers:
            if worker.ready:
                self._call(worker, "pause", "its pause", self.config.call_timeout_s, self._reported(worker))
        self._until(lambda: not any(self.controller.holds), "the workers' pause")

    def sleep(self, level: int = 1) -> None:
        """Free the engines' memory; nothing may run. After level 2 the next `publish` brings the weights
        back."""
        with self._locked():
            if any(self.controller.holds):
                raise RunError("rollout: workers cannot sleep within a step")
            self._asleep = True  # one that dies now is replaced at the wake-up: its memory is somebody else's
            self._everywhere("sleep", level)
            for worker in self._workers:
                worker.asleep = worker.ready

    def wake(self) -> None:
        with self._locked():
            self._asleep = False
            for worker in self._workers:
                if worker.ready and worker.asleep:
                    self._call(worker, "wake", "its wake-up", self.config.start_timeout_s, lambda _: None)
                worker.asleep = False
            self._until(lambda: not any(w.calls for w in self._workers), "the workers' wake-up")

    def score(self, sequences: list[list[int]], starts: list[int]) -> list[list[float]]:
        """Log-probs of ``sequence[start:]`` under the workers' weights, spread over them; one that dies is
        asked again."""
        parts: dict[int, list[list[float]]] = {}
        rows = [list(range(i, len(sequences), len(self._workers))) for i in range(len(self._workers))]
        with self._locked():

            def all_there() -> bool:
                for worker, mine in zip(self._workers, rows, strict=True):
                    if worker.index not in parts and worker.ready and not worker.calls:
                        arguments = ([sequences[i] for i in mine], [starts[i] for i in mine])
                        into = parts.__setitem__
                        then = functools.partial(into, worker.index)
                        self._call(
                            worker, "score", "its scores", self.config.start_timeout_s, then, *arguments
                        )
                return len(parts) == len(self._workers)

            self._until(all_there, "the workers' scores")
        out: list[list[float]] = [[] for _ in sequences]
        for index, mine in enumerate(rows):
            for i, row in zip(mine, parts[index], strict=True):
                out[i] = row
        return out

    def _everywhere(self, method: str, *arguments: Any) -> None:
        for worker in self._workers:
            if worker.ready:
                self._call(
                    worker, method, f"its {method}", self.config.start_timeout_s, lambda _: None, *arguments
                )
        self._until(lambda: not any(w.calls for w in self._workers if w.ready), f"every worker's {method}")

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

    @property
    def next_draw(self) -> int:
        """Ordinal of the next problem to draw: where the stream of problems stands."""
        return self.controller.ledger.next_draw

    def metrics(self) -> dict[str, float]:
        """Counts since the start."""
        out = {f"rollout/{name}": float(value) for name, value in self.controller.counts.items()}
        reports = [w.last for w in self._workers if w.last is not None]
        out["rollout/busy_s"] = sum(w.busy_s for w in self._workers)
        out["rollout/prefilled_tokens"] = float(sum(r.stats.prefilled_tokens for r in reports))
        out["rollout/abandoned_tools"] = float(sum(r.abandoned_tools for r in reports))
        return out

    def close(self) -> None:
        if self._pump is not None:
            self._pump.stop()
        for worker in self._workers:
            if worker.ready and not worker.calls:
                ticket = self._transport.call(worker.index, "close")
                self._transport.wait([ticket], min(5.0, self.config.call_timeout_s))
        self._transport.close()

    # -- the loop ------------------------------------------------------------------------------------------

    def _locked(self) -> threading.RLock:
        if self._pump is not None:
            self._pump.check()
        return self._lock

    def _turn(self, wait_s: float) -> None:
        """Give work, wait for an answer, take it in, look at deadlines."""
        for worker in self._workers:
            if worker.dead and not self._asleep:
                self._start(worker)
        if self._open:
            self._give_work()
        first = [(w, w.calls[0]) for w in self._workers if w.calls]
        ready = set(self._transport.wait([c.ticket for _, c in first], self._wait_s(first, wait_s)))
        for worker, call in first:
            if call.ticket in ready:
                self._take(worker, call)
        now = self._clock()
        for worker in self._workers:
            if worker.calls and now > worker.calls[0].deadline_s:
                self._fault(worker, f"{worker.calls[0].what} did not come in time", stacks=True)
        if now - self._last_news_s > self.config.stall_timeout_s:
            raise RunError(
                f"rollout: nothing happened for {now - self._last_news_s:.0f} s; {self._waiting_for()}"
            )

    def _wait_s(self, first: list[tuple[_Worker, _Call]], wait_s: float) -> float:
        now = self._clock()
        return max(0.0, min([wait_s, *(c.deadline_s - now for _, c in first)]))

    def _take(self, worker: _Worker, call: _Call) -> None:
        try:
            value = self._transport.result(call.ticket)
        except RunError:
            raise
        except WorkerDied as error:
            self._fault(worker, f"it died during {call.what}: {error}")
        except Exception as error:  # the border of the worker: its failure is the worker's end, not the run's
            self._fault(worker, f"{call.what} failed: {type(error).__name__}: {error}")
        else:
            worker.calls.popleft()
            for later in worker.calls:  # calls are done one after another
                later.deadline_s = max(later.deadline_s, self._clock() + self.config.call_timeout_s)
            call.then(value)

    def _give_work(self) -> None:
        """Own work first for everybody, then others'; workers with least get first."""
        ready = sorted((w for w in self._workers if w.ready and not w.asleep), key=self._held)
        work: dict[int, list[Any]] = {w.index: [] for w in ready if w.advances < CALLS_UNDER_WAY}
        for steal in (False, True):
            for worker in ready:
                if worker.index in work:
                    self._fill(worker, work[worker.index], steal)
        if self.config.work_stealing and not len(self.controller.queue):
            self._steal(ready)
        for worker in ready:
            if worker.index in work and (self._held(worker) or self._orders_wait(worker)):
                self._advance(worker, work[worker.index])

    def _fill(self, worker: _Worker, work: list[Any], steal: bool) -> None:
        room = self.config.in_flight_per_worker() - self._held(worker)
        for _ in range(room):
            item = self.controller.next_work(worker.index, steal)
            if item is None:
                return
            work.append(item)

    def _steal(self, ready: list[_Worker]) -> None:
        for thief in ready:
            if self._held(thief) == 0 and not any(w.release for w in self._workers):
                stolen = self.controller.steal(thief.index)
                if stolen is not None:
                    self._workers[stolen[0]].release += stolen[1]

    def _advance(self, worker: _Worker, work: list[Any]) -> None:
        told = self.controller.take_orders(worker.index)
        orders = Orders(told.forget, told.discard, worker.release, work)
        worker.release = []
        worker.advances += 1

        def then(report: Report) -> None:
            worker.advances -= 1
            self._reported(worker)(report)

        self._call(
            worker, "advance", "its report", self.config.call_timeout_s, then, orders, self.config.slice_s
        )

    def _reported(self, worker: _Worker) -> Callable[[Report], None]:
        def then(report: Report) -> None:
            worker.last = report
            worker.busy_s += report.busy_s
            finished = self.controller.counts["finished"]
            if report.events:
                self._last_news_s = self._clock()
            self.controller.receive(worker.index, report.events)
            if self.controller.counts["finished"] > finished:
                self._faults_in_row = 0

        return then

    def _held(self, worker: _Worker) -> int:
        return len(self.controller.holds[worker.index])

    def _orders_wait(self, worker: _Worker) -> bool:
        orders = self.controller.orders[worker.index]
        return bool(orders.forget or orders.discard or worker.release)

    # -- workers' lives ------------------------------------------------------------------------------------

    def _start(self, worker: _Worker) -> None:
        worker.dead = worker.ready = worker.asleep = False
        self._transport.start(worker.index)
        self._call(
            worker,
            "hello",
            "its start",
            self.config.start_timeout_s,
            lambda hello: self._started(worker, hello),
        )

    def _started(self, worker: _Worker, hello: Hello) -> None:
        if self._hello is None:
            self._hello = hello
        self._hello.handshake.require(hello.handshake, hello.name)
        self._last_news_s = self._clock()
        if self._publication is not None:
            self._load(worker)
        elif hello.version != self.version:
            raise RunError(f"{hello.name} starts with weights version {hello.version}, not {self.version}")
        else:
            worker.ready = True

    def _load(self, worker: _Worker) -> None:
        publication = self._publication
        worker.ready = False

        def then(ack: Ack) -> None:
            if (ack.version, ack.checksum) != (publication.version, publication.checksum):
                raise RunError(
                    f"{ack.receiver} holds weights version {ack.version} after "
                    f"{publication.version} was loaded"
                )
            self._last_news_s = self._clock()
            if publication is self._publication:
                self._acks[worker.index] = ack
                worker.ready = True

        what = f"weights version {publication.version}"
        self._call(worker, "load_weights", what, self.config.start_timeout_s, then, publication)

    def _call(
        self,
        worker: _Worker,
        method: str,
        what: str,
        timeout_s: float,
        then: Callable[[Any], None],
        *arguments: Any,
    ) -> None:
        try:
            ticket = self._transport.call(worker.index, method, *arguments)
        except Exception as error:  # a dead actor can refuse a call at once
            self._fault(worker, f"{what} could not be asked for: {type(error).__name__}: {error}")
            return
        ahead = sum(self.config.call_timeout_s for _ in worker.calls)
        worker.calls.append(_Call(ticket, what, self._clock() + timeout_s + ahead, then))

    def _fault(self, worker: _Worker, why: str, stacks: bool = False) -> None:
        """Kill and replace it; what it had goes on from here."""
        if stacks and (text := self._transport.stacks(worker.index)):
            log.warning("rollout worker %d does not answer; it was here:\n%s", worker.index, text)
        log.warning("rollout worker %d is replaced: %s", worker.index, why)
        self._transport.kill(worker.index)
        worker.calls.clear()
        worker.release, worker.advances = [], 0
        worker.ready, worker.dead = False, True
        self._acks.pop(worker.index, None)
        self._faults_in_row += 1
        if self._faults_in_row > self.config.max_worker_faults:
            raise RunError(
                f"rollout: {self._faults_in_row} workers died and nothing finished between; last: {why}"
            )
        self.controller.lost(worker.index)

    def _until(self, done: Callable[[], bool], what: str) -> None:
        """Turn until it is so. Bounded: every call has its deadline, and the whole wait has one too."""
        limit_s = self._clock() + self.config.start_timeout_s + self.config.call_timeout_s * CALLS_UNDER_WAY
        while not done():
            if self._clock() > limit_s:
                raise RunError(f"rollout: {what} did not come; {self._waiting_for()}")
            self._turn(POLL_S)

    def _waiting_for(self) -> str:
        calls = [f"{c.what} from worker {w.index}" for w in self._workers for c in w.calls]
        held = [f"worker {w.index} has {self._held(w)} trajectories" for w in self._workers if self._held(w)]
        queue = [f"{len(self.controller.queue)} wait"] if len(self.controller.queue) else []
        return "waiting for " + ("; ".join(calls + held + queue) or "nothing")


class _Pump:
    """Keeps the workers busy while the recipe trains, in the asynchronous modes. What goes wrong in it is
    raised by the pool's next method."""

    def __init__(self, pool: RolloutPool) -> None:
        self._pool, self._stop, self._error = pool, threading.Event(), None
        self._thread = threading.Thread(target=self._run, name="rollout-pump", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with self._pool._lock:
                    self._pool._turn(0.02)
            except BaseException as error:
                self._error = error
                return
            time.sleep(0.002)

    def check(self) -> None:
        if self._error is not None:
            raise RunError(f"rollout: {self._error}") from self._error

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=30.0)
