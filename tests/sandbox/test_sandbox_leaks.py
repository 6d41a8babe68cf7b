"""Nothing is left behind: not after many lives, not after the owner's sudden death, not after cancelled
calls."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from sandbox_client import LocalBackend, SandboxSpec
from sandbox_client.local.cgroup import hierarchies
from sandbox_client.local.processes import tree

pytestmark = pytest.mark.usefixtures("needs_isolation")


def traces(root: Path) -> dict[str, object]:
    """Everything that a sandbox may leave on this machine, as far as it is ours."""
    prefix = f"{os.getpid()}"
    ours = [p for p in tree(os.getpid()) if p != os.getpid()]
    return {
        "processes": len(ours),
        "mounts": Path("/proc/self/mounts").read_text().count("\n"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "files": sorted(str(p) for p in root.rglob("*") if p.is_file() and prefix not in p.name),
        "live": len(list((root / "live").iterdir())),
        "cgroups": sorted(g.name for h in hierarchies() for g in h.parent.glob("*-*-*-*-*-*")),
    }


async def life(backend: LocalBackend, n: int) -> None:
    sandbox = await backend.create(SandboxSpec(ttl_s=600, metadata={"n": str(n)}))
    assert (await sandbox.exec(f"echo {n} > n; (sleep 600 &) ; cat n")).stdout == f"{n}\n"
    await sandbox.pause()
    await sandbox.resume()
    assert await sandbox.read_file("n") == f"{n}\n".encode()
    await sandbox.kill()


@pytest.mark.parametrize("count", [32, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
async def test_many_lives_leave_nothing(tmp_path: Path, count: int) -> None:
    async with LocalBackend(tmp_path) as backend:
        await life(backend, -1)
        before = traces(tmp_path)
        gate = asyncio.Semaphore(32)

        async def gated(n: int) -> None:
            async with gate:
                await life(backend, n)

        await asyncio.gather(*(gated(n) for n in range(count)))
        after = traces(tmp_path)
        mine = {g for g in after["cgroups"] if g.startswith(backend.host._prefix)}
        assert mine == set()
        before.pop("cgroups")
        after.pop("cgroups")
        assert after["descriptors"] <= before["descriptors"] + 2  # an epoll or a socket of the loop
        before["descriptors"] = after["descriptors"]
        assert after == before


OWNER = """
    import asyncio, sys
    from sandbox_client import LocalBackend, SandboxSpec

    async def main():
        backend = LocalBackend(sys.argv[1])
        spec = SandboxSpec(ttl_s=600, metadata={"run": "r"})
        running, paused = await backend.create(spec), await backend.create(spec)
        for s in (running, paused):
            await s.exec("sleep 4242 >/dev/null 2>&1 &")
        snapshot = await running.snapshot("checkpoint")
        await paused.pause()
        pids = [backend.host.get(s.id).init_pid for s in (running, paused)]
        print(*pids, snapshot.id, flush=True)
        await asyncio.sleep(600)

    asyncio.run(main())
