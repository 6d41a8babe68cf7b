"""The caller's side of isolation: a pool of reusable processes, each call under a wall-clock limit.

Life of a child: forked when a call finds none free, reused for ``MAX_CALLS`` calls, killed at once when a
call takes too long, dies, answers nonsense or fails in a way that may have left something behind. `close`
kills all.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from k3rl.config.rewards import RewardSandbox
from k3rl.types import Outcome
from rewards.api import RewardFunction, Scored, Verdict
from rewards.isolation.child import Task
from rewards.isolation.frames import MAX_REPLY_BYTES, Closed, TooLate, receive_frame, send_frame
from rewards.wire import Malformed, verdict_from_json

START_TIMEOUT_S = 120.0  # first imports, on a machine that is busy with training
MAX_CALLS = 20_000
CHUNK_S = 0.05  # work handed to a child at once, by the mean time of a call
BROKEN = (Outcome.GRADER_FAILED, Outcome.TIMED_OUT)  # what raised may have left something half done


class ChildFailed(Exception):
    """A child died or spoke nonsense."""


class ChildTooSlow(Exception):
    """A call went over its limit."""


class ZygoteHandle:
    """Starts the zygote with the first child, and again should it die."""

    def __init__(self, memory_mb: int) -> None:
        self.memory_mb = memory_mb
        self.preload: list[str] = []
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.control: socket.socket | None = None

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "OMP_NUM_THREADS": "1",  # threads do not survive a fork
            "OPENBLAS_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "rewards.isolation.zygote", str(theirs.fileno())]
        self.process = subprocess.Popen(
            [*command, str(self.memory_mb << 20), *self.preload], pass_fds=[theirs.fileno()], env=environment
        )
        theirs.close()
        ours.settimeout(START_TIMEOUT_S)
        self.control = ours
        return ours

    def _ask(self, message: bytes, descriptors: Sequence[int] = ()) -> int:
        control = self.control if self.control is not None else self._start()
        try:
            socket.send_fds(control, [message], list(descriptors))
            answer = control.recv(64)
        except OSError as error:
            self._stop()
            raise ChildFailed(f"the process that starts reward processes does not answer: {error}") from error
        if not answer:
            self._stop()
            raise ChildFailed("the process that starts reward processes died")
        return int(answer)

    def fork(self) -> tuple[int, socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            try:
                with self.lock:
                    return self._ask(b"F", [theirs.fileno()]), ours
            except BaseException:
                ours.close()
                raise

    def kill(self, pid: int) -> None:
        with self.lock:
            if self.control is not None:
                self._ask(b"K%d" % pid)

    def _stop(self) -> None:
        if self.control is not None:
            self.control.close()  # the zygote sees the end, kills its children and exits
            self.control = None
        if self.process is not None:
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None

    def close(self) -> None:
        with self.lock:
            self._stop()


class Child:
    """One process. Used by one thread at a time."""

    def __init__(self, zygote: ZygoteHandle) -> None:
        self.zygote = zygote
        self.calls = 0
        self.idle = True  # nothing that the calls started still runs
        self.pid, self.sock = zygote.fork()

    def run(self, task: Task, timeout_s: float, whole: bool) -> Iterator[list[Verdict]]:
        """Verdicts as they come. ``whole``: they come all at once, under one limit."""
        self.calls += len(task.items)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        try:
            send_frame(self.sock, pickle.dumps(task, pickle.HIGHEST_PROTOCOL), deadline_s)
            ready = self._receive(deadline_s)
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
        self.zygote.kill(self.pid)


def read_verdict(line: Any) -> Verdict:
    """A child's answer. Raises `ChildFailed`."""
    try:
        return verdict_from_json(line)
    except Malformed as error:
        raise ChildFailed(f"it answered something, but {error}") from error


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
        queue: list[tuple[list[int], int]] = [(list(range(len(items))), 0)]  # indices, attempts so far
        while queue:
            indices, attempts = queue.pop(0)
            chosen, address = [items[i] for i in indices], reward.address or reward.name
            task = Task(address, chosen, arguments, timeout_s, self.modules, self.sandbox)
            verdicts, blamed, trouble = self._attempt(task, timeout_s, together, reward.fresh)
            for index, verdict in zip(indices, verdicts, strict=False):
                results[index] = verdict
            rest = indices[len(verdicts) :]
            failed = [i for i, v in zip(indices, verdicts, strict=False) if v.outcome is not Outcome.SCORED]
            if trouble is not None and together and len(rest) > 1 and reward.scope == "trajectory":
                queue += [([i], attempts) for i in rest]  # one of them did it: the others shall not suffer
                continue
            if trouble is not None:
                guilty, rest = rest[:blamed], rest[blamed:]
                for i in guilty:
                    results[i] = trouble
                failed += guilty
            if rest:
                queue.append((rest, attempts))
            if failed and attempts < self.retries:
                self.stats.retried += len(failed)
                again = [failed] if reward.scope == "group" else [[i] for i in failed]
                queue += [(part, attempts + 1) for part in again]
        return [r if r is not None else Verdict(Outcome.GRADER_FAILED) for r in results]

    def _attempt(
        self, task: Task, timeout_s: float, together: bool, fresh: bool
    ) -> tuple[list[Verdict], int, Verdict | None]:
        """Verdicts that came; and where something went wrong, how many of the rest it is the fault of, and
        what."""
        verdicts: list[Verdict] = []
        child, keep, start_s = None, False, time.monotonic()
        blamed = len(task.items) if together else 1
        try:
            child = self._take(fresh)
            for some in child.run(task, timeout_s, together):
                verdicts += some
                start_s = time.monotonic()
            keep = not fresh and child.idle and not any(v.outcome in BROKEN for v in verdicts)
            return verdicts, 0, None
        except ChildTooSlow:
            self.stats.timed_out += 1
            text = f"stopped after {timeout_s:g} s"
            return verdicts, blamed, Verdict(Outcome.TIMED_OUT, None, text, time.monotonic() - start_s)
        except ChildFailed as error:
            self.stats.died += 1
            text = f"the reward's process failed: {error}"
            return verdicts, blamed, Verdict(Outcome.GRADER_FAILED, None, text, time.monotonic() - start_s)
        finally:
            self.stats.calls += len(verdicts)
            if child is not None:
                self._give(child, keep)

    def _take(self, fresh: bool) -> Child:
        with self.lock:
            if self.free and not fresh:
                return self.free.pop()
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
