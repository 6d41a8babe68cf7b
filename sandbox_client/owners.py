"""Who made a sandbox, and whether that one is still there.

A server's metadata and a snapshot's name are all that outlives a crash, so both carry the same three facts:

run       The job. Workers of one job share it.
owner     The worker's name within the run, if it was given one; a restarted worker bears it again.
instance  One `Fleet` object of one process. Never used twice, and on the same machine one can tell whether it lives.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

RUN_KEY, OWNER_KEY, INSTANCE_KEY = "k3rl-run", "k3rl-owner", "k3rl-instance"
_SNAPSHOT = re.compile(
    r"(?:^|/)k3rl-(?P<run>[0-9a-f]{10})-(?P<owner>[0-9a-f]{10})-(?P<instance>\w+)"
    r"-(?P<sandbox>[0-9a-f]{10})-[0-9a-f]{8}(?=$|:)"
)
_counter = itertools.count(1)
_open: set[str] = set()  # instances of this process


def digest(text: str) -> str:
    """Ten hex digits, so that any name fits into a snapshot's, which may be 128 characters long."""
    return hashlib.blake2b(text.encode(), digest_size=5).hexdigest()


@dataclass(frozen=True, slots=True)
class Owner:
    """The maker of a sandbox or a snapshot. Of a snapshot's only the digests of run and owner are known."""

    run: str
    name: str
    instance: str

    def metadata(self) -> dict[str, str]:
        return {RUN_KEY: self.run, OWNER_KEY: self.name, INSTANCE_KEY: self.instance}

    @staticmethod
    def of(metadata: Mapping[str, str]) -> Owner:
        return Owner(*(metadata.get(key, "") for key in (RUN_KEY, OWNER_KEY, INSTANCE_KEY)))

    def digested(self) -> Owner:
        return Owner(digest(self.run), digest(self.name), self.instance)

    def snapshot_name(self, sandbox_id: str) -> str:
        """A fresh name, at most 100 characters of ``[a-z0-9-]``."""
        run, owner = digest(self.run), digest(self.name)
        return f"k3rl-{run}-{owner}-{self.instance}-{digest(sandbox_id)}-{uuid.uuid4().hex[:8]}"


def snapshot_owner(name: str) -> tuple[Owner, str] | None:
    """-> (maker with digests, digest of the sandbox's id), or None for a name that `Owner.snapshot_name` didn't
    make. Servers may put a name space before it and a tag behind."""
    found = _SNAPSHOT.search(name)
    return found and (Owner(found["run"], found["owner"], found["instance"]), found["sandbox"])


def _started(pid: int) -> str:
    """Clock ticks since boot at which a process started; with its pid, its identity. Empty for a zombie."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return fields[19] if fields[0] != "Z" else ""


@cache
def _machine() -> str:
    """This boot of this machine and this pid name space: what makes a pid comparable."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", "")[:12]
    return f"p{boot}x{os.stat('/proc/self/ns/pid').st_ino}"


def claim() -> str:
    """A new instance of this process. It counts as alive until `release`."""
    try:
        instance = f"{_machine()}x{os.getpid()}x{_started(os.getpid())}x{next(_counter)}"
    except (OSError, IndexError):  # no /proc: nobody will be able to tell whether this one lives
        instance = f"u{uuid.uuid4().hex}"
    _open.add(instance)
    return instance


def release(instance: str) -> None:
    _open.discard(instance)


def alive(instance: str) -> bool | None:
    """None where that cannot be told from here: another machine, container or boot."""
    if instance in _open:
        return True
    parts = instance.split("x")
    try:
        if len(parts) != 5 or "x".join(parts[:2]) != _machine():
            return None
        if int(parts[2]) == os.getpid():  # of this process, or of one before with its pid
            return False
        return _started(int(parts[2])) == parts[3]
    except (FileNotFoundError, ProcessLookupError):
        return False
    except (OSError, ValueError, IndexError):
        return None
