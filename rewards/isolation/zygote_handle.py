"""The caller's end of the zygote: starts it, asks it to fork and to kill, starts another should it die."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

START_TIMEOUT_S = 120.0  # first imports, on a machine that is busy with training


class ChildFailed(Exception):
    """A child died or spoke nonsense."""


class ZygoteHandle:
    """Starts the zygote with the first child, and again should it die."""

    def __init__(self, memory_mb: int) -> None:
        self.memory_mb = memory_mb
        self.preload: list[str] = []
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.control: socket.socket | None = None
        self.generation = 0

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "OMP_NUM_THREADS": "1",  # threads do not survive a fork
            "OPENBLAS_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "rewards.isolation.zygote", str(theirs.fileno())]
        self.process = subprocess.Popen(
            [*command, str(self.memory_mb << 20), *self.preload], pass_fds=[theirs.fileno()], env=environment
        )
        theirs.close()
        ours.settimeout(START_TIMEOUT_S)
        self.control, self.generation = ours, self.generation + 1
        return ours

    def lives(self, generation: int) -> bool:
        """Is it still the one that forked a child of this generation?"""
        with self.lock:
            return generation == self.generation and self.process is not None and self.process.poll() is None

    def _ask(self, message: bytes, descriptors: Sequence[int] = ()) -> int:
        if self.process is not None and self.process.poll() is not None:
            self._stop()
        control = self.control if self.control is not None else self._start()
        try:
            socket.send_fds(control, [message], list(descriptors))
            answer = control.recv(64)
        except OSError as error:
            self._stop()
            raise ChildFailed(f"the process that starts reward processes does not answer: {error}") from error
        if not answer:
            self._stop()
            raise ChildFailed("the process that starts reward processes died")
        return int(answer)

    def fork(self) -> tuple[int, socket.socket, int]:
        """A child's process id, the socket to it, and its generation."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs, self.lock:
            try:
                try:
                    pid = self._ask(b"F", [theirs.fileno()])
                except ChildFailed:  # it died as it was asked: its successor is
                    pid = self._ask(b"F", [theirs.fileno()])
                return pid, ours, self.generation
            except BaseException:
                ours.close()
                raise

    def kill(self, pid: int, generation: int) -> None:
        """The children of one that died went with it."""
        with self.lock:
            if self.control is not None and generation == self.generation:
                self._ask(b"K%d" % pid)

    def _stop(self) -> None:
        if self.control is not None:
            self.control.close()  # the zygote sees the end, kills its children and exits
            self.control = None
        if self.process is not None:
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None

    def close(self) -> None:
        with self.lock:
            self._stop()
