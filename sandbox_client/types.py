"""The vocabulary of sandboxes, and the protocol that every backend speaks.

sandbox    A place to run untrusted code. Lives until killed, or until its time to live runs out.
state      ``running`` or ``paused``. A paused sandbox keeps its files and its processes' memory, uses no CPU,
           and answers no call but resume, kill and info.
fork       Children with the same files (and, where the backend can, memory). The source goes on.
snapshot   A stored state from which sandboxes are created later, also after the source is gone.
template   What a sandbox is created from: a backend's name for an image, or a snapshot's id.

Everything is async; `sandbox_client.sync` wraps it for plain code. Every call has a time limit and may be
cancelled at any await: an exec that is cancelled kills what it started, a create that is cancelled kills the
sandbox that it may have made.
"""

from __future__ import annotations

import builtins
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol

MIB = 1024 * 1024


class State(StrEnum):
    RUNNING = "running"
    PAUSED = "paused"


class FileType(StrEnum):
    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend truly does. Callers read it instead of guessing from the backend's name."""

    isolated: bool  # untrusted code cannot reach the host
    pause_keeps_memory: bool  # processes go on after resume
    fork_keeps_memory: bool  # children have the source's processes
    snapshot_keeps_memory: bool
    survives_client: bool  # a sandbox outlives the process that made it
    network_rules: bool  # egress rules beyond on and off
    users: bool  # exec as other users than the default one
    enforced_limits: frozenset[str] = frozenset()  # of memory, pids, cpu, disk, files
    relabels: bool = False  # a living sandbox's metadata can be replaced
    notes: tuple[str, ...] = ()  # in words, what is weaker here than elsewhere


@dataclass(frozen=True, slots=True)
class Limits:
    """Resources of one sandbox. Remote servers take them from the template."""

    memory_bytes: int = 512 * MIB
    disk_bytes: int = 256 * MIB  # home folder; /tmp has as much again
    cpus: float = 1.0
    processes: int = 128
    open_files: int = 1024


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What to create. ``metadata`` is how sandboxes are found again: give run, task and sample.

    ``ttl_s`` is always sent: servers' own default is 15 s. At its end the sandbox is paused and kept
    (``auto_pause``) or killed. ``auto_resume`` lets exec and files wake a paused sandbox.
    """

    template: str = "base"
    ttl_s: float = 600.0
    auto_pause: bool = True
    auto_resume: bool = False
    network: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    id: str
    template: str
    state: State
    started_at: float  # seconds since the epoch
    ends_at: float  # seconds since the epoch
    metadata: dict[str, str]


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    id: str
    names: tuple[str, ...]
    created_at: float  # seconds since the epoch


@dataclass(frozen=True, slots=True)
class FileInfo:
    name: str
    path: str
    type: FileType
    size_bytes: int
    mode: int  # permission bits
    modified_at: float  # seconds since the epoch
    target: str = ""  # of a symbolic link


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some output, as it came. Chunks may cut a character in two."""

    stream: Literal["stdout", "stderr"]
    data: bytes


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a command ended. ``exit_code`` is 128 + n for signal n, as a shell counts.

    Where output was longer than its limit, ``stdout``/``stderr`` hold its head and tail with a line between
    that says how many bytes are missing, and ``*_bytes`` what there was in all.
    """

    exit_code: int
    stdout: str
    stderr: str
    timed_out: bool = False
    out_of_memory: bool = False  # the kernel killed a process of the sandbox meanwhile
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    seconds_s: float = 0.0

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out


@dataclass(frozen=True, slots=True)
class Exit:
    """A process's end, as the sandbox reports it."""

    exit_code: int
    timed_out: bool = False
    out_of_memory: bool = False


