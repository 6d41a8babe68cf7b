"""Control groups of one sandbox, on whatever this machine lets us write: v2, v1, both mixed, or nothing.

Freezing and killing prefer the v2 hierarchy even where v1 has the other controllers: a v2-frozen process
still dies of SIGKILL, a v1-frozen one only after it is thawed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import time
from dataclasses import dataclass
from pathlib import Path

from sandbox_client.types import Limits

PARENT = "k3rl"
_CPU_PERIOD_US = 100_000


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A folder in which groups can be made. ``controllers`` of memory, pids, cpu, freezer."""

    parent: Path
    version: int
    controllers: frozenset[str]


def _mounts() -> list[tuple[Path, int, set[str]]]:
    found: list[tuple[Path, int, set[str]]] = []
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup2":
            found.append((Path(where), 2, set()))
        elif kind == "cgroup":
            found.append((Path(where), 1, set(options.split(","))))
    return found


def _own_group(root: Path, version: int) -> Path:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, _, path = line.split(":", 2)
        if version == 2 and number == "0":
            return root / path.lstrip("/")
    return root


def _write(path: Path, value: str) -> bool:
    try:
        path.write_text(value)
    except OSError:
        return False
    return True


def _probe_v2(root: Path) -> Hierarchy | None:
    """Groups go below the first folder that takes them: the root, or a delegated one around our own."""
    own = _own_group(root, 2)
    for base in (root, own.parent if own != root else root, own):
        parent = base / PARENT
        try:
            parent.mkdir(exist_ok=True)
        except OSError:
            continue
        for name in ("memory", "pids", "cpu"):
            _write(base / "cgroup.subtree_control", f"+{name}")
            _write(parent / "cgroup.subtree_control", f"+{name}")
        if not os.access(parent / "cgroup.procs", os.W_OK):
            continue
        enabled = set((parent / "cgroup.subtree_control").read_text().split())
        return Hierarchy(parent, 2, frozenset(enabled & {"memory", "pids", "cpu"}) | {"freezer"})
    return None


def _probe_v1(root: Path, options: set[str]) -> Hierarchy | None:
    wanted = frozenset(options & {"memory", "pids", "cpu", "freezer"})
    parent = root / PARENT
    if not wanted:
        return None
    try:
        parent.mkdir(exist_ok=True)
    except OSError:
        return None
    return Hierarchy(parent, 1, wanted) if os.access(parent / "cgroup.procs", os.W_OK) else None


@functools.cache
def hierarchies() -> tuple[Hierarchy, ...]:
    """Where groups can be made, v2 first. Empty where this user may make none."""
    try:
        mounts = sorted(_mounts(), key=lambda m: -m[1])
    except OSError:
        return ()
    found = [_probe_v2(where) if v == 2 else _probe_v1(where, options) for where, v, options in mounts]
    return tuple(h for h in found if h is not None)


def sweep_empty(older_s: float = 300.0) -> None:
    """Remove groups without a process that nobody can be about to fill: of sandboxes whose root is gone."""
    for h in hierarchies():
        for group in h.parent.glob("*-*-*-*-*-*"):
            with contextlib.suppress(OSError):  # another sweep is faster, or it has processes after all
                old = time.time() - group.stat().st_mtime > older_s
                if old and not (group / "cgroup.procs").read_text():
                    group.rmdir()


class Cgroup:
    """The groups of one sandbox, one per hierarchy that is needed. `make` before its first process."""

    def __init__(self, name: str) -> None:
        self._where: dict[str, tuple[Path, int]] = {}
        for h in hierarchies():
            for controller in h.controllers - self._where.keys():
                self._where[controller] = (h.parent / name, h.version)
        self.folders = sorted({folder for folder, _ in self._where.values()})

    @property
    def controllers(self) -> frozenset[str]:
        return frozenset(self._where)

    def make(self, limits: Limits) -> None:
        """Create and limit. Raises `OSError` where the kernel refuses a limit."""
        for folder in self.folders:
            folder.mkdir()
        # Files lie in memory too (tmpfs), so the group holds both.
        memory = limits.memory_bytes + 2 * limits.disk_bytes
        quota = max(int(limits.cpus * _CPU_PERIOD_US), 1000)
        pids = (
            limits.processes + 32
        )  # the init's handlers must start even when the user has used up RLIMIT_NPROC
        self._set(
            "memory", {1: {"memory.limit_in_bytes": memory}, 2: {"memory.max": memory, "memory.oom.group": 0}}
        )
        self._set("pids", {1: {"pids.max": pids}, 2: {"pids.max": pids}})
        self._set(
            "cpu",
            {
                1: {"cpu.cfs_period_us": _CPU_PERIOD_US, "cpu.cfs_quota_us": quota},
                2: {"cpu.max": f"{quota} {_CPU_PERIOD_US}"},
            },
        )
        if "memory" in self._where:  # no way around the limit through swap; absent where swap isn't accounted
            folder, version = self._where["memory"]
            _write(
                folder / ("memory.swap.max" if version == 2 else "memory.memsw.limit_in_bytes"),
                "0" if version == 2 else str(memory),
            )

    def _set(self, controller: str, files: dict[int, dict[str, int | str]]) -> None:
        if controller not in self._where:
            return
        folder, version = self._where[controller]
        for file, value in files[version].items():
            (folder / file).write_text(str(value))

    def freeze(self) -> bool:
        """Stop all processes and wait until they are. False where there is no freezer."""
        if "freezer" not in self._where:
            return False
        folder, version = self._where["freezer"]
        if version == 2:
            (folder / "cgroup.freeze").write_text("1")
            done = lambda: "frozen 1" in (folder / "cgroup.events").read_text()  # noqa: E731
        else:
            (folder / "freezer.state").write_text("FROZEN")
            done = lambda: (folder / "freezer.state").read_text().strip() == "FROZEN"  # noqa: E731
        deadline = time.monotonic() + 5
        while not done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{folder.name}: not frozen after 5 s")
            time.sleep(0.001)
        return True

    def thaw(self) -> bool:
        if "freezer" not in self._where:
            return False
        folder, version = self._where["freezer"]
        (folder / ("cgroup.freeze" if version == 2 else "freezer.state")).write_text(
            "0" if version == 2 else "THAWED"
        )
        return True

    def kill(self) -> None:
        """SIGKILL to all, frozen or not, where the kernel can; killing the init does the rest."""
        for folder in self.folders:
            _write(folder / "cgroup.kill", "1")

    def oom_kills(self) -> int:
        if "memory" not in self._where:
            return 0
        folder, version = self._where["memory"]
        file = folder / ("memory.events" if version == 2 else "memory.oom_control")
        try:
            lines = file.read_text().splitlines()
        except OSError:  # the sandbox was killed meanwhile
            return 0
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)

    def remove(self) -> None:
        """Remove the emptied groups; dying processes may hold them for some milliseconds."""
        deadline = time.monotonic() + 5
        for folder in self.folders:
            while True:
                try:
                    folder.rmdir()
                except FileNotFoundError:
                    break
                except OSError as error:
                    if error.errno not in (errno.EBUSY, errno.ENOTEMPTY) or time.monotonic() > deadline:
                        raise
                    time.sleep(0.002)
                else:
                    break
