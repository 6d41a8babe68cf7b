"""The sandboxes of one run: made ahead, paused while the policy thinks, found or restored after a fault,
swept.

    fleet = Fleet(LocalBackend(), FleetConfig(run="my-run", quota=64, warm=4))
    await fleet.open()                                  # sweeps what an earlier process of this run left
    lease = await fleet.acquire("task-7", template="base")
    async with lease.awake() as sandbox:                # resumed; paused again after ``rest_s`` without use
        await sandbox.exec("...")
    record = await lease.save()                         # JSON for the trajectory: ids, and a snapshot
    lease = await fleet.restore(record)                 # any time, any process: the same sandbox, or its
    snapshot's await lease.release()                               # kills it

Who owns what: the fleet owns all sandboxes with its run's metadata. A lease belongs to its trajectory until
`release` or `detach`; warm ones belong to nobody until `acquire`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from sandbox_client.errors import InvalidRequest, QuotaExceeded, SandboxError, SandboxNotFound
from sandbox_client.types import Backend, Sandbox, SandboxSpec, State

RUN_KEY, ROLE_KEY, TASK_KEY = "k3rl-run", "k3rl-role", "k3rl-task"
WARM, LEASED = "warm", "leased"


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """``quota`` counts all sandboxes of the run: leased, warm and forks. ``rest_s`` is how long a sandbox
    stays
    awake without use; 0 pauses at once. Heartbeats extend every awake sandbox long before its time is
    over."""

    run: str
    spec: SandboxSpec = field(default_factory=SandboxSpec)
    quota: int = 64
    warm: int = 0  # kept ready of the spec's own template, paused
    rest_s: float = 0.0
    acquire_s: float = 300.0  # how long to wait for the quota
    heartbeat_s: float = 60.0

    def __post_init__(self) -> None:
        if not self.run:
            raise ValueError("a fleet needs its run's name")
        if self.quota < 1 or not 0 <= self.warm <= self.quota:
            raise ValueError(
                f"need 0 <= warm <= quota and quota >= 1, got warm {self.warm}, quota {self.quota}"
            )
        if self.heartbeat_s * 2 > self.spec.ttl_s:
            raise ValueError(
                f"heartbeat_s {self.heartbeat_s:g} must be at most half of ttl_s {self.spec.ttl_s:g}"
            )


@dataclass(slots=True)
class FleetMetrics:
    """Counters since the start; seconds add up over sandboxes."""

    created: int = 0
    from_warm: int = 0
    restored: int = 0
    recovered: int = 0  # from a snapshot, because the sandbox itself was gone
    swept: int = 0
    lost: int = 0
    awake_s: float = 0.0
    paused_s: float = 0.0
    create_s: deque[float] = field(default_factory=lambda: deque(maxlen=1000))
    resume_s: deque[float] = field(default_factory=lambda: deque(maxlen=1000))

    def as_dict(self, alive: int, paused: int) -> dict[str, float]:
        """Flat, for a run's metrics. ``pause_share`` is of the sandboxes' whole lifetime."""
        whole_s = self.awake_s + self.paused_s
        named = {
            k: float(getattr(self, k))
            for k in ("created", "from_warm", "restored", "recovered", "swept", "lost")
        }
        named |= {"alive": float(alive), "paused": float(paused)}
        named["pause_share"] = self.paused_s / whole_s if whole_s else 0.0
        for name in ("create_s", "resume_s"):
            seen = sorted(getattr(self, name))
            if seen:
                named[f"{name[:-2]}_p50_s"] = seen[len(seen) // 2]
                named[f"{name[:-2]}_p99_s"] = seen[min(int(0.99 * len(seen)), len(seen) - 1)]
        return named


class Lease:
    """A trajectory's hold on one sandbox. Not for two tasks at a time."""

    def __init__(self, fleet: Fleet, sandbox: Sandbox, task: str, paused: bool, snapshot: str = "") -> None:
        self.sandbox, self.task, self.snapshot = sandbox, task, snapshot
        self._fleet, self._paused, self._users = fleet, paused, 0
        self._lock = asyncio.Lock()
        self._since = time.monotonic()
        self._rest: asyncio.TimerHandle | None = None

    @property
    def paused(self) -> bool:
        return self._paused

    def _account(self) -> None:
        now, metrics = time.monotonic(), self._fleet.metrics
        if self._paused:
            metrics.paused_s += now - self._since
        else:
            metrics.awake_s += now - self._since
        self._since = now

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[Sandbox]:
        """The sandbox, running. It is paused when nobody has used it for ``rest_s``."""
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None
        self._users += 1
        try:
            await self._wake()
            yield self.sandbox
        finally:
            self._users -= 1
            if self._users == 0:
                self._rest_later()

    async def _wake(self) -> None:
        async with self._lock:
            if self._paused:
                began = time.monotonic()
                await self.sandbox.resume(ttl_s=self._fleet.config.spec.ttl_s)
                self._account()
                self._paused = False
                self._fleet.metrics.resume_s.append(time.monotonic() - began)

    def _rest_later(self) -> None:
        def rest() -> None:
            self._rest = None
            self._fleet.background(self.pause())

        self._rest = asyncio.get_running_loop().call_later(self._fleet.config.rest_s, rest)

    async def pause(self) -> None:
        """Now, unless somebody uses it. Idempotent."""
        async with self._lock:
            if self._users or self._paused:
                return
            await self.sandbox.pause()
            self._account()
            self._paused = True

    async def save(self) -> dict[str, str]:
        """Snapshot, and what `Fleet.restore` needs. The earlier snapshot of this lease is deleted after."""
        async with self.awake() as sandbox:
            made = await sandbox.snapshot()
        before, self.snapshot = self.snapshot, made.id
        if before:
            await self._fleet.backend.delete_snapshot(before)
        return self.record()

    def record(self) -> dict[str, str]:
        """JSON by which the sandbox is found again."""
        found = {"backend": self._fleet.backend.name, "id": self.sandbox.id, "task": self.task}
        return found | ({"snapshot": self.snapshot} if self.snapshot else {})

    @asynccontextmanager
    async def judge(self) -> AsyncIterator[Sandbox]:
        """A fork to judge in, so that what tests do stays out of the sandbox that goes on. Killed at the
        end."""
        await self._fleet.take_place()
        try:
            async with self.awake() as sandbox:
                (child,) = await sandbox.fork()
            try:
                yield child
            finally:
                await self._fleet.kill(child)
        finally:
            self._fleet.free_place()

    def _stop_resting(self) -> None:
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None

    async def release(self) -> None:
        """Kill the sandbox and delete its snapshot. Idempotent."""
        self._stop_resting()
        if self._fleet.forget(self):
            self._account()
            await self._fleet.kill(self.sandbox)
            if self.snapshot:
                await self._fleet.backend.delete_snapshot(self.snapshot)

    async def detach(self) -> dict[str, str]:
        """Let go without killing: paused, to be restored from the record, maybe elsewhere."""
        self._stop_resting()
        async with self._lock:
            if not self._paused:
                await self.sandbox.pause()
                self._account()
                self._paused = True
        self._fleet.forget(self)
        return self.record()