class Process(Protocol):
    """A started command. Iterate for its output; ``exit`` is set once the iteration has ended by itself.

    Iteration raises `BrokenStream` if the connection ends without the process's end.
    """

    pid: int
    exit: Exit | None

    def __aiter__(self) -> AsyncIterator[Chunk]: ...
    async def write_stdin(self, data: bytes) -> None: ...
    async def close_stdin(self) -> None: ...
    async def signal(self, number: int) -> None:
        """SIGTERM or SIGKILL."""


Command = str | Sequence[str]
"""A string runs under ``/bin/bash -l -c``; a sequence runs as it is, without a shell."""


class Sandbox(Protocol):
    """A handle. Cheap; holds no resource but its backend's connections."""

    id: str
    metadata: dict[str, str]

    def start(
        self,
        command: Command,
        *,
        timeout_s: float = 60.0,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bool = False,
    ) -> AbstractAsyncContextManager[Process]:
        """Start a command and stream it. Leaving the context kills it if it still runs."""

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
        """Run a command to its end. A command that overruns ``timeout_s`` is killed with all its children."""

    async def read_file(self, path: str, *, limit_bytes: int = 64 * MIB) -> bytes: ...
    async def write_file(self, path: str, data: bytes | str, *, mode: int | None = None) -> None:
        """Create or overwrite; parents are made."""

    async def list_files(self, path: str, *, depth: int = 1) -> list[FileInfo]: ...
    async def stat(self, path: str) -> FileInfo: ...
    async def move(self, source: str, destination: str) -> None: ...
    async def remove(self, path: str) -> None: ...
    async def make_dir(self, path: str) -> None: ...

    async def pause(self) -> None:
        """Idempotent."""

    async def resume(self, *, ttl_s: float | None = None) -> None:
        """Idempotent; the deadline becomes now + ``ttl_s`` (the spec's where None)."""

    async def fork(self, count: int = 1) -> Sequence[Sandbox]:
        """Children of a running sandbox. All or none: if one fails, the others are killed and it raises."""

    async def snapshot(self, name: str | None = None) -> SnapshotInfo: ...
    async def extend(self, ttl_s: float) -> None:
        """The deadline becomes now + ``ttl_s``; also the heartbeat."""

    async def relabel(self, metadata: Mapping[str, str]) -> None:
        """Replace the metadata, running or paused. Raises `Unsupported` where the backend cannot."""

    async def info(self) -> SandboxInfo: ...
    async def kill(self) -> None:
        """Idempotent: a sandbox that is gone is what was asked for."""


class Backend(Protocol):
    name: str
    capabilities: Capabilities

    async def create(self, spec: SandboxSpec) -> Sandbox: ...
    async def connect(self, sandbox_id: str) -> Sandbox:
        """A handle to a sandbox that lives, running or paused; its state is left as it is."""

    async def list(
        self, metadata: Mapping[str, str] | None = None, state: State | None = None
    ) -> builtins.list[SandboxInfo]: ...
    async def list_snapshots(self, name: str | None = None) -> builtins.list[SnapshotInfo]: ...
    async def delete_snapshot(self, snapshot_id: str) -> None:
        """Idempotent."""

    async def close(self) -> None:
        """Release connections. Kills local sandboxes; remote ones live on until their deadline."""


def check_spec(spec: SandboxSpec) -> None:
    """Raise `ValueError` for what no backend can make."""
    if spec.ttl_s <= 0:
        raise ValueError(f"ttl_s must be positive, got {spec.ttl_s}")
    for key, value in {**spec.env, **spec.metadata}.items():
        if not isinstance(key, str) or not isinstance(value, str) or not key or "\0" in key + value:
            raise ValueError(f"env and metadata map non-empty strings to strings, got {key!r}: {value!r}")
    if any("=" in key for key in spec.env):
        raise ValueError("an environment variable's name cannot hold '='")


def shell_argv(command: Command) -> builtins.list[str]:
    """The argument vector of a command; see `Command`."""
    if isinstance(command, str):
        return ["/bin/bash", "-l", "-c", command]
    argv = [os.fspath(part) for part in command]
    if not argv:
        raise ValueError("empty command")
    return argv
