"""Output of bounded size that keeps both ends, and the loop that runs a started process to its end."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from sandbox_client.errors import BrokenStream
from sandbox_client.types import Chunk, ExecResult, Process

STDIN_CHUNK_BYTES = 64 * 1024


class BothEnds:
    """Keeps the first and the last half of ``limit_bytes`` of what is fed, in O(limit) memory."""

    def __init__(self, limit_bytes: int) -> None:
        if limit_bytes < 2:
            raise ValueError(f"limit_bytes must be at least 2, got {limit_bytes}")
        self.total_bytes = 0
        self._half = limit_bytes // 2
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0

    def feed(self, data: bytes) -> None:
        self.total_bytes += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if not data:
            return
        data = data[-self._half :]
        self._tail.append(data)
        self._tail_bytes += len(data)
        while self._tail_bytes - len(self._tail[0]) >= self._half:
            self._tail_bytes -= len(self._tail.popleft())

    def text(self) -> str:
        tail = b"".join(self._tail)[-self._half :]
        missing = self.total_bytes - len(self._head) - len(tail)
        if missing == 0:
            return (bytes(self._head) + tail).decode("utf-8", "replace")
        head_text = bytes(self._head).decode("utf-8", "replace")
        return f"{head_text}\n[... {missing} bytes left out ...]\n{tail.decode('utf-8', 'replace')}"


def keep_both_ends(text: str, limit_chars: int) -> str:
    """``text`` cut in its middle to about ``limit_chars``, with a line that says how much is missing."""
    if len(text) <= limit_chars:
        return text
    half = max(limit_chars // 2, 1)
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


async def _feed_stdin(process: Process, data: bytes) -> None:
    for start in range(0, len(data), STDIN_CHUNK_BYTES):
        await process.write_stdin(data[start : start + STDIN_CHUNK_BYTES])
    await process.close_stdin()


async def run_to_end(
    starting: AbstractAsyncContextManager[Process],
    *,
    stdin: bytes | None,
    on_output: Callable[[Chunk], None] | None,
    output_limit_bytes: int,
) -> ExecResult:
    """Run a process that is about to start: feed ``stdin`` while its output is read, so neither blocks."""
    began = time.monotonic()
    ends = {"stdout": BothEnds(output_limit_bytes), "stderr": BothEnds(output_limit_bytes)}
    async with starting as process:
        feeder = asyncio.ensure_future(_feed_stdin(process, stdin)) if stdin is not None else None
        try:
            async for chunk in process:
                ends[chunk.stream].feed(chunk.data)
                if on_output is not None:
                    on_output(chunk)
        finally:
            if feeder is not None:
                # A command may end without reading all its input; then the rest has nowhere to go.
                feeder.cancel()
                await asyncio.gather(feeder, return_exceptions=True)
        ended = process.exit
    if ended is None:
        raise BrokenStream("the process's stream ended without its exit code")
    return ExecResult(
        exit_code=ended.exit_code,
        stdout=ends["stdout"].text(),
        stderr=ends["stderr"].text(),
        timed_out=ended.timed_out,
        out_of_memory=ended.out_of_memory,
        stdout_bytes=ends["stdout"].total_bytes,
        stderr_bytes=ends["stderr"].total_bytes,
        seconds_s=time.monotonic() - began,
    )
