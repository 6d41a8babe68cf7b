"""What keeps the workers busy while the recipe trains, in the asynchronous modes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from k3rl.errors import RunError

YIELD_S = 0.002
"""The lock rests so long between two turns, for the recipe's thread to get it."""


class Pump:
    """A thread that calls ``turn`` under ``lock`` over and over, from `start` until `stop`. What goes wrong in
    it is raised by the next `check`, in the recipe's thread."""

    def __init__(self, turn: Callable[[float], None], lock: threading.RLock) -> None:
        self._turn, self._lock = turn, lock
        self._stop, self._error = threading.Event(), None
        self._thread = threading.Thread(target=self._run, name="rollout-pump", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with self._lock:
                    self._turn(0.02)
            except BaseException as error:
                self._error: BaseException | None = error
                return
            time.sleep(YIELD_S)

    def check(self) -> None:
        if self._error is not None:
            raise RunError(f"rollout: {self._error}") from self._error

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=30.0)
