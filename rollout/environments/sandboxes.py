"""The sandboxes of one rollout worker: a fleet that is opened when first asked for, and what it measures.

Lives in the event loop in which the worker's environments live; only `measured` may be asked for from there too.
Owner of a sandbox: the environment that holds its lease; at the end the fleet kills what is left.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from k3rl.config.rollout import SandboxConfig
from k3rl.errors import UserError
from sandbox_client import (
    Backend,
    Fleet,
    FleetConfig,
    Lease,
    Limits,
    LocalBackend,
    Sandbox,
    SandboxError,
    SandboxSpec,
)

MIB = 1 << 20
JUDGES = 4
"""Forks that are judged in at once, beside the trajectories' own sandboxes: without places of their own, trajectories
that all hold a sandbox would wait for each other."""
RUN_FILE = "run"
CHECK_S = 3.0
"""How long a check before the run waits for a server that does not answer."""


class Sandboxes:
    """``folder`` is the run's own for this: its identity among all runs that use the same server is kept there, and
    local sandboxes' snapshots. ``owner`` names this worker within the run; ``places`` is the quota where the config has
    none; ``tool_timeout_s`` limits tools that have no limit of their own."""

    def __init__(
        self,
        config: SandboxConfig,
        *,
        folder: Path,
        owner: str,
        places: int = 64,
        tool_timeout_s: float = 60.0,
    ) -> None:
        self.config, self.tool_timeout_s = config, tool_timeout_s
        self.keep: Mapping[str, Any] | None = None
        """By sandbox id: records of all that trajectories of the run still need; None: not known."""
        self.calls = self.replayed = 0
        self._folder, self._owner = folder, owner
        self._quota = config.quota or places
        self._backend: Backend | None = None
        self._fleet: Fleet | None = None
        self._opening = asyncio.Lock()
        self._places = asyncio.Semaphore(self._quota)
        self._judges = asyncio.Semaphore(JUDGES)

    @property
    def opened(self) -> bool:
        return self._fleet is not None

    @property
    def survive(self) -> bool:
        """Do sandboxes outlive the process that made them?"""
        if self._backend is None:
            return self.config.backend != "local"
        return self._backend.capabilities.survives_client

    async def fleet(self) -> Fleet:
        """Opened by the first who asks. What dead workers of the run left is killed, but for what is in `keep`.

        Raises `SandboxError` where there is no isolation or no server.
        """
        async with self._opening:
            if self._fleet is None:
                self._backend = await asyncio.to_thread(_make_backend, self.config, self._folder)
                fleet = Fleet(self._backend, self._fleet_config(run_identity(self._folder)))
                await fleet.open(keep=self.keep)
                self._fleet = fleet
        return self._fleet

    def _fleet_config(self, run: str) -> FleetConfig:
        config = self.config
        spec = SandboxSpec(
            template=config.template,
            ttl_s=config.ttl_s,
            network=config.network,
            limits=Limits(
                memory_bytes=config.memory_mb * MIB,
                disk_bytes=config.disk_mb * MIB,
                cpus=config.cpus,
                processes=config.processes,
            ),
        )
        return FleetConfig(
            run=run,
            owner=self._owner,
            spec=spec,
            quota=self._quota + JUDGES,
            warm=config.warm,
            rest_s=config.rest_s,
            heartbeat_s=min(60.0, config.ttl_s / 4),
        )

    # -- places --------------------------------------------------------------------------------------------

    async def take_place(self) -> None:
        """Before a lease; `free_place` after it."""
        await self._places.acquire()

    def free_place(self) -> None:
        self._places.release()

    @asynccontextmanager
    async def judge(self, lease: Lease) -> AsyncIterator[Sandbox]:
        """A fork of the sandbox, killed at the end."""
        async with self._judges, lease.judge() as sandbox:
            yield sandbox

    # -- snapshots -----------------------------------------------------------------------------------------

    async def drop_snapshots(self, ids: Iterable[str]) -> None:
        """Delete snapshots of checkpoints that are not needed any more. Idempotent."""
        backend = (await self.fleet()).backend
        for id_ in ids:
            await backend.delete_snapshot(id_)

    # -- metrics, end --------------------------------------------------------------------------------------

    async def measured(self) -> dict[str, float]:
        """By the names of docs/metrics.md, without their prefix; empty before the first sandbox."""
        if self._fleet is None:
            return {}
        counted = {"calls": float(self.calls), "replayed": float(self.replayed)}
        return self._fleet.stats() | counted | {"faults": float(sum(self._fleet.faults.values()))}

    async def close(self, over: bool = False) -> None:
        """Let go of everything. What trajectories need to go on is kept, as far as the backend lets it, unless the run
        is ``over``: nobody will resume it."""
        if self._fleet is not None:
            await self._fleet.close(keep_resumable=not over)
            self._fleet = None
        if self._backend is not None:
            await self._backend.close()
            self._backend = None


def check_sandboxes(config: SandboxConfig) -> None:
    """Raises `UserError` where no sandbox could be made: no isolation on this machine, or no server."""

    async def look() -> None:
        with tempfile.TemporaryDirectory(prefix="k3rl-check-") as folder:
            backend = _make_backend(config, Path(folder), patience_s=CHECK_S)
            try:
                await backend.list({"k3rl-run": "check"})
            finally:
                await backend.close()

    try:
        asyncio.run(look())
    except SandboxError as error:
        raise UserError(f"agent.sandbox: there are no sandboxes here: {error}") from error


def _make_backend(config: SandboxConfig, folder: Path, patience_s: float | None = None) -> Backend:
    if config.backend == "local":
        return LocalBackend(Path(config.root) if config.root else folder, unsafe=config.unsafe)
    from sandbox_client.agentenv import AgentEnvBackend, AgentEnvConfig

    server = AgentEnvConfig.from_environment()
    return AgentEnvBackend(server if patience_s is None else replace(server, patience_s=patience_s))


def run_identity(folder: Path) -> str:
    """The name by which a run's sandboxes are known on a server: made once, kept in ``folder``. Two processes that
    ask at the same time get the same."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = folder / RUN_FILE
    if not file.exists():
        identity = os.urandom(6).hex()
        mine = folder / f"{RUN_FILE}.{identity}"
        mine.write_text(f"{folder.resolve().parent.name}-{identity}", encoding="utf-8")
        try:
            os.link(mine, file)  # whole, or not at all where another was first
        except FileExistsError:
            pass
        except OSError:  # a file system without links: the last one wins
            os.replace(mine, file)
        mine.unlink(missing_ok=True)
    return file.read_text(encoding="utf-8")
