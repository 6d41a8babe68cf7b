"""Who runs next, and where: the queue of trajectories that wait for a worker.

Resumed ones come first, oldest first. New ones follow: of each group nothing is known about, one sample as
a probe; then the longest expected. A group's trajectories have a home, the worker where their common
prefix is; a worker takes others' only when its own are gone. Pure: no clock, no processes.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

Key = tuple[int, float, int, int]


@dataclass(slots=True)
class _Waiting:
    id: str
    draw: int
    key: Key
    home: int
    resumed: bool


class WorkQueue:
    """Put in by the pool when a trajectory is admitted, resumed or lost its worker; taken out by `take`,
    or by `remove` when it is over."""

    def __init__(self, workers: int) -> None:
        self._heaps: list[list[tuple[bool, Key, str]]] = [[] for _ in range(workers)]
        self._waiting: dict[str, _Waiting] = {}
        self._by_draw: dict[int, set[str]] = {}
        self._counts = [[0, 0] for _ in range(workers)]  # fresh, resumed

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, id_: str) -> bool:
        return id_ in self._waiting

    def add(
        self,
        id_: str,
        draw: int,
        sample: int,
        home: int,
        *,
        resumed: bool,
        expected: float = 0.0,
        probe: bool = False,
    ) -> None:
        """``expected`` tokens order the new ones, longest first, probes before them."""
        key: Key = (0, 0.0, draw, sample) if resumed else (0 if probe else 1, -expected, draw, sample)
        self._push(_Waiting(id_, draw, key, home, resumed))

    def reorder(self, draw: int, expected: float) -> None:
        """Something was learnt about a group: its waiting new trajectories move."""
        for id_ in self._by_draw.get(draw, ()):
            waiting = self._waiting[id_]
            if not waiting.resumed:
                waiting.key = (1, -expected, draw, waiting.key[3])
                heapq.heappush(self._heaps[waiting.home], (True, waiting.key, id_))

    def take(self, worker: int, steal: bool) -> str | None:
        """The next one for this worker: its own, or with ``steal`` also others', resumed before new."""
        homes = [worker]
        if steal:
            homes += sorted(
                (w for w in range(len(self._heaps)) if w != worker), key=lambda w: -sum(self._counts[w])
            )
        for resumed in (True, False):
            for home in homes:
                if self._counts[home][resumed]:
                    id_ = self._pop(home)
                    if id_ is not None:
                        return id_
        return None

    def remove(self, id_: str) -> None:
        waiting = self._waiting.pop(id_, None)
        if waiting is not None:
            self._forget(waiting)

    def _push(self, waiting: _Waiting) -> None:
        if waiting.id in self._waiting:
            raise ValueError(f"trajectory {waiting.id} waits already")
        self._waiting[waiting.id] = waiting
        self._by_draw.setdefault(waiting.draw, set()).add(waiting.id)
        self._counts[waiting.home][waiting.resumed] += 1
        heapq.heappush(self._heaps[waiting.home], (not waiting.resumed, waiting.key, waiting.id))

    def _pop(self, home: int) -> str | None:
        """Entries whose trajectory has left or moved since are skipped."""
        heap = self._heaps[home]
        while heap:
            fresh, key, id_ = heapq.heappop(heap)
            waiting = self._waiting.get(id_)
            if (
                waiting is not None
                and waiting.home == home
                and waiting.key == key
                and waiting.resumed is not fresh
            ):
                del self._waiting[id_]
                self._forget(waiting)
                return id_
        return None

    def _forget(self, waiting: _Waiting) -> None:
        self._counts[waiting.home][waiting.resumed] -= 1
        ids = self._by_draw[waiting.draw]
        ids.discard(waiting.id)
        if not ids:
            del self._by_draw[waiting.draw]
