"""The same calls for plain code: each runs to its end on a loop in a background thread.

with SyncBackend(LocalBackend()) as backend:
    sandbox = backend.create(SandboxSpec())
    print(sandbox.exec("echo hello").stdout)
"""

from __future__ import annotations

import asyncio
import builtins
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from sandbox_client.types import (
    MIB,
    Backend,
    Capabilities,
    Chunk,
    Command,
    ExecResult,
    FileInfo,
    Sandbox,
    SandboxInfo,
    SandboxSpec,
    SnapshotInfo,
    State,
)

T = TypeVar("T")


class SyncBackend:
    """Wraps a `Backend` that nothing else uses. Thread-safe. Closing closes the backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sandbox-loop", daemon=True)
        self._thread.start()

    @property
    def capabilities(self) -> Capabilities:
        return self._backend.capabilities

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """An interrupt here cancels the call, so that what it started is cleaned up."""
        if threading.current_thread() is self._thread:
            call.close()
            raise RuntimeError("the synchronous sandbox client cannot be used from its own loop")
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def create(self, spec: SandboxSpec | None = None) -> SyncSandbox:
        return SyncSandbox(self, self.run(self._backend.create(spec or SandboxSpec())))

    def connect(self, sandbox_id: str) -> SyncSandbox:
        return SyncSandbox(self, self.run(self._backend.connect(sandbox_id)))

    def list(
        self, metadata: Mapping[str, str] | None = None, state: State | None = None
    ) -> list[SandboxInfo]:
        return self.run(self._backend.list(metadata, state))

    def list_snapshots(self, name: str | None = None) -> builtins.list[SnapshotInfo]:
        return self.run(self._backend.list_snapshots(name))

    def delete_snapshot(self, snapshot_id: str) -> None:
        self.run(self._backend.delete_snapshot(snapshot_id))

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self.run(self._backend.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> SyncBackend:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SyncSandbox:
    """See `sandbox_client.types.Sandbox`. Streaming needs the async face; ``on_output`` sees chunks as they
    come."""

    def __init__(self, backend: SyncBackend, sandbox: Sandbox) -> None:
        self._backend, self._sandbox = backend, sandbox
        self.id, self.metadata = sandbox.id, sandbox.metadata

    def exec(
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
        call = self._sandbox.exec(
            command,
            timeout_s=timeout_s,
            env=env,
            cwd=cwd,
            user=user,
            stdin=stdin,
            on_output=on_output,
            output_limit_bytes=output_limit_bytes,
        )
        return self._backend.run(call)

    def read_file(self, path: str, *, limit_bytes: int = 64 * MIB) -> bytes:
        return self._backend.run(self._sandbox.read_file(path, limit_bytes=limit_bytes))

    def write_file(self, path: str, data: bytes | str, *, mode: int | None = None) -> None:
        self._backend.run(self._sandbox.write_file(path, data, mode=mode))

    def list_files(self, path: str, *, depth: int = 1) -> list[FileInfo]:
        return self._backend.run(self._sandbox.list_files(path, depth=depth))

    def stat(self, path: str) -> FileInfo:
        return self._backend.run(self._sandbox.stat(path))

    def move(self, source: str, destination: str) -> None:
        self._backend.run(self._sandbox.move(source, destination))

    def remove(self, path: str) -> None:
        self._backend.run(self._sandbox.remove(path))

    def make_dir(self, path: str) -> None:
        self._backend.run(self._sandbox.make_dir(path))

    def pause(self) -> None:
        self._backend.run(self._sandbox.pause())

    def resume(self, *, ttl_s: float | None = None) -> None:
        self._backend.run(self._sandbox.resume(ttl_s=ttl_s))

    def fork(self, count: int = 1) -> list[SyncSandbox]:
        return [SyncSandbox(self._backend, s) for s in self._backend.run(self._sandbox.fork(count))]

    def snapshot(self, name: str | None = None) -> SnapshotInfo:
        return self._backend.run(self._sandbox.snapshot(name))

    def extend(self, ttl_s: float) -> None:
        self._backend.run(self._sandbox.extend(ttl_s))

    def relabel(self, metadata: Mapping[str, str]) -> None:
        self._backend.run(self._sandbox.relabel(metadata))
        self.metadata = self._sandbox.metadata

    def info(self) -> SandboxInfo:
        return self._backend.run(self._sandbox.info())

    def kill(self) -> None:
        self._backend.run(self._sandbox.kill())
