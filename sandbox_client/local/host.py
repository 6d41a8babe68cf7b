"""The host's side of local sandboxes: start, freeze, expire, kill, sweep. Blocking code, a lock per sandbox.

On disk, under ``root`` (mode 0700): ``live/<id>/`` with the init's socket, ``meta.json`` and the launcher's
log; nothing that a sandbox wrote is ever opened from here. ``snapshots/<id>.tar`` with its ``.json``.

A sandbox never outlives its owner: its init holds the read end of a pipe whose write end only the owner has.
One that was frozen at that moment cannot notice: `watch`, a small process beside the owner, clears it away, and
should that have died as well, the next owner's sweep does.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from sandbox_client.errors import SandboxNotFound, SandboxPaused, ServerFault
from sandbox_client.local import bwrap
from sandbox_client.local.cgroup import Cgroup, hierarchies, sweep_empty
from sandbox_client.local.launch import STOP_S, Started, compile_init, start
from sandbox_client.local.processes import kill_processes, start_time, tree
from sandbox_client.local.snapshots import Snapshots
from sandbox_client.types import SandboxSpec, State

_WATCH = Path(__file__).with_name("watch.py")


@dataclass(slots=True)
class Live:
    """One sandbox that this process owns. Fields after ``lock`` change only under it."""

    id: str
    spec: SandboxSpec
    folder: Path
    cgroup: Cgroup
    started: Started
    started_at: float  # seconds since the epoch
    lock: threading.RLock = field(default_factory=threading.RLock)
    state: State = State.RUNNING
    deadline: float = 0.0  # monotonic
    gone: bool = False
    running_s: float = 0.0  # before ``since``
    paused_s: float = 0.0
    since: float = field(default_factory=time.monotonic)

    @property
    def socket(self) -> Path:
        return self.folder / "s"

    @property
    def init_pid(self) -> int:
        return self.started.init_pid

    @property
    def home(self) -> str:
        return self.started.home

    def account(self) -> None:
        now = time.monotonic()
        if self.state is State.RUNNING:
            self.running_s += now - self.since
        else:
            self.paused_s += now - self.since
        self.since = now


class Host:
    """All local sandboxes of this process under one root folder. Thread-safe."""

    def __init__(self, root: Path, *, unsafe: bool = False) -> None:
        self.isolation = bwrap.none() if unsafe else bwrap.probe_or_none()
        self.root = root = root.absolute()  # launchers work in /
        for folder in (root, root / "live", root / "snapshots"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if root.stat().st_uid != os.geteuid():
            raise PermissionError(f"{root} belongs to another user")
        root.chmod(0o700)
        self.snapshots = Snapshots(root / "snapshots")
        self._tag = uuid.uuid4().hex[:8]  # several hosts, also of one process, may share the root
        self._init = root / f"init-{os.getpid()}-{self._tag}"
        compile_init(self._init)
        self._prefix = hashlib.blake2b(str(root.resolve()).encode(), digest_size=4).hexdigest()
        self._lifeline_r, self._lifeline_w = os.pipe()
        self._live: dict[str, Live] = {}
        self._watcher: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._nudge = threading.Event()
        self.swept = self._sweep()
        self._reaper = threading.Thread(target=self._expire_due, name="sandbox-expiry", daemon=True)
        self._reaper.start()

    # ------------------------------------------------------------ start

    def create(self, spec: SandboxSpec) -> Live:
        """Start a sandbox. Raises `ServerFault` with the launcher's words if it does not come up."""
        if self._closed.is_set():
            raise ServerFault("the local backend is closed")
        sandbox_id = str(uuid.uuid4())
        folder = self.root / "live" / sandbox_id
        folder.mkdir(mode=0o700)
        cgroup = Cgroup(f"{self._prefix}-{sandbox_id}")
        self._watch()
        owner: dict[str, object] = {"owner": os.getpid(), "owner_start": start_time(os.getpid())}
        meta = owner | {"host": self._tag, "metadata": dict(spec.metadata)}
        meta |= {"groups": [str(group) for group in cgroup.folders]}
        try:
            self._write_meta(folder, meta)
            cgroup.make(spec.limits)
            started = start(
                self.isolation, sandbox_id, spec, folder, cgroup, lifeline=self._lifeline_r, init=self._init
            )
            live = Live(sandbox_id, spec, folder, cgroup, started, time.time())
            live.deadline = time.monotonic() + spec.ttl_s
            meta |= {"init_pid": live.init_pid, "init_start": start_time(live.init_pid)}
            self._write_meta(folder, meta)
        except BaseException:
            cgroup.kill()
            with contextlib.suppress(OSError):
                cgroup.remove()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        with self._lock:
            self._live[sandbox_id] = live
        if self._closed.is_set():  # meanwhile, and `close` may have missed this one
            self.kill(sandbox_id)
            raise ServerFault("the local backend is closed")
        self._nudge.set()
        return live

    def _watch(self) -> None:
        """From the first sandbox on."""
        with self._lock:
            if self._watcher is None:
                facts = [str(os.getpid()), str(self._lifeline_r), str(self.root.resolve()), self._tag]
                self._watcher = subprocess.Popen(
                    [self.isolation.python, "-I", "-S", "-B", str(_WATCH), *facts],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(self._lifeline_r,),
                    start_new_session=True,  # out of reach of what ends its owner
                    cwd="/",
                    env={},
                )

    @staticmethod
    def _write_meta(folder: Path, meta: Mapping[str, object]) -> None:
        temporary = folder / "meta.tmp"
        temporary.write_text(json.dumps(meta))
        temporary.replace(folder / "meta.json")

    # ------------------------------------------------------------ state

    def get(self, sandbox_id: str) -> Live:
        with self._lock:
            live = self._live.get(sandbox_id)
        if live is not None:
            self._expire(live)
            if (
                live.started.launcher.poll() is not None
            ):  # died by itself: the init was killed or ran out of memory
                self.kill(sandbox_id)
        if live is None or live.gone:
            raise SandboxNotFound(f"sandbox {sandbox_id}: no such sandbox", code=404)
        return live

    def all(self) -> list[Live]:
        with self._lock:
            known = list(self._live)
        found = []
        for sandbox_id in known:
            with contextlib.suppress(SandboxNotFound):
                found.append(self.get(sandbox_id))
        return found

    def pause(self, sandbox_id: str) -> None:
        live = self.get(sandbox_id)
        with live.lock:
            if live.state is State.RUNNING and not live.gone:
                self._freeze(live)
                live.account()
                live.state = State.PAUSED

    def resume(self, sandbox_id: str, ttl_s: float | None) -> None:
        live = self.get(sandbox_id)
        with live.lock:
            if live.gone:
                raise SandboxNotFound(f"sandbox {sandbox_id}: no such sandbox", code=404)
            if live.state is State.PAUSED:
                self._thaw(live)
                live.account()
                live.state = State.RUNNING
            live.deadline = time.monotonic() + (live.spec.ttl_s if ttl_s is None else ttl_s)
        self._nudge.set()

    def extend(self, sandbox_id: str, ttl_s: float) -> None:
        live = self.running(sandbox_id)
        with live.lock:
            live.deadline = time.monotonic() + ttl_s
        self._nudge.set()

    def relabel(self, sandbox_id: str, metadata: dict[str, str]) -> None:
        live = self.get(sandbox_id)
        with live.lock:
            if live.gone:
                raise SandboxNotFound(f"sandbox {sandbox_id}: no such sandbox", code=404)
            live.spec = replace(live.spec, metadata=metadata)
            said = json.loads((live.folder / "meta.json").read_text())
            self._write_meta(live.folder, said | {"metadata": metadata})

    def running(self, sandbox_id: str) -> Live:
        """The sandbox, if it runs or may be woken. Raises `SandboxPaused` otherwise."""
        live = self.get(sandbox_id)
        if live.state is State.PAUSED:
            if not live.spec.auto_resume:
                raise SandboxPaused(f"sandbox {sandbox_id} is paused", code=410)
            self.resume(sandbox_id, max(live.spec.ttl_s, 300.0))
        return live

    @staticmethod
    def _freeze(live: Live) -> None:
        if live.cgroup.freeze():
            return
        stopped: set[int] = set()  # without a freezer: until no new process appears between two looks
        while fresh := set(tree(live.init_pid)) - stopped:
            for pid in fresh:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            stopped |= fresh

    @staticmethod
    def _thaw(live: Live) -> None:
        if live.cgroup.thaw():
            return
        for pid in tree(live.init_pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def kill(self, sandbox_id: str) -> bool:
        """End it and remove every trace. False if it was not there."""
        with self._lock:
            live = self._live.get(sandbox_id)
        if live is None:
            return False
        with live.lock:
            if live.gone:
                return False
            live.account()
            kill_processes(
                live.cgroup, live.init_pid, live.started.pidfd, isolated=self.isolation.mode != "none"
            )
            live.started.launcher.wait(STOP_S)
            live.cgroup.kill()  # what a sandbox without a pid namespace may have left
            live.cgroup.remove()
            os.close(live.started.pidfd)
            shutil.rmtree(live.folder)
            live.gone = True
        with self._lock:
            self._live.pop(sandbox_id, None)
        return True

    # ------------------------------------------------------------ time to live

    def _expire(self, live: Live) -> None:
        if live.state is State.RUNNING and time.monotonic() >= live.deadline and not live.gone:
            if live.spec.auto_pause:
                with live.lock:
                    if live.state is State.RUNNING and not live.gone and time.monotonic() >= live.deadline:
                        self._freeze(live)
                        live.account()
                        live.state = State.PAUSED
            else:
                self.kill(live.id)

    def _expire_due(self) -> None:
        while not self._closed.is_set():
            with self._lock:
                known = list(self._live.values())
            for live in known:
                try:
                    self._expire(live)
                except OSError:  # it died meanwhile; `get` clears it away
                    continue
            due = [x.deadline for x in known if x.state is State.RUNNING and not x.gone]
            self._nudge.wait(max(min(due, default=time.monotonic() + 60) - time.monotonic(), 0.01))
            self._nudge.clear()

    # ------------------------------------------------------------ ends

    def close(self) -> None:
        """Kill everything. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._nudge.set()
        self._reaper.join(STOP_S)
        with self._lock:
            known = list(self._live)
        for sandbox_id in known:
            self.kill(sandbox_id)
        shutil.rmtree(self._init, ignore_errors=True)
        os.close(self._lifeline_w)
        os.close(self._lifeline_r)
        if self._watcher is not None:
            self._watcher.kill()  # nothing is left to clear away
            self._watcher.wait()

    def _sweep(self) -> list[str]:
        """Kill what owners left behind that are no more; -> ids. One sweeper at a time per root."""
        swept = []
        with open(self.root / "sweep.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for folder in sorted((self.root / "live").iterdir()):
                try:
                    meta = json.loads((folder / "meta.json").read_text())
                except (OSError, ValueError):
                    meta = {}
                if not meta and time.time() - folder.stat().st_mtime < 60:
                    continue  # another owner is about to write it
                owner = int(meta.get("owner", 0))
                if owner and start_time(owner) == meta.get("owner_start"):
                    continue
                self._clear_away(folder, meta)
                swept.append(folder.name)
            sweep_empty()
            for init in self.root.glob("init-*"):
                if not Path("/proc", init.name.split("-")[1]).exists():
                    shutil.rmtree(init, ignore_errors=True)
        return swept

    def _clear_away(self, folder: Path, meta: Mapping[str, int]) -> None:
        cgroup = Cgroup(f"{self._prefix}-{folder.name}")
        pid = int(meta.get("init_pid", 0))
        pidfd = None
        if pid and start_time(pid) == meta.get("init_start"):
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(pid)
        with contextlib.suppress(OSError):
            kill_processes(cgroup, pid, pidfd, isolated=self.isolation.mode != "none")
        cgroup.kill()
        if pidfd is not None:
            os.close(pidfd)
        with contextlib.suppress(OSError):  # a zombie of a stranger's may hold it; the next sweep tries again
            cgroup.remove()
        shutil.rmtree(folder, ignore_errors=True)


def default_root() -> Path:
    """A private folder of this user's in the machine's temporary folder."""
    return Path(tempfile.gettempdir()) / f"k3rl-sandboxes-{os.geteuid()}"


def machine() -> dict[str, object]:
    """What isolation this machine gives, for ``k3rl doctor``."""
    found = bwrap.probe()
    return {
        "bwrap": found.bwrap,
        "mode": found.mode,
        "seccomp": found.seccomp,
        "cgroups": {f"v{h.version} {h.parent}": sorted(h.controllers) for h in hierarchies()},
    }
