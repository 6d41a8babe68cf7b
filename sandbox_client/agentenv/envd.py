"""The daemon inside an AgentENV sandbox: commands over Connect with the JSON codec, files over HTTP (spec/07
§6)."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

import httpx

from sandbox_client.agentenv.config import AgentEnvConfig
from sandbox_client.agentenv.http import NeverSent, classify, json_of, send
from sandbox_client.errors import (
    AuthenticationFailed,
    BrokenStream,
    Conflict,
    FileMissing,
    InvalidRequest,
    OutOfSpace,
    SandboxError,
    SandboxTimeout,
    ServerFault,
    Unavailable,
)
from sandbox_client.types import Chunk, Exit, FileInfo, FileType

PORT = 49983
MAX_FRAME_BYTES = 64 * 1024 * 1024
_HEADER = struct.Struct("!BI")
_COMPRESSED, _END = 1, 2
_END_WAIT_S = 10.0
_CODES: dict[str, type[SandboxError]] = {
    "unauthenticated": AuthenticationFailed,
    "permission_denied": InvalidRequest,
    "invalid_argument": InvalidRequest,
    "failed_precondition": InvalidRequest,
    "already_exists": InvalidRequest,
    "out_of_range": InvalidRequest,
    "not_found": FileMissing,
    "aborted": Conflict,
    "unavailable": Unavailable,
    "deadline_exceeded": SandboxTimeout,
    "resource_exhausted": OutOfSpace,
}
_SIGNALS = {"hangup": 1, "interrupt": 2, "quit": 3, "illegal instruction": 4, "trace/breakpoint trap": 5}
_SIGNALS |= {
    "aborted": 6,
    "bus error": 7,
    "floating point exception": 8,
    "killed": 9,
    "segmentation fault": 11,
}
_SIGNALS |= {"broken pipe": 13, "alarm clock": 14, "terminated": 15, "CPU time limit exceeded": 24}
_TYPES = {"FILE_TYPE_FILE": FileType.FILE, "FILE_TYPE_DIRECTORY": FileType.DIRECTORY}
_TYPES |= {"FILE_TYPE_SYMLINK": FileType.SYMLINK}
_KILL_TREE = """
k() { kill -STOP $1; for c in $(cat /proc/$1/task/*/children 2>/dev/null); do k $c; done; kill -KILL $1; }
k $0
"""


def connect_error(said: Any, label: str) -> SandboxError:
    """A Connect error object -> its exception."""
    said = said if isinstance(said, dict) else {}
    code, message = str(said.get("code", "unknown")), str(said.get("message", ""))[:500]
    return _CODES.get(code, ServerFault)(f"{label}: {message or code}")


class FrameParser:
    """Bytes as they come -> whole frames of a Connect stream, as (flags, payload)."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        self._buffer += data
        frames = []
        while len(self._buffer) >= _HEADER.size:
            flags, size = _HEADER.unpack(self._buffer[: _HEADER.size])
            if size > MAX_FRAME_BYTES:
                raise BrokenStream(f"a frame of {size} bytes")
            if len(self._buffer) < _HEADER.size + size:
                break
            frames.append((flags, bytes(self._buffer[_HEADER.size : _HEADER.size + size])))
            del self._buffer[: _HEADER.size + size]
        return frames


def frame(payload: Any, flags: int = 0) -> bytes:
    data = json.dumps(payload).encode()
    return _HEADER.pack(flags, len(data)) + data


def exit_of(end: Mapping[str, Any], timed_out: bool) -> Exit:
    """An ``EndEvent``. proto3 omits zeros, so a missing exit code is 0; death by signal is told in words."""
    code = int(end.get("exitCode", 0))
    status = str(end.get("status", ""))
    if not end.get("exited", False) and status.startswith("signal: "):
        name = status.removeprefix("signal: ").removesuffix(" (core dumped)")
        code = 128 + _SIGNALS.get(name, 9)
    if timed_out:
        code = 137
    return Exit(code if code >= 0 else 137, timed_out)


class EnvdProcess:
    """A `Process` behind a Start stream. Kills its descendants when its time is over."""

    def __init__(
        self, envd: Envd, events: AsyncIterator[dict[str, Any]], user: str, timeout_s: float
    ) -> None:
        self.pid = 0
        self.exit: Exit | None = None
        self._envd, self._events, self._user = envd, events, user
        self._deadline = time.monotonic() + timeout_s
        self._timed_out = False

    async def started(self) -> None:
        """Wait for the start event."""
        event = await self._next()
        if event is None or "start" not in event:
            raise BrokenStream(f"{self._envd.label}: the stream did not begin with a start event")
        self.pid = int(event["start"].get("pid", 0))

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        while True:
            event = await self._next()
            if event is None:
                raise BrokenStream(
                    f"{self._envd.label}: the stream of process {self.pid} ended without its end event"
                )
            if "data" in event:
                for stream in ("stdout", "stderr"):
                    if stream in event["data"]:
                        yield Chunk(stream, base64.b64decode(event["data"][stream]))
            elif "end" in event:
                self.exit = exit_of(event["end"], self._timed_out)
                return

    async def _next(self) -> dict[str, Any] | None:
        waiting = asyncio.ensure_future(anext(self._events, None))
        try:
            done, _ = await asyncio.wait({waiting}, timeout=max(self._deadline - time.monotonic(), 0))
            if not done and not self._timed_out:
                self._timed_out = True
                self._deadline = time.monotonic() + _END_WAIT_S
                await self.kill()
                done, _ = await asyncio.wait({waiting}, timeout=_END_WAIT_S)
            if not done:
                raise SandboxTimeout(f"{self._envd.label}: process {self.pid} did not end when killed")
            return waiting.result()
        finally:
            if not waiting.done():
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)

    async def kill(self) -> None:
        """Kill the process and its descendants."""
        if not self.pid:
            return
        killer = {"cmd": "/bin/sh", "args": ["-c", _KILL_TREE, str(self.pid)]}
        async with asyncio.timeout(_END_WAIT_S):
            async for _ in self._envd.stream(
                "process.Process/Start", {"process": killer, "stdin": False}, self._user
            ):
                pass

    async def _call(self, method: str, **fields: Any) -> None:
        request = {"process": {"pid": self.pid}, **fields}
        await self._envd.unary(f"process.Process/{method}", request, self._user)

    async def write_stdin(self, data: bytes) -> None:
        await self._call("SendInput", input={"stdin": base64.b64encode(data).decode()})

    async def close_stdin(self) -> None:
        await self._call("CloseStdin")

    async def signal(self, number: int) -> None:
        names = {9: "SIGNAL_SIGKILL", 15: "SIGNAL_SIGTERM"}
        if number not in names:
            raise InvalidRequest(f"{self._envd.label}: only SIGTERM and SIGKILL can be sent, got {number}")
        await self._call("SendSignal", signal=names[number])


class Envd:
    """One sandbox's daemon. ``tokens`` are those that create, fork or connect returned."""

    def __init__(
        self, client: httpx.AsyncClient, config: AgentEnvConfig, sandbox_id: str, tokens: Mapping[str, str]
    ) -> None:
        self.label = f"sandbox {sandbox_id}"
        self._client, self._config = client, config
        self.tokens = dict(tokens)
        self._sandbox_id = sandbox_id
        self._fresh = True

    def expect_delay(self) -> None:
        """After create and resume the first call may fail for a moment (spec/07 §7)."""
        self._fresh = True

    def _url(self, path: str) -> str:
        config = self._config
        if config.domain:
            scheme = httpx.URL(config.data_url or config.api_url).scheme
            return f"{scheme}://{PORT}-{self._sandbox_id}.{config.domain}/{path}"
        return f"{(config.data_url or config.api_url).rstrip('/')}/{path}"

    def _headers(self, user: str | None = None) -> dict[str, str]:
        headers: dict[str, str] = {}
        if not self._config.domain:
            headers |= {"x-agentenv-sandbox-id": self._sandbox_id, "x-agentenv-target-port": str(PORT)}
        if token := self.tokens.get("envd"):
            headers["X-Access-Token"] = token
        if token := self.tokens.get("traffic"):
            headers["e2b-traffic-access-token"] = token
        if user is not None:
            headers["Authorization"] = "Basic " + base64.b64encode(f"{user}:".encode()).decode()
        return headers

    async def ready(self) -> None:
        """Wait until the daemon answers, if nothing has been asked of it since create or resume.

        Not by ``/health``: the server has that path itself and would answer for the daemon.
        """
        if not self._fresh:
            return
        for attempt in range(self._config.first_call_tries):
            try:
                request = self._client.build_request("GET", self._url("envs"), headers=self._headers())
                await send(self._client, request, f"{self.label}: envs")
                break
            except (Unavailable, ServerFault, SandboxTimeout):
                if attempt + 1 == self._config.first_call_tries:
                    raise
                await asyncio.sleep(self._config.first_call_pause_s)
        self._fresh = False

    # ------------------------------------------------------------ Connect

    async def unary(self, method: str, request: Any, user: str) -> Any:
        label = f"{self.label}: {method}"
        headers = {**self._headers(user), "Connect-Protocol-Version": "1", "Content-Type": "application/json"}
        built = self._client.build_request(
            "POST", self._url(method), headers=headers, content=json.dumps(request)
        )
        try:
            response = await self._client.send(built)
        except httpx.ConnectError as error:
            raise NeverSent(f"{label}: {error!r}") from error
        except httpx.TimeoutException as error:
            raise SandboxTimeout(f"{label}: no answer in time") from error
        except httpx.TransportError as error:
            raise Unavailable(f"{label}: {error!r}") from error
        if response.status_code != 200:
            raise self._failed(response.status_code, response.content, label)
        return json_of(response, label)

    @staticmethod
    def _failed(status: int, body: bytes, label: str) -> SandboxError:
        """A Connect error names its code in a word; anything else came from a proxy on the way."""
        try:
            said = json.loads(body)
        except ValueError:
            said = None
        if isinstance(said, dict) and isinstance(said.get("code"), str):
            return connect_error(said, label)
        return classify(status, body, label)

    async def stream(self, method: str, request: Any, user: str) -> AsyncIterator[dict[str, Any]]:
        """The events of a server stream, keep-alives left out. Raises `BrokenStream` if no end frame
        comes."""
        label = f"{self.label}: {method}"
        headers = {**self._headers(user), "Connect-Protocol-Version": "1"}
        headers |= {"Content-Type": "application/connect+json", "Keepalive-Ping-Interval": "20"}
        timeout = httpx.Timeout(self._config.request_s, connect=self._config.connect_s, read=None)
        parser = FrameParser()
        try:
            async with self._client.stream(
                "POST", self._url(method), headers=headers, content=frame(request), timeout=timeout
            ) as response:
                if response.status_code != 200:
                    raise self._failed(response.status_code, await response.aread(), label)
                async for data in response.aiter_raw():
                    for flags, payload in parser.feed(data):
                        if flags & _COMPRESSED:
                            raise BrokenStream(f"{label}: a compressed frame, which was not asked for")
                        said = json.loads(payload) if payload else {}
                        if flags & _END:
                            if said.get("error"):
                                raise connect_error(said["error"], label)
                            return
                        event = said.get("event", {})
                        if "keepalive" not in event:
                            yield event
        except httpx.ConnectError as error:
            raise NeverSent(f"{label}: {error!r}") from error
        except (httpx.TransportError, ValueError) as error:
            raise BrokenStream(f"{label}: {error!r}") from error
        raise BrokenStream(f"{label}: the stream was cut")

    @asynccontextmanager
    async def start(
        self,
        argv: list[str],
        *,
        env: Mapping[str, str],
        cwd: str | None,
        user: str,
        stdin: bool,
        timeout_s: float,
    ) -> AsyncIterator[EnvdProcess]:
        """Start is never repeated: a second one would run the command twice."""
        config: dict[str, Any] = {"cmd": argv[0], "args": argv[1:], "envs": dict(env)}
        if cwd is not None:
            config["cwd"] = cwd
        events = self.stream("process.Process/Start", {"process": config, "stdin": stdin}, user)
        process = EnvdProcess(self, events, user, timeout_s)
        try:
            await process.started()
            yield process
        finally:
            if process.exit is None and process.pid:
                await _finish_even_if_cancelled(process.kill())
            await events.aclose()  # type: ignore[attr-defined]

    # ------------------------------------------------------------ files

    async def read(self, path: str, user: str, limit_bytes: int) -> bytes:
        label, data = f"{self.label}: read {path}", bytearray()
        params = {"path": path, "username": user}
        timeout = httpx.Timeout(self._config.idle_s, connect=self._config.connect_s)
        try:
            async with self._client.stream(
                "GET", self._url("files"), params=params, headers=self._headers(), timeout=timeout
            ) as response:
                if response.status_code != 200:
                    raise _file_error(classify(response.status_code, await response.aread(), label))
                async for piece in response.aiter_bytes():
                    data += piece
                    if len(data) > limit_bytes:
                        raise OutOfSpace(f"{label}: more than {limit_bytes} bytes")
        except httpx.TimeoutException as error:
            raise SandboxTimeout(f"{label}: stalled") from error
        except httpx.TransportError as error:
            raise Unavailable(f"{label}: {error!r}") from error
        return bytes(data)

    async def write(self, path: str, data: bytes, user: str) -> None:
        label = f"{self.label}: write {path}"
        request = self._client.build_request(
            "POST",
            self._url("files"),
            params={"path": path, "username": user},
            headers=self._headers(),
            files={"file": (path.rsplit("/", 1)[-1] or "file", data, "application/octet-stream")},
        )
        try:
            await send(self._client, request, label)
        except SandboxError as error:
            raise _file_error(error) from error

    async def file_call(self, method: str, request: dict[str, Any], user: str) -> Any:
        return await self.unary(f"filesystem.Filesystem/{method}", request, user)


def _file_error(error: SandboxError) -> SandboxError:
    return FileMissing(str(error), code=404) if error.code == 404 else error


def file_info(entry: Mapping[str, Any]) -> FileInfo:
    """An ``EntryInfo`` in proto3 JSON: numbers of 64 bits are strings, zeros are left out."""
    modified = entry.get("modifiedTime")
    return FileInfo(
        name=str(entry.get("name", "")),
        path=str(entry.get("path", "")),
        type=_TYPES.get(str(entry.get("type")), FileType.OTHER),
        size_bytes=int(entry.get("size", 0)),
        mode=int(entry.get("mode", 0)) & 0o7777,
        modified_at=_timestamp(str(modified)) if modified else 0.0,
        target=str(entry.get("symlinkTarget", "")),
    )


def _timestamp(text: str) -> float:
    """RFC 3339, with up to nine digits of fraction -> seconds since the epoch."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


async def _finish_even_if_cancelled(work: Any) -> None:
    """Run a clean-up to its end; a cancelled caller waits for it. Its own failure is the sandbox's, not
    ours."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task}, timeout=_END_WAIT_S)
        raise
    except (SandboxError, TimeoutError):
        return  # gone, paused or unreachable: its time to live ends the process
