"""The sandboxes of one worker: made ahead, paused while the policy thinks, found or restored after a fault, swept.

    fleet = Fleet(LocalBackend(), FleetConfig(run="my-run", quota=64, warm=4))
    await fleet.open(keep=records)                      # sweeps what dead workers of this run left behind
    lease = await fleet.acquire("task-7", template="base")
    async with lease.awake() as sandbox:                # resumed; paused again after ``rest_s`` without use
        await sandbox.exec("...")
    record = await lease.save()                         # JSON for the trajectory: ids, and a snapshot
    lease = await fleet.restore(record)                 # any time, any process: the same sandbox, or its snapshot's
    await lease.release()                               # kills it

Who owns what: the fleet owns the sandboxes that it made or restored. A lease belongs to its trajectory until
`release` or `detach`; warm ones belong to nobody until `acquire`. A sandbox whose record was handed out outlives
the fleet, paused, where its backend lets it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from sandbox_client import owners
from sandbox_client.errors import InvalidRequest, QuotaExceeded, SandboxError, SandboxNotFound
from sandbox_client.lease import Lease
from sandbox_client.metrics import FleetMetrics
from sandbox_client.owners import Owner
from sandbox_client.places import Places
from sandbox_client.sweep import Dead, ids, orphan_sandboxes, orphan_snapshots
from sandbox_client.types import Backend, Sandbox, SandboxSpec, State

__all__ = ["Fleet", "FleetConfig", "FleetMetrics", "Lease"]

ROLE_KEY, TASK_KEY = "k3rl-role", "k3rl-task"
WARM, LEASED = "warm", "leased"
AT_ONCE = 16  # calls side by side where many sandboxes are extended, paused or killed
KILL_AGAIN_S = (0.5, 2.0, 8.0, 30.0)


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """``quota`` counts this fleet's sandboxes: leased, warm and forks. ``rest_s`` is how long a sandbox stays
    awake without use; 0 pauses at once. Heartbeats extend every awake sandbox long before its time is over.

    ``owner`` is the worker's name within the run, the same after a restart: then it may sweep what its former
    life left, also on another machine. Without a name only what died on this machine is known to be dead.
    """

    run: str
    spec: SandboxSpec = field(default_factory=SandboxSpec)
    quota: int = 64
    warm: int = 0  # kept ready of the spec's own template, paused
    rest_s: float = 0.0
    acquire_s: float = 300.0  # how long to wait for the quota
    heartbeat_s: float = 60.0
    owner: str = ""

    def __post_init__(self) -> None:
        if not self.run:
            raise ValueError("a fleet needs its run's name")
        if self.quota < 1 or not 0 <= self.warm <= self.quota:
            raise ValueError(
                f"need 0 <= warm <= quota and quota >= 1, got warm {self.warm}, quota {self.quota}"
            )
        if not 0 < self.heartbeat_s * 2 <= self.spec.ttl_s:
            raise ValueError(
                f"heartbeat_s {self.heartbeat_s:g} must be at most half of ttl_s {self.spec.ttl_s:g}"
            )


class Fleet:
    """See the module's docstring. One event loop; `open` before, `close` after use."""

    def __init__(self, backend: Backend, config: FleetConfig) -> None:
        self.backend, self.config, self.metrics = backend, config, FleetMetrics()
        instance = owners.claim()
        self.owner = Owner(config.run, config.owner or instance, instance)
        self.resumable: dict[str, Mapping[str, Any]] = {}  # by sandbox id: records handed out or told of
        self.faults: dict[str, int] = defaultdict(int)  # of background work, by kind of error
        self._places = Places(config.quota)
        self._leases: dict[str, Lease] = {}
        self._moved: dict[str, str] = {}  # from a lost sandbox's id to that of the one made from its snapshot
        self._restoring: dict[str, tuple[asyncio.Lock, list[None]]] = {}
        self._filling: asyncio.Task[None] | None = None
        self._beating: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._open = False

    # ------------------------------------------------------------ open, close

    async def open(self, keep: Mapping[str, Any] | None = None, *, dead: Dead = ()) -> int:
        """Sweep what the dead left (see `sweep`) and start; -> how many sandboxes were killed.

        What is in ``keep`` counts as resumable from now on, so `close` keeps it as well.
        """
        swept = await self.sweep(keep, dead=dead)
        self.resumable |= {k: v if isinstance(v, Mapping) else {} for k, v in (keep or {}).items()}
        self._open = True
        self._beating = asyncio.ensure_future(self._beat())
        self._fill()
        return swept

    async def sweep(self, keep: Mapping[str, Any] | None = None, *, dead: Dead = ()) -> int:
        """Kill this run's sandboxes whose owner is dead; -> how many.

        Dead are: earlier lives of this fleet's named owner, processes of this machine that are no more, and
        ``dead``. A worker that lives, or of which nothing is known, loses nothing.

        ``keep``: all that the run's trajectories still need, of all workers: sandbox ids, each with its record
        if there is one. Only a caller who gives it (an empty one counts) knows which snapshots nobody needs, so
        without it snapshots stay.
        """
        if isinstance(dead, str) and dead != "all":
            raise ValueError(f"dead is a collection of owners' names or 'all', got '{dead}'")
        kept = ids(keep or {}) | ids(self.resumable) | {s.id for s in self._places.warm} | self._leases.keys()
        orphans = await orphan_sandboxes(self.backend, self.owner, kept, dead)
        swept = sum(await self._each(self._kill_by_id(sandbox_id) for sandbox_id in orphans))
        self.metrics.swept += swept
        if keep is not None:
            kept |= {lease.snapshot for lease in self._leases.values()}
            stale = await orphan_snapshots(self.backend, self.owner, kept, dead)
            await self._each(self.backend.delete_snapshot(snapshot_id) for snapshot_id in stale)
        return swept

    async def _kill_by_id(self, sandbox_id: str) -> bool:
        try:
            await (await self.backend.connect(sandbox_id)).kill()
        except SandboxNotFound:
            return False
        return True

    async def close(self, keep: Mapping[str, Any] | None = None, *, keep_resumable: bool = True) -> None:
        """Kill this fleet's sandboxes but ``keep`` and, paused, those that a record was handed out for.

        ``keep_resumable=False``: the run is over, nobody will resume; their snapshots go as well. The backend
        stays open: it is its maker's.
        """
        self._open = False
        try:
            await self._stop_background()
            kept = ids(keep or {}) | (ids(self.resumable) if keep_resumable else set())
            await self._each(self._let_go(lease, kept) for lease in list(self._leases.values()))
            await self._each(sandbox.kill() for sandbox in self._places.warm)
            self._places.warm.clear()
            left = await self.backend.list({owners.INSTANCE_KEY: self.owner.instance})  # such as forks
            told = set() if keep_resumable else set(self.resumable)
            await self._each(self._kill_by_id(i) for i in {info.id for info in left} | told if i not in kept)
            if not keep_resumable:
                stale = set(await orphan_snapshots(self.backend, self.owner, kept, (), own=True))
                stale |= {str(r["snapshot"]) for r in self.resumable.values() if r.get("snapshot")} - kept
                await self._each(self.backend.delete_snapshot(i) for i in stale)
        finally:
            owners.release(self.owner.instance)

    async def _stop_background(self) -> None:
        running = [t for t in (self._filling, self._beating, *self._tasks) if t is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _let_go(self, lease: Lease, kept: set[str]) -> None:
        lease.stop_resting()
        self.forget(lease)
        if lease.sandbox.id not in kept:
            await lease.sandbox.kill()
        elif not lease.paused:
            await lease.sandbox.pause()

    async def _each(self, calls: Iterable[Any]) -> list[Any]:
        """Await all, some at a time; a fault of one is counted, and stops none. -> what succeeded."""
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(call: Any) -> Any:
            async with gate:
                return await call

        ended = await asyncio.gather(*(one(call) for call in calls), return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                self._count(error)
        return [e for e in ended if not isinstance(e, BaseException)]

    def _count(self, error: BaseException) -> None:
        self.faults[type(error).__name__] += 1

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
        whose = self._whose(task, metadata)
        sandbox = await self._take(wants_warm=own)
        if sandbox is not None and own:
            with contextlib.suppress(SandboxNotFound):  # it died while it waited: its place is kept
                return await self._acquire_warm(sandbox, task, whose)
        elif sandbox is not None:
            await self._evict(sandbox)
        try:
            sandbox = await self._create(template, whose)
        except BaseException:
            self.free_place()
            raise
        return self._lease(sandbox, task, paused=False, metadata=whose)

    async def _acquire_warm(self, sandbox: Sandbox, task: str, whose: dict[str, str]) -> Lease:
        """Raises `SandboxNotFound` if it is no more; its place stays taken."""
        try:
            await self._relabel(sandbox, whose)
        except SandboxNotFound:
            raise
        except BaseException:
            await self.kill(sandbox, place=True)
            raise
        self.metrics.from_warm += 1
        self._fill()
        return self._lease(sandbox, task, paused=True, metadata=whose)

    def _whose(self, task: str, metadata: Mapping[str, str] | None = None) -> dict[str, str]:
        given = {**self.config.spec.metadata, ROLE_KEY: LEASED, TASK_KEY: task, **(metadata or {})}
        return {**given, **self.owner.metadata()}

    async def _relabel(self, sandbox: Sandbox, metadata: Mapping[str, str]) -> None:
        if self.backend.capabilities.relabels:
            await sandbox.relabel(metadata)

    async def restore(self, record: Mapping[str, str]) -> Lease:
        """The sandbox of a record if it lives, else a new one from its snapshot. Called twice, also at the same
        time, it gives the one lease.

        Raises `SandboxNotFound` if neither is there: the trajectory has to start again.
        """
        if record.get("backend") != self.backend.name:
            raise InvalidRequest(
                f"the sandbox was on '{record.get('backend')}', this is '{self.backend.name}'"
            )
        async with self._alone(record["id"]):
            sandbox_id = self._moved.get(record["id"], record["id"])
            if sandbox_id in self._leases:
                return self._leases[sandbox_id]
            task, snapshot = record.get("task", ""), record.get("snapshot", "")
            await self.take_place()
            try:
                sandbox, paused = await self._find_or_recover(sandbox_id, self._whose(task), snapshot)
            except BaseException:
                self.free_place()
                raise
            self._remember(record, sandbox.id)
            return self._lease(sandbox, task, paused=paused, snapshot=snapshot, metadata=self._whose(task))

    @asynccontextmanager
    async def _alone(self, sandbox_id: str) -> AsyncIterator[None]:
        """One at a time for each id."""
        lock, waiting = self._restoring.setdefault(sandbox_id, (asyncio.Lock(), []))
        waiting.append(None)
        try:
            async with lock:
                yield
        finally:
            waiting.pop()
            if not waiting:
                self._restoring.pop(sandbox_id, None)

    def _remember(self, record: Mapping[str, str], sandbox_id: str) -> None:
        """The record stays good for the new sandbox, should it be asked for again."""
        self.resumable.pop(record["id"], None)
        self.resumable[sandbox_id] = {**record, "id": sandbox_id}
        if sandbox_id != record["id"]:
            self._moved[record["id"]] = sandbox_id

    async def _find_or_recover(
        self, sandbox_id: str, whose: dict[str, str], snapshot: str
    ) -> tuple[Sandbox, bool]:
        """-> the sandbox, whether it is paused."""
        try:
            sandbox = await self.backend.connect(sandbox_id)
            paused = (await sandbox.info()).state is State.PAUSED
            await self._relabel(sandbox, whose)
        except SandboxNotFound:
            if not snapshot:
                self.metrics.lost += 1
                raise
            try:
                sandbox = await self._create(snapshot, whose)
            except InvalidRequest as error:
                self.metrics.lost += 1
                raise SandboxNotFound(
                    f"sandbox {sandbox_id} is gone, and so is its snapshot {snapshot}"
                ) from error
            self.metrics.recovered += 1
            return sandbox, False
        self.metrics.restored += 1
        return sandbox, paused

    def _lease(
        self, sandbox: Sandbox, task: str, *, paused: bool, metadata: dict[str, str], snapshot: str = ""
    ) -> Lease:
        lease = Lease(self, sandbox, task, paused, snapshot, metadata)
        self._leases[sandbox.id] = lease
        if not paused:
            lease.rest_later()
        return lease

    def forget(self, lease: Lease, *, place: bool = True) -> bool:
        """No lease of this fleet any more; its place becomes free, or stays taken until `kill` frees it."""
        if self._leases.pop(lease.sandbox.id, None) is None:
            return False
        if place:
            self.free_place()
        return True

    async def take_snapshot(self, sandbox: Sandbox) -> str:
        """-> its id. The name tells whose it is; one whose making was broken off is deleted."""
        name = self.owner.snapshot_name(sandbox.id)
        try:
            return (await sandbox.snapshot(name)).id
        except BaseException:
            self.background(self._delete_named(name))
            raise

    async def _delete_named(self, name: str) -> None:
        for snapshot in await self.backend.list_snapshots(name):
            await self.backend.delete_snapshot(snapshot.id)

    async def _create(self, template: str | None, metadata: Mapping[str, str]) -> Sandbox:
        spec = self.config.spec
        began = time.monotonic()
        sandbox = await self.backend.create(
            replace(spec, template=template or spec.template, metadata=dict(metadata))
        )
        self.metrics.create_s.append(time.monotonic() - began)
        self.metrics.created += 1
        return sandbox

    async def kill(self, sandbox: Sandbox, *, place: bool = False) -> None:
        """Kill, and free its place, where it has one, once it is gone.

        Raises nothing: the caller is done with it. A fault is counted, and the kill repeated in the background.
        Goes on if the caller is cancelled.
        """
        await asyncio.shield(self.background(self._kill(sandbox, place)))

    async def _kill(self, sandbox: Sandbox, place: bool) -> None:
        try:
            await sandbox.kill()
        except Exception as error:  # whatever it is, the sandbox may still be there
            self._count(error)
            self.background(self._kill_again(sandbox, place))
            return
        if place:
            self.free_place()

    async def _kill_again(self, sandbox: Sandbox, place: bool) -> None:
        """After the last try it is left to its time to live, and to `close`."""
        try:
            for pause_s in KILL_AGAIN_S:
                await asyncio.sleep(pause_s)
                try:
                    return await sandbox.kill()
                except Exception as error:
                    self._count(error)
        finally:
            if place:
                self.free_place()

    # ------------------------------------------------------------ quota

    async def take_place(self) -> None:
        """Wait for room within the quota; a warm sandbox makes way and leaves its place. Raises `QuotaExceeded`."""
        if (sandbox := await self._take(wants_warm=False)) is not None:
            await self._evict(sandbox)

    async def _take(self, *, wants_warm: bool) -> Sandbox | None:
        config = self.config
        try:
            return await self._places.take(config.acquire_s, wants_warm=wants_warm)
        except TimeoutError as error:
            why = f"all {config.quota} sandboxes were in use for {config.acquire_s:g} s"
            raise QuotaExceeded(f"run '{config.run}': {why}") from error

    async def _evict(self, sandbox: Sandbox) -> None:
        """Kill a warm sandbox whose place the caller keeps."""
        try:
            await self.kill(sandbox)
        except BaseException:  # the caller is cancelled
            self.free_place()
            raise

    def free_place(self) -> None:
        """Who waits for a place comes first, then the warm ones."""
        self._places.free()
        self._fill()

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
            self._count(error)

    def _fill(self) -> None:
        if self._open and (self._filling is None or self._filling.done()):
            self._filling = asyncio.ensure_future(self._fill_warm())

    async def _fill_warm(self) -> None:
        """Takes no place that somebody waits for."""
        pause_s = 0.5
        while len(self._places.warm) < self.config.warm and self._places.take_spare():
            try:
                self._places.ready(await self._make_warm())
            except BaseException as error:
                self._places.free()
                if not isinstance(error, Exception):
                    raise
                self._count(error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 30.0)

    async def _make_warm(self) -> Sandbox:
        """Labelled as warm only where the label can be changed when somebody takes it."""
        role = {ROLE_KEY: WARM} if self.backend.capabilities.relabels else {}
        sandbox = await self._create(None, {**self.config.spec.metadata, **role, **self.owner.metadata()})
        try:
            await sandbox.pause()
        except BaseException:
            self.background(self._kill(sandbox, False))
            raise
        return sandbox

    async def _beat(self) -> None:
        """Extends what is awake, so that a long tool call doesn't meet its end. A slow call keeps up none but
        itself: the next beat starts on time, without those that are still under way."""
        gate = asyncio.Semaphore(AT_ONCE)
        while True:
            await asyncio.sleep(self.config.heartbeat_s)
            for lease in list(self._leases.values()):
                if not lease.paused and not lease.extending:
                    lease.extending = True
                    self.background(self._extend(lease, gate))

    async def _extend(self, lease: Lease, gate: asyncio.Semaphore) -> None:
        try:
            async with gate:
                with contextlib.suppress(SandboxNotFound):  # its user will see
                    await asyncio.wait_for(
                        lease.sandbox.extend(self.config.spec.ttl_s), self.config.heartbeat_s / 2
                    )
        except SandboxError:
            if not lease.paused:  # else it was paused meanwhile, and needs no more time
                raise
        finally:
            lease.extending = False

    def stats(self) -> dict[str, float]:
        """Flat metrics: see `FleetMetrics`. ``faults`` are those of background work."""
        for lease in self._leases.values():
            lease.account()
        paused = sum(lease.paused for lease in self._leases.values()) + len(self._places.warm)
        found = self.metrics.as_dict(len(self._leases) + len(self._places.warm), paused)
        return found | {"faults": float(sum(self.faults.values()))}
