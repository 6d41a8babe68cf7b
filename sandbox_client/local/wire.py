"""The host's end of the frames that a sandbox's init speaks (see `init.py`). What comes back is untrusted.

One connection per request. Closing it cancels the request; an exec's descendants are then killed inside.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sandbox_client.errors import (
    BrokenStream,
    FileMissing,
    InvalidRequest,
    OutOfSpace,
    SandboxError,
    SandboxNotFound,
    SandboxTimeout,
    ServerFault,
    Unavailable,
)
from sandbox_client.types import Chunk, Exit

HEADER = struct.Struct("!cI")
MAX_FRAME_BYTES = 8 * 1024 * 1024
PIECE_BYTES = 256 * 1024
_CONNECT_TRIES = 50

_KINDS: dict[str, type[SandboxError]] = {
    "ENOENT": FileMissing,
    "ENOSPC": OutOfSpace,
    "EDQUOT": OutOfSpace,
    "EFBIG": OutOfSpace,
    "EAGAIN": Unavailable,
    "ENOMEM": Unavailable,
}
_CALLERS_FAULT = {
    "EISDIR",
    "ENOTDIR",
    "EACCES",
    "EPERM",
    "EROFS",
    "EEXIST",
    "EINVAL",
    "ELOOP",
    "ENAMETOOLONG",
}
_CALLERS_FAULT |= {
    "ENOTEMPTY",
    "EXDEV",
    "ENXIO",
    "ETXTBSY",
    "E2BIG",
    "ENOEXEC",
    "EBUSY",
    "ValueError",
    "Error",
}


class Connection:
    """One request's connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, label: str) -> None:
        self._reader, self._writer, self._label = reader, writer, label

    async def send(self, kind: bytes, payload: bytes = b"") -> None:
        try:
            self._writer.write(HEADER.pack(kind, len(payload)) + payload)
            await self._writer.drain()
        except (ConnectionError, OSError) as error:
            raise BrokenStream(f"{self._label}: connection lost while sending") from error

    async def send_all(self, data: bytes) -> None:
        for start in range(0, len(data), PIECE_BYTES):
            await self.send(b"D", data[start : start + PIECE_BYTES])
        await self.send(b"Z")

    async def receive(self) -> tuple[bytes, bytes]:
        """-> (kind, payload). An ``F`` frame raises its error; the end of the connection `BrokenStream`."""
        try:
            kind, size = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            if size > MAX_FRAME_BYTES:
                raise BrokenStream(f"{self._label}: a frame of {size} bytes")
            payload = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise BrokenStream(f"{self._label}: the connection ended before the answer did") from error
        if kind == b"F":
            raise self._error(payload)
        return kind, payload

    def _error(self, payload: bytes) -> SandboxError:
        said = self.parse(payload)
        kind, message = str(said.get("kind")), str(said.get("message"))[:1000]
        default = InvalidRequest if kind in _CALLERS_FAULT else ServerFault
        return _KINDS.get(kind, default)(f"{self._label}: {message or kind}")

    def parse(self, payload: bytes) -> Any:
        try:
            return json.loads(payload.decode("utf-8", "surrogateescape"))
        except ValueError as error:
            raise BrokenStream(f"{self._label}: an answer that is not JSON") from error

    async def receive_json(self) -> Any:
        kind, payload = await self.receive()
        if kind != b"J":
            raise BrokenStream(f"{self._label}: unexpected frame {kind!r}")
        return self.parse(payload)

    async def receive_data(self, limit_bytes: int, take: Callable[[bytes], object]) -> None:
        """Hand ``D`` frames to ``take`` until ``Z``; more than the limit raises `OutOfSpace`."""
        total = 0
        while True:
            kind, payload = await self.receive()
            if kind == b"Z":
                return
            total += len(payload)
            if kind != b"D" or total > limit_bytes:
                raise OutOfSpace(f"{self._label}: more than {limit_bytes} bytes")
            take(payload)

    async def close(self) -> None:
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except (ConnectionError, OSError):  # closing a broken connection is no news
            return


async def _connect(path: Path, label: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Unix socket paths hold 107 bytes at most; a longer one is reached through its folder's descriptor."""
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError as error:
        raise SandboxNotFound(f"{label}: gone") from error
    try:
        for _ in range(_CONNECT_TRIES):
            try:
                return await asyncio.open_unix_connection(f"/proc/self/fd/{folder}/{path.name}")
            except BlockingIOError:  # the backlog is full
                await asyncio.sleep(0.02)
            except (FileNotFoundError, ConnectionRefusedError) as error:
                raise SandboxNotFound(f"{label}: gone") from error
        raise Unavailable(f"{label}: too many connections wait for its init")
    finally:
        os.close(folder)


@asynccontextmanager
async def open_request(path: Path, label: str, request: dict[str, Any]) -> AsyncIterator[Connection]:
    """Connect and send ``request``. Leaving closes the connection, whatever happened."""
    connection = Connection(*await _connect(path, label), label)
    try:
        await connection.send(b"Q", json.dumps(request).encode("utf-8", "surrogateescape"))
        yield connection
    finally:
        await connection.close()


class LocalProcess:
    """A `Process` at the other end of a connection.

    ``grace_s`` is how much longer than the command's own limit its end may take to arrive; ``paused`` tells
    whether the sandbox stands still, which does not count.
    """

    TICK_S = 1.0

    def __init__(
        self,
        connection: Connection,
        pid: int,
        limit_s: float,
        paused: Callable[[], bool],
        oom_kills: Callable[[], int],
    ) -> None:
        self.pid = pid
        self.exit: Exit | None = None
        self._connection, self._left_s = connection, limit_s
        self._paused, self._oom_kills, self._oom_before = paused, oom_kills, oom_kills()

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        while True:
            kind, payload = await self._receive()
            if kind == b"O":
                yield Chunk("stdout", payload)
            elif kind == b"E":
                yield Chunk("stderr", payload)
            elif kind == b"X":
                said = self._connection.parse(payload)
                oom = self._oom_kills() > self._oom_before
                self.exit = Exit(int(said["exit_code"]), bool(said["timed_out"]), oom)
                return

    async def _receive(self) -> tuple[bytes, bytes]:
        waiting = asyncio.ensure_future(self._connection.receive())
        try:
            while True:
                done, _ = await asyncio.wait({waiting}, timeout=self.TICK_S)
                if done:
                    return waiting.result()
                if not self._paused():
                    self._left_s -= self.TICK_S
                if self._left_s <= 0:
                    raise SandboxTimeout(f"process {self.pid}: no end long after its time limit")
        finally:
            waiting.cancel()

    async def write_stdin(self, data: bytes) -> None:
        await self._connection.send(b"I", data)

    async def close_stdin(self) -> None:
        await self._connection.send(b"C")

    async def signal(self, number: int) -> None:
        await self._connection.send(b"K", str(int(number)).encode())
