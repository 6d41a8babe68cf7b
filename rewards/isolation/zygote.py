"""A small process that has imported what rewards need and forks a child in milliseconds when asked.

It is the parent of every child, so it alone reaps them, and no process id is ever signalled after it may
have been given to somebody else. It adopts what children leave behind (Linux's child subreaper) and kills
it. When its caller goes, its control socket ends, and everything below it is killed.

Requests on the control socket: ``F`` with a socket attached (fork; answers the process id), ``K<pid>`` (kill
the child and everything it started; answers when it is gone).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import resource
import select
import signal
import socket
import sys

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


class Zygote:
    """See the module's docstring."""

    def __init__(self, control: socket.socket, memory_bytes: int) -> None:
        self.control, self.memory_bytes = control, memory_bytes
        self.children: set[int] = set()
        self.wake_read, self.wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        _prctl(PR_SET_CHILD_SUBREAPER, 1)

    def serve(self) -> None:
        while True:
            ready, _, _ = select.select([self.control, self.wake_read], [], [])
            if self.wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self.wake_read, 4096)
                self.reap()
            if self.control in ready:
                message, descriptors, _, _ = socket.recv_fds(self.control, 64, 1)
                if not message:
                    break
                self.answer(message, descriptors)
        for pid in list(self.children):
            self.kill(pid)

    def answer(self, message: bytes, descriptors: list[int]) -> None:
        if message[:1] == b"F":
            pid = self.fork(descriptors[0])
            os.close(descriptors[0])
            self.control.send(b"%d" % pid)
        else:
            self.kill(int(message[1:]))
            self.control.send(b"0")

    def fork(self, descriptor: int) -> int:
        pid = os.fork()
        if pid:
            self.children.add(pid)
            return pid
        code = 1
        try:
            self.become_child()
            from rewards.isolation.child import serve

            serve(socket.socket(fileno=descriptor))
            code = 0
        finally:
            os._exit(code)

    def become_child(self) -> None:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _prctl(PR_SET_CHILD_SUBREAPER, 0)
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in (self.wake_read, self.wake_write, self.control.fileno()):
            os.close(descriptor)
        self.control.detach()
        with open("/proc/self/statm") as file:
            start_bytes = int(file.read().split()[0]) * resource.getpagesize()
        limit = start_bytes + self.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def reap(self) -> None:
        """Collect what has ended. Where that was one of our children, kill what it started too."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            if ended.si_pid in self.children:
                self.kill(ended.si_pid)
            else:
                os.waitpid(ended.si_pid, 0)

    def kill(self, pid: int) -> None:
        """Kill a child's process group, reap it, then kill what escaped the group and was left to us."""
        if pid not in self.children:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # it may have died before it had a group of its own
        os.waitpid(pid, 0)
        self.children.discard(pid)
        while orphans := [p for p in _children_of_self() if p not in self.children]:
            for orphan in orphans:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(orphan, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(orphan, 0)


def _children_of_self() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(p) for p in file.read().split()]


def main(descriptor: int, memory_bytes: int, preload: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt in the terminal is the caller's to handle
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):
        os.dup2(null, standard)
    importlib.import_module("rewards.isolation.child")
    for module in preload:
        importlib.import_module(module)
    os.dup2(null, 2)  # an import that fails is said; what rewards write is not
    gc.collect()
    gc.freeze()  # leave the collector off the pages that children share
    Zygote(socket.socket(fileno=descriptor), memory_bytes).serve()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
