"""An event loop in a thread of its own: environments work there while the engine's thread generates."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call came to: its result, or the exception it raised. ``ticket`` is that of
    `Background.submit`."""

    ticket: int
    value: Any


class Background:
    """Puts each call's `Answer` into one queue, which the owner's thread empties."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._tasks: dict[int, Any] = {}
        self._next_ticket = 0
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Coroutine[Any, Any, Any], timeout_s: float) -> int:
        """Run it; its answer comes within the time limit, `TimeoutError` at the latest. Returns its
        ticket."""
        ticket = self._next_ticket
        self._next_ticket += 1
        self._tasks[ticket] = asyncio.run_coroutine_threadsafe(
            self._answer(ticket, call, timeout_s), self._loop
        )
        return ticket

    async def _answer(self, ticket: int, call: Coroutine[Any, Any, Any], timeout_s: float) -> None:
        try:
            value = await asyncio.wait_for(call, timeout_s)
        except TimeoutError:
            value = TimeoutError(f"no answer within {timeout_s:g} s")
        except asyncio.CancelledError:
            return
        except Exception as error:  # whatever it is, it is the answer, and the trajectory's to bear
            value = error
        self._answers.put(Answer(ticket, value))

    def take(self, wait_s: float = 0.0) -> list[Answer]:
        """All answers that are here; waits for the first for ``wait_s``."""
        out: list[Answer] = []
        try:
            out.append(self._answers.get(timeout=wait_s) if wait_s > 0 else self._answers.get_nowait())
            while True:
                out.append(self._answers.get_nowait())
        except queue.Empty:
            pass
        for answer in out:
            self._tasks.pop(answer.ticket, None)
        return out

    def cancel(self, ticket: int) -> None:
        """No answer of it comes any more, unless it is in the queue already."""
        task = self._tasks.pop(ticket, None)
        if task is not None:
            task.cancel()

    def finish(self, calls: list[Coroutine[Any, Any, Any]], timeout_s: float) -> list[Any]:
        """Run them in parallel and wait: results or exceptions, in order."""
        if not calls:
            return []

        async def all_() -> list[Any]:
            limited = [asyncio.wait_for(c, timeout_s) for c in calls]
            return await asyncio.gather(*limited, return_exceptions=True)

        return asyncio.run_coroutine_threadsafe(all_(), self._loop).result(timeout_s + 5.0)

    def close(self) -> None:
        for ticket in list(self._tasks):
            self.cancel(ticket)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5.0)
