"""The host's side of local sandboxes: start, freeze, expire, kill, sweep. Blocking code, a lock per sandbox.

On disk, under ``root`` (mode 0700): ``live/<id>/`` with the init's socket, ``meta.json`` and the launcher's
log; nothing that a sandbox wrote is ever opened from here. ``snapshots/<id>.tar`` with its ``.json``.

A sandbox never outlives its owner: its init holds the read end of a pipe whose write end only the owner has.
One that was frozen at that moment cannot notice; the next owner's sweep kills it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import py_compile
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import uuid
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from sandbox_client.errors import SandboxNotFound, SandboxPaused, ServerFault
from sandbox_client.local import bwrap, seccomp
from sandbox_client.local.cgroup import Cgroup, hierarchies
from sandbox_client.types import SandboxSpec, State

_START_S = 30.0
_STOP_S = 10.0


def _start_time(pid: int) -> int | None:
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


@dataclass(slots=True)
class Live:
    """One sandbox that this process owns. Fields after ``lock`` change only under it."""

    id: str
    spec: SandboxSpec
    folder: Path
    cgroup: Cgroup
    launcher: subprocess.Popen[bytes]
    init_pid: int
    pidfd: int
    home: str
    started_at: float
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
        if unsafe:
            self.isolation = bwrap.Isolation("", "none", bwrap.base_python(), False)
        else:
            self.isolation = bwrap.probe()
        self.root = root
        for folder in (root, root / "live", root / "snapshots"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if root.stat().st_uid != os.geteuid():
            raise PermissionError(f"{root} belongs to another user")
        root.chmod(0o700)
        self._init = root / f"init-{os.getpid()}.pyc"  # compiled once instead of in every sandbox
        py_compile.compile(str(bwrap.INIT), cfile=str(self._init), doraise=True)
        self._prefix = hashlib.blake2b(str(root.resolve()).encode(), digest_size=4).hexdigest()
        self._lifeline_r, self._lifeline_w = os.pipe()
        self._live: dict[str, Live] = {}
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
        meta = {
            "owner": os.getpid(),
            "owner_start": _start_time(os.getpid()),
            "metadata": dict(spec.metadata),
        }
        try:
            self._write_meta(folder, meta)
            cgroup.make(spec.limits)
            live = self._launch(sandbox_id, spec, folder, cgroup)
            meta |= {"init_pid": live.init_pid, "init_start": _start_time(live.init_pid)}
            self._write_meta(folder, meta)
        except BaseException:
            cgroup.kill()
            with contextlib.suppress(OSError):
                cgroup.remove()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        with self._lock:
            self._live[sandbox_id] = live
        self._nudge.set()
        return live

    @staticmethod
    def _write_meta(folder: Path, meta: dict[str, object]) -> None:
        temporary = folder / "meta.tmp"
        temporary.write_text(json.dumps(meta))
        temporary.replace(folder / "meta.json")

    def _launch(self, sandbox_id: str, spec: SandboxSpec, folder: Path, cgroup: Cgroup) -> Live:
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            _bind(listener, folder)
            listener.listen(128)
            info_r, info_w = os.pipe()
            stack.callback(os.close, info_r)
            log = stack.enter_context(open(folder / "log", "wb"))
            home = bwrap.HOME
            if self.isolation.mode == "none":
                home = str(folder / "home")
                os.mkdir(home, 0o700)
                fds = bwrap.Descriptors(listener.fileno(), self._lifeline_r, -1, None, -1, -1)
                args = bwrap.bare_command(self.isolation, spec.limits, fds, cgroup.folders, home)
            else:
                fds = self._descriptors(stack, sandbox_id, listener.fileno(), info_w)
                by_group = "memory" in cgroup.controllers
                args = bwrap.command(
                    self.isolation,
                    sandbox_id,
                    spec.limits,
                    spec.network,
                    fds,
                    cgroup.folders,
                    by_group,
                    self._init,
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
            os.close(info_w)
            try:
                init_pid = launcher.pid if self.isolation.mode == "none" else self._child_pid(info_r, folder)
                pidfd = os.pidfd_open(init_pid)
                _await_init(folder, launcher)
            except BaseException:
                for pid in tree(launcher.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                launcher.wait(_STOP_S)
                raise
        live = Live(sandbox_id, spec, folder, cgroup, launcher, init_pid, pidfd, home, time.time())
        live.deadline = time.monotonic() + spec.ttl_s
        return live

    def _descriptors(
        self, stack: contextlib.ExitStack, sandbox_id: str, listener: int, info: int
    ) -> bwrap.Descriptors:
        uid = bwrap.user_id(self.isolation, sandbox_id)

        def memory_file(name: str, data: bytes) -> int:
            fd = os.memfd_create(name)
            stack.callback(os.close, fd)
            os.write(fd, data)
            os.lseek(fd, 0, os.SEEK_SET)
            return fd

        return bwrap.Descriptors(
            listener,
            self._lifeline_r,
            info,
            memory_file("seccomp", seccomp.program()) if self.isolation.seccomp else None,
            memory_file("passwd", f"user:x:{uid}:{uid}:user:{bwrap.HOME}:/bin/bash\n".encode()),
            memory_file("group", f"user:x:{uid}:\n".encode()),
        )

    @staticmethod
    def _child_pid(info_r: int, folder: Path) -> int:
        data = b""
        while not data.rstrip().endswith(b"}"):
            piece = os.read(info_r, 4096)
            if not piece:
                said = (folder / "log").read_text("utf-8", "replace").strip()[-500:]
                raise ServerFault(f"sandbox did not start: {said or 'the launcher said nothing'}")
            data += piece
        return int(json.loads(data)["child-pid"])

    # ------------------------------------------------------------ state

    def get(self, sandbox_id: str) -> Live:
        with self._lock:
            live = self._live.get(sandbox_id)
        if live is not None:
            self._expire(live)
            if live.launcher.poll() is not None:  # died by itself: the init was killed or ran out of memory
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
            _kill_processes(live.cgroup, live.init_pid, live.pidfd, isolated=self.isolation.mode != "none")
            live.launcher.wait(_STOP_S)
            live.cgroup.kill()  # what a sandbox without a pid namespace may have left
            live.cgroup.remove()
            os.close(live.pidfd)
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
        self._reaper.join(_STOP_S)
        with self._lock:
            known = list(self._live)
        for sandbox_id in known:
            self.kill(sandbox_id)
        self._init.unlink(missing_ok=True)
        os.close(self._lifeline_w)
        os.close(self._lifeline_r)

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
                if owner and _start_time(owner) == meta.get("owner_start"):
                    continue
                self._clear_away(folder, meta)
                swept.append(folder.name)
            for file in self.root.glob("init-*.pyc"):
                if not Path("/proc", file.stem.removeprefix("init-")).exists():
                    file.unlink(missing_ok=True)
        return swept

    def _clear_away(self, folder: Path, meta: dict[str, int]) -> None:
        cgroup = Cgroup(f"{self._prefix}-{folder.name}")
        pid = int(meta.get("init_pid", 0))
        pidfd = None
        if pid and _start_time(pid) == meta.get("init_start"):
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(pid)
        with contextlib.suppress(OSError):
            _kill_processes(cgroup, pid, pidfd, isolated=self.isolation.mode != "none")
        cgroup.kill()
        if pidfd is not None:
            os.close(pidfd)
        with contextlib.suppress(OSError):  # a zombie of a stranger's may hold it; the next sweep tries again
            cgroup.remove()
        shutil.rmtree(folder, ignore_errors=True)

    # ------------------------------------------------------------ snapshots

    def snapshot_file(self, snapshot_id: str) -> Path:
        return self.root / "snapshots" / f"{snapshot_id}.tar"

    def find_snapshot(self, name_or_id: str) -> str | None:
        """An id or a name -> the id."""
        for snapshot_id, meta in self.snapshots().items():
            if name_or_id == snapshot_id or name_or_id in meta["names"]:
                return snapshot_id
        return None

    def snapshots(self) -> dict[str, dict]:
        found = {}
        for file in sorted((self.root / "snapshots").glob("*.json")):
            with contextlib.suppress(FileNotFoundError):
                found[file.stem] = json.loads(file.read_text())
        return found

    def keep_snapshot(
        self, temporary: Path, names: list[str], spec: SandboxSpec, source: str
    ) -> tuple[str, float]:
        """Give a finished tar its id and make it visible; the ``.json`` comes last. -> (id, time)."""
        snapshot_id, now = str(uuid.uuid4()), time.time()
        os.replace(temporary, self.snapshot_file(snapshot_id))
        meta = {"names": names, "created_at": now, "source": source, "limits": asdict(spec.limits)}
        note = self.snapshot_file(snapshot_id).with_suffix(".json.tmp")
        note.write_text(json.dumps(meta))
        note.replace(note.with_suffix(""))
        return snapshot_id, now

    def delete_snapshot(self, snapshot_id: str) -> None:
        for suffix in (".json", ".tar"):
            self.snapshot_file(snapshot_id).with_suffix(suffix).unlink(missing_ok=True)


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
    deadline = time.monotonic() + _START_S
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


def _kill_processes(cgroup: Cgroup, init_pid: int, pidfd: int | None, *, isolated: bool) -> None:
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
