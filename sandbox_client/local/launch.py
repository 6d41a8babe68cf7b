"""Start one sandbox: its listening socket, its launcher (bubblewrap, or nothing), its init until that answers."""

from __future__ import annotations

import contextlib
import json
import os
import py_compile
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from sandbox_client.errors import ServerFault
from sandbox_client.local import bwrap, seccomp
from sandbox_client.local.cgroup import Cgroup
from sandbox_client.local.processes import tree
from sandbox_client.types import SandboxSpec

START_S = 30.0
STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class Started:
    """``pidfd`` is of the init, and the holder's to close."""

    launcher: subprocess.Popen[bytes]
    init_pid: int
    pidfd: int
    home: str


def compile_init(folder: Path) -> None:
    """The init's modules as bytecode, once for all sandboxes of a host. Their users must be able to read it."""
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    for source in bwrap.INIT.glob("*.py"):
        compiled = folder / f"{source.stem}.pyc"
        py_compile.compile(str(source), cfile=str(compiled), doraise=True)
        compiled.chmod(0o644)


def start(
    isolation: bwrap.Isolation,
    sandbox_id: str,
    spec: SandboxSpec,
    folder: Path,
    cgroup: Cgroup,
    *,
    lifeline: int,
    init: Path,
) -> Started:
    """``folder`` takes the socket and the log. ``lifeline``: the read end whose closing ends the init.

    Raises `ServerFault` with the launcher's words if the sandbox does not come up.
    """
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        _bind(listener, folder)
        listener.listen(128)
        info_r, info_w = os.pipe()
        stack.callback(os.close, info_r)
        log = stack.enter_context(open(folder / "log", "wb"))
        home = bwrap.HOME
        with contextlib.ExitStack() as writing:
            writing.callback(os.close, info_w)
            if isolation.mode == "none":
                home = str(folder / "home")
                os.mkdir(home, 0o700)
                fds = bwrap.Descriptors(listener.fileno(), lifeline, -1, None, -1, -1)
                args = bwrap.bare_command(isolation, spec.limits, fds, cgroup.folders, home, init)
            else:
                fds = _descriptors(stack, isolation, sandbox_id, (listener.fileno(), lifeline, info_w))
                by_group = "memory" in cgroup.controllers
                args = bwrap.command(
                    isolation, sandbox_id, spec.limits, spec.network, fds, cgroup.folders, by_group, init
                )
            launcher = subprocess.Popen(
                args,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=fds.numbers(),
                cwd="/",
                env={},
            )
        pidfd = -1
        try:
            init_pid = launcher.pid if isolation.mode == "none" else _child_pid(info_r, folder)
            pidfd = os.pidfd_open(init_pid)
            _await_init(folder, launcher)
        except BaseException:
            if pidfd >= 0:
                os.close(pidfd)
            for pid in tree(launcher.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            launcher.wait(STOP_S)
            raise
    return Started(launcher, init_pid, pidfd, home)


def _descriptors(
    stack: contextlib.ExitStack, isolation: bwrap.Isolation, sandbox_id: str, fds: tuple[int, int, int]
) -> bwrap.Descriptors:
    """``fds``: listener, lifeline, info."""
    uid = bwrap.user_id(isolation, sandbox_id)

    def memory_file(name: str, data: bytes) -> int:
        fd = os.memfd_create(name)
        stack.callback(os.close, fd)
        os.write(fd, data)
        os.lseek(fd, 0, os.SEEK_SET)
        return fd

    return bwrap.Descriptors(
        *fds,
        memory_file("seccomp", seccomp.program()) if isolation.seccomp else None,
        memory_file("passwd", f"user:x:{uid}:{uid}:user:{bwrap.HOME}:/bin/bash\n".encode()),
        memory_file("group", f"user:x:{uid}:\n".encode()),
    )


def _child_pid(info_r: int, folder: Path) -> int:
    data = b""
    while not data.rstrip().endswith(b"}"):
        piece = os.read(info_r, 4096)
        if not piece:
            said = (folder / "log").read_text("utf-8", "replace").strip()[-500:]
            raise ServerFault(f"sandbox did not start: {said or 'the launcher said nothing'}")
        data += piece
    return int(json.loads(data)["child-pid"])


def _bind(listener: socket.socket, folder: Path) -> None:
    """Through the folder's descriptor: a socket's path may be 107 bytes long at most."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        listener.bind(f"/proc/self/fd/{fd}/s")
    finally:
        os.close(fd)


def _await_init(folder: Path, launcher: subprocess.Popen[bytes]) -> None:
    """Until the init answers a ping."""
    request = json.dumps({"op": "ping"}).encode()
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    deadline = time.monotonic() + START_S
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(0.25)
            probe.connect(f"/proc/self/fd/{folder_fd}/s")
            probe.sendall(b"Q" + len(request).to_bytes(4, "big") + request)
            while True:
                try:
                    answer = probe.recv(1)
                except TimeoutError:
                    answer = None
                if answer == b"J":
                    return
                if answer is not None or launcher.poll() is not None or time.monotonic() > deadline:
                    said = (folder / "log").read_text("utf-8", "replace").strip()[-500:]
                    raise ServerFault(f"sandbox did not start: {said or 'no answer from its init'}")
    finally:
        os.close(folder_fd)