"""


def start_owner(root: Path) -> tuple[subprocess.Popen[str], list[str]]:
    """-> a process with a running and a paused sandbox; their inits' pids and a snapshot's id."""
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(OWNER), str(root)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert owner.stdout is not None
    return owner, owner.stdout.readline().split()


def watcher_of(pid: int) -> int:
    (found,) = [p for p in tree(pid) if b"watch.py" in Path(f"/proc/{p}/cmdline").read_bytes()]
    return found


async def test_what_was_frozen_when_its_owner_died_is_cleared_away_though_nobody_comes_back(
    tmp_path: Path,
) -> None:
    owner, (running, paused, _) = start_owner(tmp_path)
    groups = [g for g in traces(tmp_path)["cgroups"] if (tmp_path / "live" / g.split("-", 1)[1]).exists()]
    assert len(set(groups)) == (2 if hierarchies() else 0)
    watcher = watcher_of(owner.pid)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    deadline = time.monotonic() + 10
    while alive(int(running)) or alive(int(paused)) or alive(watcher):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    assert list((tmp_path / "live").iterdir()) == []
    assert set(groups) & set(traces(tmp_path)["cgroups"]) == set()
    assert list(tmp_path.glob("init-*")) == []
    assert len(list((tmp_path / "snapshots").glob("*.tar"))) == 1


async def test_sudden_death_of_the_owner_is_swept_and_its_snapshots_stay(tmp_path: Path) -> None:
    owner, (running, paused, snapshot) = start_owner(tmp_path)
    os.kill(watcher_of(owner.pid), signal.SIGKILL)  # of both
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    deadline = time.monotonic() + 5
    while alive(int(running)):  # its init sees the lifeline end by itself
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    async with LocalBackend(tmp_path) as backend:
        assert len(backend.host.swept) == 2
        while alive(int(paused)):
            assert time.monotonic() < deadline + 5
            await asyncio.sleep(0.02)
        assert list((tmp_path / "live").iterdir()) == []
        assert await backend.list() == []
        recovered = await backend.create(SandboxSpec(template="checkpoint"))
        assert (await recovered.exec("echo recovered")).ok
        assert [s.id for s in await backend.list_snapshots()] == [snapshot]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_living_owner_is_not_swept(tmp_path: Path) -> None:
    async with LocalBackend(tmp_path) as first:
        sandbox = await first.create(SandboxSpec())
        async with LocalBackend(tmp_path) as second:
            assert second.host.swept == []
            assert await second.list() == []
        assert (await sandbox.exec("echo alive")).stdout == "alive\n"


async def test_cancelled_creates_and_forks_leave_nothing(tmp_path: Path) -> None:
    async with LocalBackend(tmp_path) as backend:
        source = await backend.create(SandboxSpec())
        await source.write_file("f", b"x" * 100_000)
        for delay_s in (0.0, 0.01, 0.03, 0.06, 0.1, 0.15):
            for call in (lambda: backend.create(SandboxSpec()), lambda: source.fork(2), source.snapshot):
                task = asyncio.ensure_future(call())
                await asyncio.sleep(delay_s)
                task.cancel()
                made = (await asyncio.gather(task, return_exceptions=True))[0]
                if not isinstance(made, BaseException):  # it was faster
                    for sandbox in made if isinstance(made, list) else [made]:
                        if hasattr(sandbox, "kill"):
                            await sandbox.kill()
        deadline = time.monotonic() + 10
        while len(await backend.list()) > 1:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        left = [p.name for p in tmp_path.iterdir() if p.name.startswith(("fork-", "snapshot-"))]
        assert left == []


async def test_malicious_archives_cannot_leave_a_sandbox(tmp_path: Path) -> None:
    """A snapshot's archive is written by untrusted code's side; the host only stores it."""
    import io
    import tarfile

    evil = io.BytesIO()
    with tarfile.open(fileobj=evil, mode="w") as tar:
        for name in ("home/../../../../../tmp/evil-1", "/tmp/evil-2", "home/ok"):
            info = tarfile.TarInfo(name)
            info.size = 4
            tar.addfile(info, io.BytesIO(b"evil"))
        link = tarfile.TarInfo("home/out")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path)
        tar.addfile(link)
        through = tarfile.TarInfo("home/out/evil-3")
        through.size = 4
        tar.addfile(through, io.BytesIO(b"evil"))
    file = tmp_path / "evil.tar"
    file.write_bytes(evil.getvalue())
    before = sorted(os.listdir("/tmp"))
    async with LocalBackend(tmp_path / "sandboxes") as backend:
        sandbox = await backend.create(SandboxSpec())
        await asyncio.gather(sandbox.load(file), return_exceptions=True)
        assert not (tmp_path / "evil-3").exists()
        assert [n for n in os.listdir("/tmp") if n.startswith("evil") and n not in before] == []
        assert (await sandbox.exec("echo alive")).ok


async def test_a_sandbox_that_dies_by_itself_is_noticed(tmp_path: Path) -> None:
    async with LocalBackend(tmp_path) as backend:
        sandbox = await backend.create(SandboxSpec())
        os.kill(backend.host.get(sandbox.id).init_pid, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while await backend.list():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        assert list((tmp_path / "live").iterdir()) == []
