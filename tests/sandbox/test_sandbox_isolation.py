"""Every test here is an attempt that must fail, made from inside a local sandbox."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandbox_client import Limits, LocalBackend, SandboxSpec
from sandbox_client.errors import IsolationUnavailable, SandboxNotFound
from sandbox_client.local import bwrap, seccomp
from sandbox_client.local.processes import tree
from sandbox_client.types import MIB

try:
    bwrap.probe()
    UNAVAILABLE = ""
except IsolationUnavailable as error:
    UNAVAILABLE = str(error)

pytestmark = pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE)
LIBC = "import ctypes; l = ctypes.CDLL(None, use_errno=True); "
LIMITS = Limits(memory_bytes=128 * MIB, disk_bytes=32 * MIB, processes=32)


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[LocalBackend]:
    async with LocalBackend(tmp_path / "sandboxes") as found:
        yield found


@pytest.fixture
async def sandbox(backend: LocalBackend):
    return await backend.create(SandboxSpec(limits=LIMITS))


async def python(sandbox, code: str, **kwargs):
    return await sandbox.exec(["python3", "-c", code], **kwargs)


async def test_network_is_unreachable(sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=2)"
        assert (await python(sandbox, code)).exit_code != 0
    done = await python(sandbox, "import socket; socket.create_connection(('192.0.2.1', 80), timeout=5)")
    assert "unreachable" in done.stderr.lower()


async def test_network_is_there_when_asked_for(backend) -> None:
    sandbox = await backend.create(SandboxSpec(network=True))
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), timeout=5)"
        assert (await python(sandbox, code)).ok


async def test_abstract_unix_sockets_of_the_host_are_out_of_reach(sandbox) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0k3rl-isolation-test")
        server.listen()
        done = await python(
            sandbox, "import socket; socket.socket(socket.AF_UNIX).connect('\\0k3rl-isolation-test')"
        )
    assert "refused" in done.stderr


async def test_host_files_cannot_be_read(sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hidden-from-sandboxes")
    secret.chmod(0o644)
    for path in (
        str(secret),
        "/etc/shadow",
        "/etc/hostname",
        "/proc/1/environ",
        "/proc/1/root/etc",
        "/sys/kernel",
        __file__,
    ):
        assert not (await sandbox.exec(["cat", path])).ok, path
    everything = await sandbox.exec(
        "grep -rs hidden-from-sandboxes / --include=secret -l 2>/dev/null", timeout_s=60
    )
    assert everything.stdout == ""


async def test_the_hosts_environment_is_not_inherited(backend, monkeypatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "abc123")
    sandbox = await backend.create(SandboxSpec(env={"MINE": "1"}))
    done = await sandbox.exec("env; cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'")
    assert "abc123" not in done.stdout
    assert "MINE=1" in done.stdout


async def test_other_sandboxes_are_out_of_sight(backend, sandbox) -> None:
    other = await backend.create(SandboxSpec())
    await other.write_file("/tmp/theirs", "x")
    async with other.start("sleep 30") as _:
        assert not (await sandbox.exec("test -e /tmp/theirs")).ok
        assert "sleep 30" not in (await sandbox.exec("ps axww")).stdout


@pytest.mark.parametrize(
    "path",
    [
        "/usr/bin/x",
        "/etc/x",
        "/x",
        "/dev/x",
        "/run/x",
        "/run/init/main.pyc",
        "/home/x",
        "/proc/sys/kernel/hostname",
    ],
)
async def test_nothing_is_writable_outside_the_private_layer(sandbox, path: str) -> None:
    done = await sandbox.exec(f"echo x > {path}")
    assert not done.ok
    assert not Path("/usr/bin/x").exists()


async def test_fork_bomb_stays_inside_its_limit(sandbox) -> None:
    before = len(os.listdir("/proc"))
    done = await sandbox.exec("bomb() { bomb | bomb & }; bomb; sleep 1; ps ax | wc -l", timeout_s=5)
    assert "fork" in done.stderr or done.timed_out
    assert len([p for p in os.listdir("/proc") if p.isdigit()]) < before + 200
    assert (await sandbox.stat("/tmp")).name == "tmp"  # the init still serves
    await sandbox.kill()


async def test_memory_bomb_is_killed(sandbox) -> None:
    done = await python(sandbox, "x = bytearray(2 << 30); print(len(x))", timeout_s=30)
    assert not done.ok
    assert done.out_of_memory or "MemoryError" in done.stderr
    assert (await sandbox.exec("echo alive")).stdout == "alive\n"


@pytest.mark.parametrize(
    "way",
    [
        "import os, time\nfor _ in range(20):\n if os.fork() == 0:\n  x = bytearray(50 << 20); "
        "time.sleep(2); os._exit(0)\ntime.sleep(2)",
        "import os\nfor _ in range(30): os.write(os.memfd_create('x'), b'x' * (30 << 20))",
        "n = 0\nwhile n < 400000: open(f'/tmp/{n}', 'w').close(); n += 1",
        "import ctypes\nl = ctypes.CDLL(None)\nl.shmat.restype = ctypes.c_void_p\nfor _ in range(30): "
        "ctypes.memset(l.shmat(l.shmget(0, 30 << 20, 0o1600), None, 0), 1, 30 << 20)",
    ],
    ids=["many processes", "memory files", "empty files", "shared segments"],
)
async def test_memory_is_limited_whichever_way_it_is_taken(backend, sandbox, way: str) -> None:
    if "memory" not in backend.capabilities.enforced_limits:
        pytest.skip("memory is limited for a sandbox as a whole only by a memory control group")
    done = await python(sandbox, way, timeout_s=60)
    assert done.out_of_memory
    assert (await sandbox.exec("echo alive")).stdout == "alive\n"


async def test_disk_filler_fills_its_own_disk(sandbox) -> None:
    done = await sandbox.exec("for i in 1 2 3; do head -c 20000000 /dev/zero > f$i; done; du -sb . | cut -f1")
    assert "No space left" in done.stderr
    assert int(done.stdout.split()[-1]) <= LIMITS.disk_bytes + 4096
    done = await sandbox.exec("head -c 400000000 /dev/zero > /dev/shm/x")
    assert not done.ok


async def test_ptrace_and_signals_reach_nothing_outside(sandbox) -> None:
    assert (
        await python(sandbox, LIBC + "print(l.ptrace(16, 1, 0, 0), ctypes.get_errno())")
    ).stdout == "-1 1\n"
    me = os.getpid()
    done = await sandbox.exec(f"kill -0 {me} 2>&1; kill -9 1; sleep 0.1; echo still here")
    assert "still here" in done.stdout
    assert (await sandbox.exec("echo alive")).stdout == "alive\n"


@pytest.mark.parametrize(
    "call",
    [
        "l.unshare(0x10000000)",  # CLONE_NEWUSER
        "l.setns(0, 0)",
        "l.mount(b'none', b'/tmp', b'tmpfs', 0, None)",
        "l.umount2(b'/tmp', 2)",
        "l.chroot(b'/tmp')",
        "l.syscall(56, 0x10000011, 0, 0, 0, 0)",  # clone(CLONE_NEWUSER | SIGCHLD)
        "l.syscall(321, 0, 0, 0)",  # bpf
        "l.syscall(425, 1, 0)",  # io_uring_setup
        "l.syscall(250, 0, 0)",  # keyctl
        "l.syscall(304, 0, 0, 0)",  # open_by_handle_at
        "l.socket(40, 1, 0)",  # AF_VSOCK
        "l.socket(38, 5, 0)",  # AF_ALG
        "l.ioctl(0, 0x5412, b'x')",  # TIOCSTI
        "l.setuid(0)",
        "l.mknod(b'/tmp/disk', 0o60666, 0x0800)",
    ],
)
async def test_ways_out_of_containers_are_refused(sandbox, call: str) -> None:
    if not seccomp.supported() or os.uname().machine != "x86_64":
        pytest.skip("system call numbers of x86_64")
    done = await python(sandbox, LIBC + f"print({call}, ctypes.get_errno())")
    assert done.stdout == "-1 1\n", (call, done)


async def test_clone3_is_absent_so_that_programs_use_clone(sandbox) -> None:
    assert (
        await python(sandbox, LIBC + "print(l.syscall(435, 0, 0), ctypes.get_errno())")
    ).stdout == "-1 38\n"
    threads = "import threading; t = threading.Thread(target=print, args=(7,)); t.start(); t.join()"
    assert (await python(sandbox, threads)).stdout == "7\n"


async def test_symlinks_and_mounts_lead_nowhere(sandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    await sandbox.exec(f"ln -s {tmp_path} out; ln -s /etc/shadow shadow; ln -s / root")
    for path in ("out/secret", "shadow", f"root{tmp_path}/secret"):
        with pytest.raises(Exception, match="No such file"):
            await sandbox.read_file(path)
    await sandbox.exec("mkdir -p deep && cd deep && ln -s /../../../../.. up")
    assert "secret" not in (await sandbox.exec(f"ls deep/up{tmp_path}")).stdout
    snapshot = await sandbox.snapshot()  # links are stored as links; nothing is followed on the host
    assert (await sandbox.stat("shadow")).target == "/etc/shadow"
    assert snapshot.id


async def test_nothing_survives_kill(backend, sandbox) -> None:
    await sandbox.exec(
        "(trap '' TERM HUP INT; setsid nohup sh -c 'while :; do sleep 1; done' >/dev/null 2>&1 &) ; true"
    )
    inside = tree(backend.host.get(sandbox.id).init_pid)
    assert len(inside) >= 2
    await sandbox.kill()
    await sandbox.kill()
    assert [pid for pid in inside if Path(f"/proc/{pid}").exists()] == []
    with pytest.raises(SandboxNotFound):
        await sandbox.exec("true")


async def test_killing_all_processes_breaks_only_its_own_exec(sandbox) -> None:
    with pytest.raises(Exception, match="ended before"):
        await sandbox.exec("kill -9 -1", timeout_s=10)
    assert (await sandbox.exec("echo alive")).stdout == "alive\n"


@pytest.mark.slow
async def test_a_gigabyte_of_output_keeps_both_ends_in_bounded_memory(sandbox) -> None:
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    done = await sandbox.exec(
        "echo first; head -c 1000000000 /dev/zero | tr '\\0' x; echo; echo last", timeout_s=120
    )
    assert done.ok
    assert done.stdout.startswith("first\n")
    assert done.stdout.endswith("last\n")
    assert done.stdout_bytes == 1_000_000_012
    assert len(done.stdout) < 1.1 * MIB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB


async def test_output_that_nobody_reads_blocks_the_writer_not_the_host(sandbox) -> None:
    async with sandbox.start("yes", timeout_s=2) as process:
        await asyncio.sleep(0.5)
        began = time.monotonic()
        async for _ in process:
            pass
        assert process.exit is not None
        assert process.exit.timed_out
        assert time.monotonic() - began < 5


async def test_a_slow_reader_gets_what_was_written_before_the_end(sandbox) -> None:
    """Sizes around what the buffers on the way hold, so that the command ends while its pipe still holds the rest."""

    async def one(size: int) -> int:
        async with sandbox.start(f"head -c {size} /dev/zero", timeout_s=30) as process:
            await asyncio.sleep(1.5)
            return sum([len(chunk.data) async for chunk in process])

    sizes = range(1_000_000, 1_600_000, 40_000)
    assert [await asyncio.gather(*map(one, sizes[i : i + 5])) for i in range(0, 15, 5)] == [
        list(sizes[i : i + 5]) for i in range(0, 15, 5)
    ]


async def test_timed_out_command_leaves_no_descendants(sandbox) -> None:
    done = await sandbox.exec("setsid sh -c 'sleep 77 & sleep 77' & (sleep 77 &) ; sleep 77", timeout_s=0.5)
    assert done.timed_out
    assert "sleep 77" not in (await sandbox.exec("ps axww | grep -v grep")).stdout


async def test_sandboxes_are_different_users_to_the_kernel(backend, sandbox) -> None:
    if backend.host.isolation.mode != "root":
        pytest.skip("own user ids need root")
    other = await backend.create(SandboxSpec())
    ids = {(await s.exec("id -u")).stdout for s in (sandbox, other)}
    assert len(ids) == 2
    assert "0\n" not in ids


async def test_refuses_without_isolation_unless_told(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(bwrap, "find_bwrap", lambda: None)
    bwrap.probe.cache_clear()
    try:
        with pytest.raises(IsolationUnavailable, match=r"bubblewrap.*k3rl run --unsafe"):
            LocalBackend(tmp_path / "a")
        monkeypatch.setenv("K3RL_UNSAFE", "1")
        async with LocalBackend(tmp_path / "c") as backend:
            assert not backend.capabilities.isolated
        monkeypatch.delenv("K3RL_UNSAFE")
        async with LocalBackend(tmp_path / "b", unsafe=True) as backend:
            assert not backend.capabilities.isolated
            assert any("no isolation" in note for note in backend.capabilities.notes)
            sandbox = await backend.create(SandboxSpec())
            assert (await sandbox.exec("echo hi")).stdout == "hi\n"
            await sandbox.exec("sleep 99 >/dev/null 2>&1 &")
            inside = tree(backend.host.get(sandbox.id).init_pid)
            await sandbox.kill()
            deadline = time.monotonic() + 5  # orphans are collected by the machine's own init
            while any(Path(f"/proc/{p}").exists() for p in inside) and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
            assert [p for p in inside if Path(f"/proc/{p}").exists()] == []
    finally:
        monkeypatch.undo()
        bwrap.probe.cache_clear()


async def test_sandboxes_survive_the_thread_that_made_them(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path / "x")
    made = []
    thread = threading.Thread(target=lambda: made.append(backend.host.create(SandboxSpec())))
    thread.start()
    thread.join()
    try:
        await asyncio.sleep(0.1)
        sandbox = await backend.connect(made[0].id)
        assert (await sandbox.exec("echo alive")).stdout == "alive\n"
    finally:
        await backend.close()


async def test_a_root_may_be_named_from_where_the_program_stands(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with LocalBackend(Path("runs/sandboxes")) as backend:
        sandbox = await backend.create(SandboxSpec(limits=LIMITS))
        monkeypatch.chdir("/")
        (twin,) = await sandbox.fork()
        assert (await twin.exec("echo here")).stdout == "here\n"
