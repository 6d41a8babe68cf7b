"""Processes of this machine: who they are, whose children, and how all of a sandbox's die."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from sandbox_client.local.cgroup import Cgroup


def start_time(pid: int) -> int | None:
    """Clock ticks since boot at which a process started: with its pid, its identity."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def _children() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                parent = int(Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()[1])
                found.setdefault(parent, []).append(int(name))
    return found


def tree(pid: int) -> list[int]:
    """A process and its descendants."""
    children, found = _children(), [pid]
    for parent in found:
        found += children.get(parent, [])
    return found


def kill_processes(cgroup: Cgroup, init_pid: int, pidfd: int | None, *, isolated: bool) -> None:
    """With a pid namespace, the init's death is everybody's; its launcher is left to collect it. A v1-frozen
    process dies once thawed."""
    if not isolated and init_pid:
        stopped: set[int] = set()
        while fresh := set(tree(init_pid)) - stopped:
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in fresh:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
            stopped |= fresh
    elif pidfd is not None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    with contextlib.suppress(OSError):
        cgroup.thaw()
