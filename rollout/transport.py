"""How the pool reaches its workers: Ray actors, or objects in its own process.

A transport starts and kills workers and carries calls. Calls to one worker are done in the order they were
made. A call gives a `Reply` at once and its outcome later; a dead worker's calls fail with `WorkerDied`,
an exception of the worker's own with that exception.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

MakeWorker = Callable[[int], Any]
"""From a worker's index to a `RolloutWorker`; runs in the worker's process."""


class WorkerDied(Exception):
    """The process is gone, or was killed because it did not answer."""


class Transport(Protocol):
    def start(self, index: int) -> None:
        """Begin to start worker ``index``, in place of the last one. Its first call waits until it is
        there."""

    def call(self, index: int, method: str, *arguments: Any) -> Any:
        """Make a call; returns its ticket."""

    def wait(self, tickets: Sequence[Any], timeout_s: float) -> list[Any]:
        """Those of the tickets whose outcome is there, as soon as there is one, at the latest after the
        time."""

    def result(self, ticket: Any) -> Any:
        """The outcome of a call that `wait` returned; raises what the call raised."""

    def stacks(self, index: int) -> str:
        """What the worker's threads were doing, if it can still say so."""

    def kill(self, index: int) -> None:
        """At once; no clean-up runs in it."""

    def close(self) -> None: ...


class InlineTransport:
    """Workers in this process, called at once. Arguments and results are copied as if they travelled.

    For tests, and for looking into a worker with a debugger. `kill` forgets the worker and everything in it.
    """

    def __init__(self, make_worker: MakeWorker) -> None:
        self._make = make_worker
        self.workers: dict[int, Any] = {}
        self._outcomes: dict[int, tuple[bool, Any]] = {}
        self._next = 0

    def start(self, index: int) -> None:
        self.workers[index] = self._make(index)

    def call(self, index: int, method: str, *arguments: Any) -> int:
        ticket, self._next = self._next, self._next + 1
        self._outcomes[ticket] = self._do(index, method, arguments)
        return ticket

    def _do(self, index: int, method: str, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
        worker = self.workers.get(index)
        if worker is None:
            return False, WorkerDied(f"rollout worker {index} is not there")
        try:
            copied = pickle.loads(pickle.dumps(arguments))
            return True, pickle.loads(pickle.dumps(getattr(worker, method)(*copied)))
        except Exception as error:  # it is the call's outcome
            return False, error

    def wait(self, tickets: Sequence[int], timeout_s: float) -> list[int]:
        return list(tickets)

    def result(self, ticket: int) -> Any:
        worked, value = self._outcomes.pop(ticket)
        if not worked:
            raise value
        return value

    def stacks(self, index: int) -> str:
        return ""

    def kill(self, index: int) -> None:
        self.workers.pop(index, None)

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()
        self.workers = {}


class Actor:
    """The process around a worker. SIGUSR1 makes it write all its threads' stacks into a file."""

    def __init__(self, make_worker: MakeWorker, index: int, stacks_file: str) -> None:
        self._file = open(stacks_file, "w")  # noqa: SIM115  (open as long as the process lives)
        faulthandler.register(signal.SIGUSR1, file=self._file, all_threads=True)
        self._worker = make_worker(index)

    def process(self) -> tuple[str, int]:
        """Node and process id."""
        import ray

        return ray.get_runtime_context().get_node_id(), os.getpid()

    def do(self, method: str, *arguments: Any) -> Any:
        return getattr(self._worker, method)(*arguments)


class RayTransport:
    """One Ray actor a worker. ``options`` go to the actor (``num_cpus``, ``num_gpus``, ``runtime_env``, ...);
    ``bundles`` place worker i into bundle ``bundles[i]`` of a placement group, beside a trainer's rank."""

    def __init__(
        self,
        make_worker: MakeWorker,
        *,
        options: dict[str, Any] | None = None,
        placement_group: Any = None,
        bundles: Sequence[int] | None = None,
    ) -> None:
        import ray

        self._ray, self._make = ray, make_worker
        self._options = {"num_cpus": 1, **(options or {}), "max_restarts": 0, "max_concurrency": 1}
        self._group, self._bundles = placement_group, bundles
        self._folder = tempfile.TemporaryDirectory(prefix="k3rl-rollout-")
        self._make_ref = ray.put(make_worker)
        self._actors: dict[int, Any] = {}
        self._processes: dict[int, Any] = {}

    def start(self, index: int) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self.kill(index)
        options = dict(self._options)
        if self._group is not None:
            bundle = index if self._bundles is None else self._bundles[index]
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=bundle
            )
        actor = self._ray.remote(Actor).options(**options)
        self._actors[index] = actor.remote(self._make_ref, index, str(self._stacks_file(index)))
        self._processes[index] = self._actors[index].process.remote()

    def call(self, index: int, method: str, *arguments: Any) -> Any:
        return self._actors[index].do.remote(method, *arguments)

    def wait(self, tickets: Sequence[Any], timeout_s: float) -> list[Any]:
        if not tickets:
            time.sleep(timeout_s)
            return []
        ready, _ = self._ray.wait(list(tickets), num_returns=1, timeout=timeout_s)
        if ready and len(tickets) > 1:  # and whoever else is there by now
            ready, _ = self._ray.wait(list(tickets), num_returns=len(tickets), timeout=0)
        return ready

    def result(self, ticket: Any) -> Any:
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(ticket, timeout=60.0)
        except exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from error
        except (exceptions.RayActorError, exceptions.ObjectLostError, exceptions.GetTimeoutError) as error:
            raise WorkerDied(_reason(error)) from error

    def process_id(self, index: int) -> int | None:
        """Of a worker on this node that has started and is still a process of Ray's."""
        ref = self._processes.get(index)
        if ref is None:
            return None
        try:
            ready, _ = self._ray.wait([ref], timeout=0)
            node, process_id = self._ray.get(ready[0], timeout=5.0) if ready else ("", 0)
        except self._ray.exceptions.RayError:
            return None
        if node != self._ray.get_runtime_context().get_node_id():
            return None
        try:  # the id may be another process's by now
            title = Path(f"/proc/{process_id}/cmdline").read_bytes()
        except OSError:
            return None
        return process_id if title.startswith(b"ray::") else None

    def stacks(self, index: int) -> str:
        process_id = self.process_id(index)
        if process_id is None:
            return ""
        os.kill(process_id, signal.SIGUSR1)
        time.sleep(0.2)
        return self._stacks_file(index).read_text()[-4000:]

    def _stacks_file(self, index: int) -> Path:
        return Path(self._folder.name) / f"worker-{index}.stacks"

    def kill(self, index: int, patience_s: float = 0.0) -> None:
        """Ray asks the process to exit; one that does not within ``patience_s`` (a stopped one, say) is killed."""
        actor = self._actors.pop(index, None)
        if actor is None:
            return
        process_id = self.process_id(index)
        self._ray.kill(actor, no_restart=True)
        if process_id is None:
            return
        try:
            deadline = time.monotonic() + patience_s
            while time.monotonic() < deadline:
                os.kill(process_id, 0)
                time.sleep(0.02)
            os.kill(process_id, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def close(self) -> None:
        for index in list(self._actors):
            self.kill(index, patience_s=2.0)
        self._folder.cleanup()


def _reason(error: Exception) -> str:
    """One line. A worker that fails while it is built is told with its traceback, whose last line says why."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1] if "creation task" in lines[0] else lines[0]
