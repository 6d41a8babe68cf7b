"""Clears a host's sandboxes away when its process dies. Run by path, on the standard library alone.

python -I -S watch.py PID LIFELINE ROOT TAG

A running sandbox ends by itself when its owner dies; a frozen one cannot notice, and would lie there for ever if nobody
came back to the same root. ``LIFELINE``: the read end of the owner's pipe. ``TAG``: of the host whose sandboxes count.
"""

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import sys
import time

GONE_S = 5.0


def started(pid):
    """Clock ticks since boot; None for no process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rsplit(")", 1)[1].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def descendants(pid):
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{name}/stat") as file:
            parent = int(file.read().rsplit(")", 1)[1].split()[1])
            children.setdefault(parent, []).append(int(name))
    found = [pid]
    for parent in found:
        found += children.get(parent, [])
    return found


def write(path, text):
    with contextlib.suppress(OSError), open(path, "w") as file:
        file.write(text)


def kill(meta):
    """All processes of a sandbox, frozen or stopped ones too."""
    for group in meta["groups"]:
        write(f"{group}/cgroup.kill", "1")
    pid = meta.get("init_pid")
    if pid and started(pid) == meta.get("init_start"):
        for one in descendants(pid):
            with contextlib.suppress(OSError):
                os.kill(one, signal.SIGKILL)
    for group in meta["groups"]:  # where the kill only counts once they run
        write(f"{group}/cgroup.freeze", "0")
        write(f"{group}/freezer.state", "THAWED")


def remove(group):
    deadline = time.monotonic() + GONE_S
    while time.monotonic() < deadline:
        try:
            return os.rmdir(group)
        except FileNotFoundError:
            return None
        except OSError:
            time.sleep(0.01)
    return None


def clear(root, tag):
    with open(os.path.join(root, "sweep.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        live = os.path.join(root, "live")
        for name in os.listdir(live):
            try:
                with open(os.path.join(live, name, "meta.json")) as file:
                    meta = json.load(file)
            except (OSError, ValueError):
                continue
            if meta.get("host") == tag:
                kill(meta)
                for group in meta["groups"]:
                    remove(group)
                shutil.rmtree(os.path.join(live, name), ignore_errors=True)


def main():
    pid, lifeline, root, tag = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # these are for the owner
        signal.signal(number, signal.SIG_IGN)
    poll = select.poll()
    poll.register(
        lifeline, select.POLLIN
    )  # ends with the owner, unless a child of it inherited the other end
    with contextlib.suppress(OSError):
        poll.register(os.pidfd_open(pid), select.POLLIN)
    if os.getppid() == pid:
        poll.poll()
    with contextlib.suppress(FileNotFoundError):  # the whole root is gone
        clear(root, tag)
    shutil.rmtree(os.path.join(root, f"init-{pid}-{tag}"), ignore_errors=True)


main()
