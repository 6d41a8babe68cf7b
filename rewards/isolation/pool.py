"""The caller's side of isolation: a pool of reusable processes, each call under a wall-clock limit.

Life of a child: forked when a call finds none free, reused for ``MAX_CALLS`` calls, killed at once when a
call takes too long, dies, answers nonsense or fails in a way that may have left something behind. `close`
kills all.
"""

from __future__ import annotations

import json
import math
import pickle
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from k3rl.config.rewards import RewardSandbox
from k3rl.types import Outcome
from rewards.api import RewardFunction, Scored, Verdict
from rewards.isolation.child import Task
from rewards.isolation.frames import MAX_REPLY_BYTES, Closed, TooLate, receive_frame, send_frame
from rewards.isolation.zygote_handle import START_TIMEOUT_S, ChildFailed, ZygoteHandle
from rewards.wire import Malformed, verdict_from_json

MAX_CALLS = 20_000
CHUNK_S = 0.05  # work handed to a child at once, by the mean time of a call
BROKEN = (Outcome.GRADER_FAILED, Outcome.TIMED_OUT)  # what raised may have left something half done


class ChildTooSlow(Exception):
    """A call went over its limit."""


class Gate:
    """Up to ``count`` at a time; or one alone."""

    def __init__(self, count: int) -> None:
        self.count, self.permits, self.door = count, threading.Semaphore(count), threading.Lock()

    @contextmanager
    def enter(self, alone: bool) -> Iterator[None]:
        wanted = self.count if alone else 1
        with self.door:  # who waits to be alone is overtaken by nobody
            for _ in range(wanted):
                self.permits.acquire()
        try:
            yield
        finally:
            self.permits.release(wanted)


class Child:
    """One process. Used by one thread at a time."""

    def __init__(self, zygote: ZygoteHandle) -> None:
        self.zygote = zygote
        self.calls = 0
        self.idle = True  # nothing that the calls started still runs
        self.pid, self.sock, self.generation = zygote.fork()

    def run(self, task: Task, timeout_s: float, whole: bool) -> Iterator[list[Verdict]]:
        """Verdicts as they come. ``whole``: they come all at once, under one limit."""
        self.calls += len(task.items)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        try:
            send_frame(self.sock, pickle.dumps(task, pickle.HIGHEST_PROTOCOL), deadline_s)
            ready = self._receive(deadline_s)
        except Closed as error:
            raise ChildFailed(f"its process died ({error})") from error
        except TooLate as error:
            raise ChildFailed(f"its imports took more than {START_TIMEOUT_S} s") from error
        if not ready.get("ready"):
            yield [read_verdict(ready.get("verdict"))] * len(task.items)
            return
        count = 0
        slack_s = 0.5 if whole else 0.0  # an async reward cancels its own late calls: let it say so
        while count < len(task.items):
            try:
                reply = self._receive(time.monotonic() + timeout_s + slack_s)
            except TooLate as error:
                raise ChildTooSlow from error
            verdicts = [read_verdict(v) for v in reply.get("verdicts") or ()]
            self.idle = self.idle and reply.get("threads") == 1
            count += len(verdicts)
            if not verdicts or count > len(task.items):
                raise ChildFailed("it answered with the wrong number of verdicts")
            yield verdicts

    def _receive(self, deadline_s: float) -> dict[str, Any]:
        try:
            reply = json.loads(receive_frame(self.sock, deadline_s, MAX_REPLY_BYTES))
        except Closed as error:
            raise ChildFailed(f"its process died ({error})") from error
        except ValueError as error:
            raise ChildFailed("it answered something that is not JSON") from error
        if not isinstance(reply, dict):
            raise ChildFailed("it answered something that is not a verdict")
        return reply

    def kill(self) -> None:
        self.sock.close()
        self.zygote.kill(self.pid, self.generation)


def read_verdict(line: Any) -> Verdict:
    """A child's answer. Raises `ChildFailed`."""
    try:
        return verdict_from_json(line)
    except Malformed as error:
        raise ChildFailed(f"it answered something, but {error}") from error


@dataclass(frozen=True, slots=True)
class Attempt:
    """Verdicts that came; and where something went wrong, what, and how many of the rest it is the fault of.
    ``unlucky``: the zygote died, and any of the calls that ran then may have killed it."""

    verdicts: list[Verdict]
    blamed: int = 0
    trouble: Verdict | None = None
    unlucky: bool = False


@dataclass(slots=True)
class PoolStats:
    """Counts since the pool was made."""

    calls: int = 0
    started: int = 0
    killed: int = 0
    retried: int = 0
    timed_out: int = 0
    died: int = 0


