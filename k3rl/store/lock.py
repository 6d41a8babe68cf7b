"""One writer per run. The kernel drops the lock of a process that dies, so none is ever stale."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from k3rl.errors import UserError


class RunLock:
    """Held until `release`, or the process ends. Raises `UserError` where another process holds it."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 32, 0).decode(errors="replace").strip()
            os.close(self._descriptor)
            raise UserError(f"{path.parent}: another process (pid {holder}) is writing this run") from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._descriptor)
