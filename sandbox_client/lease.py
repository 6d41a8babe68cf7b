"""A trajectory's hold on its sandbox."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from sandbox_client.metrics import measured
from sandbox_client.types import Sandbox

if TYPE_CHECKING:
    from sandbox_client.fleet import Fleet


class Lease:
    """A trajectory's hold on one sandbox. Not for two tasks at a time.

    ``metadata`` says whose the sandbox is now. The server may know less of it, where a sandbox that was made
    ahead cannot be relabelled (`Capabilities.relabels`).
    """

    def __init__(
        self,
        fleet: Fleet,
        sandbox: Sandbox,
        task: str,
        paused: bool,
        snapshot: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.sandbox, self.task, self.snapshot = measured(sandbox, fleet.metrics), task, snapshot
        self.metadata = dict(sandbox.metadata if metadata is None else metadata)
        self.extending = False  # a heartbeat of it is under way
        self._fleet, self._paused, self._users = fleet, paused, 0
        self._lock = asyncio.Lock()
        self._since = time.monotonic()
        self._rest: asyncio.TimerHandle | None = None

    @property
    def paused(self) -> bool:
        return self._paused

    def account(self) -> None:
        """Add the time since the last call to the fleet's awake or paused seconds."""
        now, metrics = time.monotonic(), self._fleet.metrics
        if self._paused:
            metrics.paused_s += now - self._since
        else:
            metrics.awake_s += now - self._since
        self._since = now

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[Sandbox]:
        """The sandbox, running. It is paused when nobody has used it for ``rest_s``."""
        self.stop_resting()
        self._users += 1
        try:
            await self._wake()
            yield self.sandbox
        finally:
            self._users -= 1
            if self._users == 0:
                self.rest_later()

    async def _wake(self) -> None:
        async with self._lock:
            if self._paused:
                began = time.monotonic()
                await self.sandbox.resume(ttl_s=self._fleet.config.spec.ttl_s)
                self.account()
                self._paused = False
                self._fleet.metrics.resume_s.append(time.monotonic() - began)

    def rest_later(self) -> None:
        """Pause after ``rest_s``, unless it is used before."""

        def rest() -> None:
            self._rest = None
            self._fleet.background(self.pause())

        self.stop_resting()
        self._rest = asyncio.get_running_loop().call_later(self._fleet.config.rest_s, rest)

    def stop_resting(self) -> None:
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None

    async def pause(self) -> None:
        """Now, unless somebody uses it. Idempotent."""
        async with self._lock:
            if not self._users:
                await self._pause()

    async def _pause(self) -> None:
        """If its outcome is unknown it counts as paused: the next use then resumes, which is harmless."""
        if self._paused:
            return
        try:
            await self.sandbox.pause()
        finally:
            self.account()
            self._paused = True

    async def save(self) -> dict[str, str]:
        """Snapshot; -> the record for `Fleet.restore`. The earlier snapshot of this lease is deleted after."""
        before = self.snapshot
        async with self.awake() as sandbox:
            self.snapshot = await self._fleet.take_snapshot(sandbox)
        if before:
            await self._fleet.backend.delete_snapshot(before)
        return self.record()

    def record(self) -> dict[str, str]:
        """JSON by which the sandbox is found again. From now on the sandbox is kept when the fleet closes."""
        found = {"backend": self._fleet.backend.name, "id": self.sandbox.id, "task": self.task}
        found |= {"snapshot": self.snapshot} if self.snapshot else {}
        self._fleet.resumable[self.sandbox.id] = found
        return dict(found)

    @asynccontextmanager
    async def judge(self) -> AsyncIterator[Sandbox]:
        """A fork to judge in, so that what tests do stays out of the sandbox that goes on. Killed at the end."""
        await self._fleet.take_place()
        try:
            async with self.awake() as sandbox:
                (child,) = await sandbox.fork()
        except BaseException:
            self._fleet.free_place()
            raise
        try:
            yield measured(child, self._fleet.metrics)
        finally:
            await self._fleet.kill(child, place=True)

    async def release(self) -> None:
        """Kill the sandbox and delete its snapshot. Idempotent."""
        self.stop_resting()
        if not self._fleet.forget(self, place=False):
            return
        self._fleet.resumable.pop(self.sandbox.id, None)
        self.account()
        try:
            await self._fleet.kill(self.sandbox, place=True)
        finally:
            if self.snapshot:
                await self._fleet.backend.delete_snapshot(self.snapshot)

    async def detach(self) -> dict[str, str]:
        """Let go without killing: paused, to be restored from the record, maybe elsewhere."""
        self.stop_resting()
        async with self._lock:
            await self._pause()
        self._fleet.forget(self)
        return self.record()
