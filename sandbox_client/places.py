"""The quota of a fleet and its warm sandboxes, which fill the places that nobody uses."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from sandbox_client.types import Sandbox


@dataclass(slots=True)
class _Waiter:
    wants_warm: bool
    granted: asyncio.Future[Sandbox | None]


class Places:
    """``quota`` places, served in the order of asking. A warm sandbox holds one, and leaves it to who needs it.

    Whoever `take`s a place, or makes a warm one in it, gives it back with `free` or fills it with `ready`.
    """

    def __init__(self, quota: int) -> None:
        self.quota, self.taken = quota, 0
        self.warm: deque[Sandbox] = deque()
        self._waiters: deque[_Waiter] = deque()

    async def take(self, limit_s: float, *, wants_warm: bool = False) -> Sandbox | None:
        """Wait for a place; -> the warm sandbox that it came with, if one did. Without ``wants_warm`` that
        happens only when no place is empty, and the caller is to kill it. Raises `TimeoutError`."""
        waiter = _Waiter(wants_warm, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self._grant()
        try:
            async with asyncio.timeout(limit_s):
                return await waiter.granted
        except BaseException:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            elif not waiter.granted.cancelled():  # granted at the same moment
                sandbox = waiter.granted.result()
                self.free() if sandbox is None else self.ready(sandbox)
            raise

    def take_spare(self) -> bool:
        """A place at once, unless all are taken or somebody waits."""
        if self._waiters or self.taken >= self.quota:
            return False
        self.taken += 1
        return True

    def free(self) -> None:
        self.taken -= 1
        self._grant()

    def ready(self, sandbox: Sandbox) -> None:
        """A warm sandbox, in a place that is taken."""
        self.warm.append(sandbox)
        self._grant()

    def _grant(self) -> None:
        while self._waiters:
            waiter = self._waiters[0]
            if waiter.granted.cancelled():
                self._waiters.popleft()
                continue
            if self.warm and (waiter.wants_warm or self.taken >= self.quota):
                sandbox = self.warm.popleft()
            elif self.taken < self.quota:
                self.taken += 1
                sandbox = None
            else:
                return
            self._waiters.popleft()
            waiter.granted.set_result(sandbox)