class IsolatedPool:
    """Calls rewards in processes that can be killed.

    Args:
        processes: How many children work at once.
        memory_mb: Address space that a child may take beyond what it starts with.
        retries: How often a failed call is repeated; always in another process.
        modules: Imported in every child.
        sandbox: What sandboxes are given to rewards that ask for one.
    """

    def __init__(
        self,
        processes: int = 1,
        memory_mb: int = 2048,
        retries: int = 1,
        modules: Sequence[str] = (),
        sandbox: RewardSandbox | None = None,
    ) -> None:
        self.zygote = ZygoteHandle(memory_mb)
        self.processes, self.retries, self.modules = processes, retries, tuple(modules)
        self.sandbox = sandbox or RewardSandbox()
        self.free: list[Child] = []
        self.gate = Gate(processes)
        self.lock = threading.Lock()
        self.stats = PoolStats()
        self.mean_s: dict[str, float] = {}
        self.executor = ThreadPoolExecutor(processes, thread_name_prefix="reward")

    def preload(self, module: str) -> None:
        """Import a module once, before forking, if the first fork is still to come. Modules of ours alone:
        what they leave open is inherited."""
        if module not in self.zygote.preload:
            self.zygote.preload.append(module)

    def run(
        self, reward: RewardFunction, items: Sequence[Scored], arguments: Mapping[str, Any], timeout_s: float
    ) -> list[Verdict]:
        """One verdict for each item, in order. Never raises for what a reward does."""
        if not items:
            return []
        size = 1 if reward.fresh and reward.scope == "trajectory" else len(items)
        if not reward.fresh and reward.scope == "trajectory" and self.processes > 1:
            fitting = int(CHUNK_S / max(self.mean_s.get(reward.name, CHUNK_S), 1e-6))
            size = max(1, min(fitting, math.ceil(len(items) / self.processes)))
        chunks = [items[i : i + size] for i in range(0, len(items), size)]
        jobs = [self.executor.submit(self._chunk, reward, c, arguments, timeout_s) for c in chunks]
        verdicts = [v for job in jobs for v in job.result()]
        spent_s = sum(v.seconds_s for v in verdicts) / len(verdicts)
        self.mean_s[reward.name] = 0.9 * self.mean_s.get(reward.name, spent_s) + 0.1 * spent_s
        return verdicts

    def _chunk(
        self, reward: RewardFunction, items: Sequence[Scored], arguments: Mapping[str, Any], timeout_s: float
    ) -> list[Verdict]:
        together = reward.scope == "group" or reward.is_async
        results: list[Verdict | None] = [None] * len(items)
        queue = [(list(range(len(items))), 0, False)]  # indices, attempts so far, to be tried alone
        while queue:
            indices, attempts, alone = queue.pop(0)
            chosen, address = [items[i] for i in indices], reward.address or reward.name
            task = Task(address, chosen, arguments, timeout_s, self.modules, self.sandbox)
            with self.gate.enter(alone):
                done = self._attempt(task, timeout_s, together, reward.fresh)
            for index, verdict in zip(indices, done.verdicts, strict=False):
                results[index] = verdict
            rest = indices[len(done.verdicts) :]
            failed = [
                i for i, v in zip(indices, done.verdicts, strict=False) if v.outcome is not Outcome.SCORED
            ]
            single = reward.scope == "trajectory"
            suspects = done.unlucky and not alone
            if suspects or (done.trouble is not None and single and together and len(rest) > 1):
                parts = [[i] for i in rest] if single else [rest]  # one of them did it: no other shall suffer
                queue += [(part, attempts, suspects or alone) for part in parts]
                rest, done = [], Attempt(done.verdicts)
            if done.trouble is not None:
                guilty, rest = rest[: done.blamed], rest[done.blamed :]
                for i in guilty:
                    results[i] = done.trouble
                failed += guilty
            if rest:
                queue.append((rest, attempts, alone))
            if failed and attempts < self.retries:
                self.stats.retried += len(failed)
                again = [failed] if reward.scope == "group" else [[i] for i in failed]
                queue += [(part, attempts + 1, alone) for part in again]
        return [r if r is not None else Verdict(Outcome.GRADER_FAILED) for r in results]

    def _attempt(self, task: Task, timeout_s: float, together: bool, fresh: bool) -> Attempt:
        verdicts: list[Verdict] = []
        child, keep, start_s = None, False, time.monotonic()
        blamed = len(task.items) if together else 1
        try:
            child = self._take(fresh)
            for some in child.run(task, timeout_s, together):
                verdicts += some
                start_s = time.monotonic()
            keep = not fresh and child.idle and not any(v.outcome in BROKEN for v in verdicts)
            return Attempt(verdicts)
        except ChildTooSlow:
            self.stats.timed_out += 1
            text = f"stopped after {timeout_s:g} s"
            trouble = Verdict(Outcome.TIMED_OUT, None, text, time.monotonic() - start_s)
            return Attempt(verdicts, blamed, trouble)
        except ChildFailed as error:
            self.stats.died += 1
            text = f"the reward's process failed: {error}"
            trouble = Verdict(Outcome.GRADER_FAILED, None, text, time.monotonic() - start_s)
            unlucky = child is None or not self.zygote.lives(child.generation)
            return Attempt(verdicts, blamed, trouble, unlucky)
        finally:
            self.stats.calls += len(verdicts)
            if child is not None:
                self._give(child, keep)

    def _take(self, fresh: bool) -> Child:
        with self.lock:
            while self.free and not fresh:
                child = self.free.pop()
                if self.zygote.lives(child.generation):
                    return child
                child.sock.close()
            self.stats.started += 1
        return Child(self.zygote)

    def _give(self, child: Child, keep: bool) -> None:
        if keep and child.calls < MAX_CALLS:
            with self.lock:
                self.free.append(child)
            return
        self.stats.killed += 1
        try:
            child.kill()
        except ChildFailed:  # the zygote is gone, and its children with it
            self.stats.died += 1

    def close(self) -> None:
        """Kill all children and wait for the threads."""
        self.executor.shutdown(wait=True)
        for child in self.free:
            child.sock.close()
        self.free.clear()
        self.zygote.close()