class Fleet:
    """See the module's docstring. One event loop; `open` before, `close` after use."""

    def __init__(self, backend: Backend, config: FleetConfig) -> None:
        self.backend, self.config, self.metrics = backend, config, FleetMetrics()
        self._places = asyncio.Semaphore(config.quota)
        self._leases: dict[str, Lease] = {}
        self._warm: deque[Sandbox] = deque()
        self._filling: asyncio.Task[None] | None = None
        self._beating: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._open = False
        self.faults: dict[str, int] = defaultdict(int)  # of background work, by kind of error

    # ------------------------------------------------------------ open, close

    async def open(self, keep: Mapping[str, Any] | None = None) -> int:
        """Sweep this run's sandboxes but those whose ids are keys of ``keep``; -> how many were killed."""
        self._open = True
        swept = await self.sweep(keep or {})
        self._beating = asyncio.ensure_future(self._beat())
        self._fill()
        return swept

    async def sweep(self, keep: Mapping[str, Any]) -> int:
        found = await self.backend.list({RUN_KEY: self.config.run})
        mine = {s.id for s in self._warm} | {lease.sandbox.id for lease in self._leases.values()}
        orphans = [info.id for info in found if info.id not in keep and info.id not in mine]
        for sandbox_id in orphans:
            with contextlib.suppress(SandboxNotFound):
                await (await self.backend.connect(sandbox_id)).kill()
        self.metrics.swept += len(orphans)
        return len(orphans)

    async def close(self, keep: Mapping[str, Any] | None = None) -> None:
        """Kill everything of this run but ``keep``. The backend stays open: it is its maker's."""
        self._open = False
        for task in (self._filling, self._beating, *self._tasks):
            if task is not None:
                task.cancel()
        pending = [t for t in (self._filling, self._beating, *self._tasks) if t is not None]
        await asyncio.gather(*pending, return_exceptions=True)
        for lease in list(self._leases.values()):
            lease._stop_resting()
            self.forget(lease)
        self._warm.clear()
        await self.sweep(keep or {})

    async def __aenter__(self) -> Fleet:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ------------------------------------------------------------ leases

    async def acquire(
        self, task: str, template: str | None = None, metadata: Mapping[str, str] | None = None
    ) -> Lease:
        """A sandbox for a trajectory: a warm one where the template is the fleet's own, else a new one."""
        own = template in (None, self.config.spec.template)
        while own and not self._warm and self._places.locked() and self._filling and not self._filling.done():
            await asyncio.wait([self._filling])  # the last place is one that is being made ready
        if own and self._warm:
            sandbox = self._warm.popleft()  # its place is taken along
            self._fill()
            self.metrics.from_warm += 1
            return self._lease(sandbox, task, paused=True)
        await self.take_place()
        try:
            sandbox = await self._create(template, LEASED, {TASK_KEY: task, **(metadata or {})})
        except BaseException:
            self.free_place()
            raise
        return self._lease(sandbox, task, paused=False)

    async def restore(self, record: Mapping[str, str]) -> Lease:
        """The sandbox of a record if it lives, else a new one from its snapshot.

        Raises `SandboxNotFound` if neither is there: the trajectory has to start again.
        """
        if record.get("backend") != self.backend.name:
            raise InvalidRequest(
                f"the sandbox was on '{record.get('backend')}', this is '{self.backend.name}'"
            )
        task, snapshot = record.get("task", ""), record.get("snapshot", "")
        if record["id"] in self._leases:
            return self._leases[record["id"]]
        await self.take_place()
        try:
            sandbox, paused = await self._find_or_recover(record["id"], task, snapshot)
        except BaseException:
            self.free_place()
            raise
        return self._lease(sandbox, task, paused=paused, snapshot=snapshot)

    async def _find_or_recover(self, sandbox_id: str, task: str, snapshot: str) -> tuple[Sandbox, bool]:
        try:
            sandbox = await self.backend.connect(sandbox_id)
            paused = (await sandbox.info()).state is State.PAUSED
        except SandboxNotFound:
            if not snapshot:
                self.metrics.lost += 1
                raise
            try:
                sandbox = await self._create(snapshot, LEASED, {TASK_KEY: task})
            except InvalidRequest as error:
                self.metrics.lost += 1
                raise SandboxNotFound(
                    f"sandbox {sandbox_id} is gone, and so is its snapshot {snapshot}"
                ) from error
            self.metrics.recovered += 1
            return sandbox, False
        self.metrics.restored += 1
        return sandbox, paused

    def _lease(self, sandbox: Sandbox, task: str, *, paused: bool, snapshot: str = "") -> Lease:
        lease = Lease(self, sandbox, task, paused, snapshot)
        self._leases[sandbox.id] = lease
        if not paused:
            lease._rest_later()
        return lease

    def forget(self, lease: Lease) -> bool:
        if self._leases.pop(lease.sandbox.id, None) is None:
            return False
        self.free_place()
        return True

    async def _create(self, template: str | None, role: str, extra: Mapping[str, str]) -> Sandbox:
        spec = self.config.spec
        metadata = {**spec.metadata, RUN_KEY: self.config.run, ROLE_KEY: role, **extra}
        began = time.monotonic()
        sandbox = await self.backend.create(
            replace(spec, template=template or spec.template, metadata=metadata)
        )
        self.metrics.create_s.append(time.monotonic() - began)
        self.metrics.created += 1
        return sandbox

    async def kill(self, sandbox: Sandbox) -> None:
        await asyncio.shield(self.background(sandbox.kill()))

    # ------------------------------------------------------------ quota

    async def take_place(self) -> None:
        """Wait for room within the quota; warm sandboxes make way."""
        if self._places.locked() and self._warm:
            await self.kill(self._warm.popleft())
            self.free_place()
        try:
            await asyncio.wait_for(self._places.acquire(), self.config.acquire_s)
        except TimeoutError as error:
            config = self.config
            why = f"all {config.quota} sandboxes were in use for {config.acquire_s:g} s"
            raise QuotaExceeded(f"run '{config.run}': {why}") from error

    def free_place(self) -> None:
        self._places.release()

    # ------------------------------------------------------------ background

    def background(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        """A fault here has no caller: it is counted, and shows when the sandbox is used next."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.faults[type(error).__name__] += 1

    def _fill(self) -> None:
        if (
            self._open
            and (self._filling is None or self._filling.done())
            and len(self._warm) < self.config.warm
        ):
            self._filling = asyncio.ensure_future(self._fill_warm())

    async def _fill_warm(self) -> None:
        """Never takes the last free place from a trajectory."""
        while len(self._warm) < self.config.warm and not self._places.locked():
            await self._places.acquire()
            try:
                sandbox = await self._create(None, WARM, {})
                await sandbox.pause()
            except SandboxError as error:
                self.free_place()
                self.faults[type(error).__name__] += 1
                await asyncio.sleep(1.0)
                continue
            except BaseException:
                self.free_place()
                raise
            self._warm.append(sandbox)

    async def _beat(self) -> None:
        """Extends what is awake, so that a long tool call doesn't meet its end."""
        while True:
            await asyncio.sleep(self.config.heartbeat_s)
            for lease in list(self._leases.values()):
                if not lease.paused:
                    with contextlib.suppress(SandboxError):  # paused or gone meanwhile; its user will see
                        await lease.sandbox.extend(self.config.spec.ttl_s)

    def stats(self) -> dict[str, float]:
        """Flat metrics: see `FleetMetrics`."""
        for lease in self._leases.values():
            lease._account()
        paused = sum(lease.paused for lease in self._leases.values()) + len(self._warm)
        return self.metrics.as_dict(len(self._leases) + len(self._warm), paused)
