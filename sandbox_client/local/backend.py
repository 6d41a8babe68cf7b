"""Sandboxes on this machine's own isolation: the default backend, and the one for a laptop."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from sandbox_client.errors import (
    BrokenStream,
    InvalidRequest,
    SandboxError,
    SandboxNotFound,
    SandboxPaused,
    SandboxTimeout,
    Unsupported,
)
from sandbox_client.local import bwrap
from sandbox_client.local.cgroup import Cgroup
from sandbox_client.local.host import Host, Live, default_root
from sandbox_client.local.wire import Connection, LocalProcess, open_request
from sandbox_client.output import run_to_end
from sandbox_client.types import (
    MIB,
    Capabilities,
    Chunk,
    Command,
    ExecResult,
    FileInfo,
    FileType,
    Process,
    Sandbox,
    SandboxInfo,
    SandboxSpec,
    SnapshotInfo,
    State,
    check_spec,
    shell_argv,
)

T = TypeVar("T")
S = TypeVar("S", bound="Sandbox")
_FILE_CALL_S = 60.0
_COPY_S = 300.0
_END_GRACE_S = 30.0
_SLACK_BYTES = 64 * MIB


class LocalBackend:
    """Sandboxes under bubblewrap. They end with this object or with this process.

    ``root`` holds the snapshots, which stay. ``template`` of a spec is ``"base"`` or a snapshot's id or name.
    Raises `IsolationUnavailable` where the machine cannot isolate, unless ``unsafe``: then code runs as a
    plain child process with this user's rights, for code that you trust.
    """

    name = "local"

    def __init__(
        self, root: str | os.PathLike[str] | None = None, *, unsafe: bool = False, launchers: int = 4
    ) -> None:
        self.host = Host(Path(root) if root is not None else default_root(), unsafe=unsafe)
        self._threads = ThreadPoolExecutor(launchers, thread_name_prefix="sandbox")
        self.capabilities = _capabilities(self.host.isolation)

    async def create(self, spec: SandboxSpec | None = None) -> LocalSandbox:
        spec = spec or SandboxSpec()
        try:
            check_spec(spec)
        except ValueError as error:
            raise InvalidRequest(str(error), code=400) from error
        if spec.template == "base":
            return await self._create_empty(spec)
        snapshot_id = await self.blocking(self.host.snapshots.find, spec.template)
        if snapshot_id is None:
            raise InvalidRequest(f"unknown template '{spec.template}'", code=400)
        return await self.create_from_tar(spec, self.host.snapshots.file(snapshot_id))

    async def _create_empty(self, spec: SandboxSpec) -> LocalSandbox:
        """A create that is cancelled still runs to its end in its thread; the sandbox is then killed."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, self.host.create, spec)
        try:
            live = await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(self._discard)
            raise
        return LocalSandbox(self, live)

    def _discard(self, future: asyncio.Future[Live]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._threads.submit(self.host.kill, future.result().id)

    async def create_from_tar(self, spec: SandboxSpec, tar: Path) -> LocalSandbox:
        sandbox = await self._create_empty(spec)
        try:
            await sandbox.load(tar)
        except BaseException:
            await self.finish(self.host.kill, sandbox.id)
            raise
        return sandbox

    async def connect(self, sandbox_id: str) -> LocalSandbox:
        return LocalSandbox(self, await self.blocking(self.host.get, sandbox_id))

    async def list(
        self, metadata: Mapping[str, str] | None = None, state: State | None = None
    ) -> list[SandboxInfo]:
        wanted = dict(metadata or {}).items()
        infos = [_info(live) for live in await self.blocking(self.host.all)]
        return [i for i in infos if wanted <= i.metadata.items() and state in (None, i.state)]

    async def list_snapshots(self, name: str | None = None) -> builtins.list[SnapshotInfo]:
        found = await self.blocking(self.host.snapshots.all)
        every = [SnapshotInfo(i, tuple(m["names"]), m["created_at"]) for i, m in found.items()]
        return [s for s in every if name is None or name in s.names]

    async def delete_snapshot(self, snapshot_id: str) -> None:
        await self.blocking(self.host.snapshots.delete, snapshot_id)

    async def close(self) -> None:
        await self.finish(self.host.close)
        self._threads.shutdown(wait=False)

    async def __aenter__(self) -> LocalBackend:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def blocking(self, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)

    async def finish(self, call: Callable[..., T], *args: Any) -> T:
        """Like `blocking`, but a cancelled caller waits for the end first: nothing stays half-done."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, call, *args)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait({future})
            raise


class LocalSandbox:
    """See `sandbox_client.types.Sandbox`."""

    def __init__(self, backend: LocalBackend, live: Live) -> None:
        self.id, self.metadata = live.id, dict(live.spec.metadata)
        self._backend, self._host, self._live = backend, backend.host, live

    def __repr__(self) -> str:
        return f"<LocalSandbox {self.id}>"

    # ------------------------------------------------------------ commands

    @asynccontextmanager
    async def start(
        self,
        command: Command,
        *,
        timeout_s: float = 60.0,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bool = False,
    ) -> AsyncIterator[Process]:
        if user not in (None, "user"):
            raise Unsupported(f"a local sandbox has one user, 'user'; asked for '{user}'")
        live = await self._running()
        request: dict[str, Any] = {
            "op": "exec",
            "argv": shell_argv(command),
            "env": {**bwrap.environment(), "HOME": live.home, **live.spec.env, **(env or {})},
            "cwd": cwd if cwd is None or cwd.startswith("/") else f"{live.home}/{cwd}",
            "timeout_s": timeout_s,
            "stdin": stdin,
            "processes": live.spec.limits.processes,
        }
        async with open_request(live.socket, f"sandbox {self.id}", request) as connection:
            try:
                kind, payload = await self._bounded(connection.receive(), _FILE_CALL_S)
            except SandboxError as error:
                raise _cannot_start(error, request["argv"][0]) from error
            if kind != b"S":
                raise BrokenStream(f"sandbox {self.id}: unexpected frame {kind!r}")
            paused = lambda: live.state is State.PAUSED  # noqa: E731
            pid = int(connection.parse(payload)["pid"])
            yield LocalProcess(connection, pid, timeout_s + _END_GRACE_S, paused, live.cgroup.oom_kills)

    async def exec(
        self,
        command: Command,
        *,
        timeout_s: float = 60.0,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bytes | None = None,
        on_output: Callable[[Chunk], None] | None = None,
        output_limit_bytes: int = MIB,
    ) -> ExecResult:
        starting = self.start(
            command, timeout_s=timeout_s, env=env, cwd=cwd, user=user, stdin=stdin is not None
        )
        return await run_to_end(
            starting, stdin=stdin, on_output=on_output, output_limit_bytes=output_limit_bytes
        )

    # ------------------------------------------------------------ files

    async def read_file(self, path: str, *, limit_bytes: int = 64 * MIB) -> bytes:
        data = bytearray()
        async with self._request({"op": "read", "path": path, "limit": limit_bytes}) as connection:
            await self._bounded(connection.receive_data(limit_bytes, data.extend), _FILE_CALL_S)
        return bytes(data)

    async def write_file(self, path: str, data: bytes | str, *, mode: int | None = None) -> None:
        content = data.encode() if isinstance(data, str) else data
        async with self._request({"op": "write", "path": path, "mode": mode}) as connection:
            await self._bounded(_send_then_answer(connection, connection.send_all(content)), _FILE_CALL_S)

    async def list_files(self, path: str, *, depth: int = 1) -> list[FileInfo]:
        return [
            _file_info(e)
            for e in await self._ask({"op": "list", "path": path, "depth": depth, "limit": 20_000})
        ]

    async def stat(self, path: str) -> FileInfo:
        return _file_info(await self._ask({"op": "stat", "path": path}))

    async def move(self, source: str, destination: str) -> None:
        await self._ask({"op": "move", "source": source, "destination": destination})

    async def remove(self, path: str) -> None:
        await self._ask({"op": "remove", "path": path})

    async def make_dir(self, path: str) -> None:
        await self._ask({"op": "mkdir", "path": path})

    # ------------------------------------------------------------ life

    async def pause(self) -> None:
        await self._backend.finish(self._host.pause, self.id)

    async def resume(self, *, ttl_s: float | None = None) -> None:
        await self._backend.finish(self._host.resume, self.id, ttl_s)

    async def extend(self, ttl_s: float) -> None:
        await self._backend.finish(self._host.extend, self.id, ttl_s)

    async def relabel(self, metadata: Mapping[str, str]) -> None:
        try:
            check_spec(SandboxSpec(metadata=metadata))
        except ValueError as error:
            raise InvalidRequest(f"sandbox {self.id}: {error}", code=400) from error
        await self._backend.finish(self._host.relabel, self.id, dict(metadata))
        self.metadata = dict(metadata)

    async def kill(self) -> None:
        await self._backend.finish(self._host.kill, self.id)

    async def info(self) -> SandboxInfo:
        return _info(await self._backend.blocking(self._host.get, self.id))

    async def fork(self, count: int = 1) -> list[LocalSandbox]:
        if count < 1:
            raise InvalidRequest(f"fork: count must be at least 1, got {count}", code=400)
        live = await self._running(may_wake=False)
        with tempfile.NamedTemporaryFile(dir=self._host.root, prefix="fork-") as file:
            await self._save(file.name)
            spec = replace(live.spec, template="base")
            making = [self._backend.create_from_tar(spec, Path(file.name)) for _ in range(count)]
            return await all_or_none(making)

    async def snapshot(self, name: str | None = None) -> SnapshotInfo:
        live = await self._running(may_wake=False)
        fd, temporary = tempfile.mkstemp(dir=self._host.root, prefix="snapshot-")
        os.close(fd)
        try:
            await self._save(temporary)
            names = [name] if name else []
            keep = self._host.snapshots.keep
            snapshot_id, created = await self._backend.finish(
                keep, Path(temporary), names, live.spec, self.id
            )
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        return SnapshotInfo(snapshot_id, tuple(names), created)

    async def load(self, tar: Path) -> None:
        """Put a saved file layer into this sandbox."""
        async with self._request({"op": "load", "folders": self._folders()}) as connection:
            await self._bounded(_send_then_answer(connection, _send_file(connection, tar)), _COPY_S)

    async def _save(self, path: str) -> None:
        limits = self._live.spec.limits
        limit_bytes = 2 * limits.disk_bytes + _SLACK_BYTES  # sparse files could claim any size
        async with self._request({"op": "save", "folders": self._folders()}) as connection:
            with open(path, "wb") as file:
                await self._bounded(connection.receive_data(limit_bytes, file.write), _COPY_S)

    def _folders(self) -> dict[str, str]:
        if self._host.isolation.mode == "none":
            return {"home": self._live.home}  # /tmp is the host's
        return {"home": bwrap.HOME, "tmp": "/tmp"}

    # ------------------------------------------------------------ helpers

    async def _running(self, *, may_wake: bool = True) -> Live:
        live = await self._backend.blocking(self._host.get, self.id)
        if live.state is State.RUNNING:
            return live
        if not may_wake:
            raise SandboxPaused(f"sandbox {self.id} is paused")
        return await self._backend.finish(self._host.running, self.id)

    @asynccontextmanager
    async def _request(self, request: dict[str, Any]) -> AsyncIterator[Connection]:
        live = await self._running()
        label = f"sandbox {self.id}: {request['op']} {request.get('path', '')}".rstrip()
        async with open_request(live.socket, label, request) as connection:
            yield connection

    async def _ask(self, request: dict[str, Any]) -> Any:
        async with self._request(request) as connection:
            return await self._bounded(connection.receive_json(), _FILE_CALL_S)

    async def _bounded(self, waiting: Any, limit_s: float) -> Any:
        try:
            return await asyncio.wait_for(waiting, limit_s)
        except TimeoutError as error:
            raise SandboxTimeout(f"sandbox {self.id}: no answer within {limit_s:g} s") from error
        except BrokenStream as error:
            if self._live.gone:
                raise SandboxNotFound(f"sandbox {self.id}: killed meanwhile", code=404) from error
            raise


async def all_or_none(making: Sequence[Coroutine[Any, Any, S]]) -> list[S]:
    """Sandboxes made side by side. If one fails, or the caller is cancelled, those already made are
    killed."""
    tasks = [asyncio.ensure_future(m) for m in making]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(made.kill() for made in ended if not isinstance(made, BaseException)))
        raise


async def _send_file(connection: Connection, path: Path) -> None:
    with open(path, "rb") as file:
        while piece := file.read(256 * 1024):
            await connection.send(b"D", piece)
    await connection.send(b"Z")


async def _send_then_answer(connection: Connection, sending: Any) -> Any:
    """An answer that comes before all is sent is an error; it tells why the sending failed."""
    task = asyncio.ensure_future(sending)
    try:
        answer = await connection.receive_json()
        await task
        return answer
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _cannot_start(error: SandboxError, program: str) -> SandboxError:
    if isinstance(error, BrokenStream | SandboxTimeout | SandboxNotFound) or error.retryable:
        return error
    return InvalidRequest(f"cannot start {program!r}: {error}", code=400)


def _info(live: Live) -> SandboxInfo:
    ends_at = time.time() + live.deadline - time.monotonic()
    return SandboxInfo(
        live.id, live.spec.template, live.state, live.started_at, ends_at, dict(live.spec.metadata)
    )


def _file_info(said: dict[str, Any]) -> FileInfo:
    return FileInfo(
        name=str(said["name"]),
        path=str(said["path"]),
        type=FileType(said["type"]),
        size_bytes=int(said["size"]),
        mode=int(said["mode"]),
        modified_at=float(said["modified"]),
        target=str(said["target"]),
    )


def _capabilities(isolation: bwrap.Isolation) -> Capabilities:
    controllers = Cgroup("probe").controllers
    enforced = (
        {"files", "pids"}
        | ({"disk"} if isolation.mode != "none" else set())
        | (controllers & {"memory", "cpu"})
    )
    notes = ["fork and snapshot copy files only: children start without the source's processes"]
    notes += [] if "memory" in controllers else ["memory is limited per process, not per sandbox"]
    notes += [] if "cpu" in controllers else ["CPU time is not limited"]
    notes += [] if "freezer" in controllers else ["pause stops processes by SIGSTOP"]
    notes += [] if isolation.mode != "none" else ["no isolation: code runs with this user's rights"]
    return Capabilities(
        isolated=isolation.mode != "none",
        pause_keeps_memory=True,
        fork_keeps_memory=False,
        snapshot_keeps_memory=False,
        survives_client=False,
        network_rules=False,
        users=False,
        enforced_limits=frozenset(enforced),
        relabels=True,
        notes=tuple(notes),
    )
