"""One body for every backend. Where a backend cannot do a thing its capabilities say so, and the test asserts
that too."""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import replace

import pytest

from sandbox_client import SandboxSpec, State
from sandbox_client.errors import (
    BrokenStream,
    FileMissing,
    InvalidRequest,
    OutOfSpace,
    SandboxNotFound,
    SandboxPaused,
)
from sandbox_client.types import FileType

SPEC = SandboxSpec(ttl_s=120, metadata={"run": "conformance", "task": "a b&c=d"})


async def test_the_whole_life_of_a_sandbox(backend) -> None:
    """The scenario of spec/07 §10 as a caller sees it."""
    sandbox = await backend.create(SPEC)
    assert (await sandbox.info()).state is State.RUNNING
    await sandbox.write_file("work/notes.txt", "before the pause")
    await sandbox.exec("nohup sh -c 'while :; do date +%s%N > tick; sleep 0.05; done' >/dev/null 2>&1 &")

    await sandbox.pause()
    assert (await sandbox.info()).state is State.PAUSED
    await sandbox.pause()
    for refused in (sandbox.snapshot(), sandbox.fork(), sandbox.extend(60), sandbox.exec("true")):
        with pytest.raises(SandboxPaused):
            await refused
    assert [i.id for i in await backend.list({"run": "conformance"})] == [sandbox.id]
    assert await backend.list({"run": "conformance"}, State.RUNNING) == []

    await sandbox.resume()
    await sandbox.resume()
    again = await backend.connect(sandbox.id)
    assert await again.read_file("work/notes.txt") == b"before the pause"
    assert backend.capabilities.pause_keeps_memory
    tick = await again.read_file("tick")
    await asyncio.sleep(0.3)
    assert await again.read_file("tick") != tick

    await sandbox.exec("pkill -f tick; true")
    snapshot = await sandbox.snapshot("conformance-snapshot")
    assert snapshot.id in [s.id for s in await backend.list_snapshots()]
    await sandbox.kill()
    with pytest.raises(SandboxNotFound):
        await sandbox.info()

    restored = await backend.create(replace(SPEC, template=snapshot.id))
    assert await restored.read_file("work/notes.txt") == b"before the pause"
    children = await restored.fork(2)
    assert len({restored.id, *(c.id for c in children)}) == 3
    await children[0].write_file("work/notes.txt", "changed by a child")
    assert await children[1].read_file("work/notes.txt") == b"before the pause"
    assert await restored.read_file("work/notes.txt") == b"before the pause"

    for every in (restored, *children):
        await every.kill()
    assert await backend.list() == []
    await backend.delete_snapshot(snapshot.id)
    await backend.delete_snapshot(snapshot.id)
    assert await backend.list_snapshots() == []


async def test_expiry_pauses_or_kills(backend) -> None:
    keeps = await backend.create(replace(SPEC, ttl_s=1, auto_pause=True))
    dies = await backend.create(replace(SPEC, ttl_s=1, auto_pause=False))
    lives = await backend.create(replace(SPEC, ttl_s=1))
    await lives.extend(60)
    await asyncio.sleep(1.3)
    assert (await keeps.info()).state is State.PAUSED
    assert (await lives.info()).state is State.RUNNING
    with pytest.raises(SandboxNotFound):
        await dies.info()
    await keeps.resume(ttl_s=60)
    assert (await keeps.exec("echo back")).stdout == "back\n"
    assert (await keeps.info()).ends_at > time.time() + 30


async def test_a_paused_sandbox_wakes_by_itself_only_where_told(backend) -> None:
    sleeper = await backend.create(replace(SPEC, auto_resume=True))
    await sleeper.pause()
    assert (await sleeper.exec("echo awake")).stdout == "awake\n"
    await sleeper.pause()
    await sleeper.write_file("x", b"1")
    assert (await sleeper.info()).state is State.RUNNING


async def test_exec_tells_exit_codes_streams_and_environment(backend) -> None:
    sandbox = await backend.create(replace(SPEC, env={"FROM_SPEC": "1"}))
    done = await sandbox.exec("echo out; echo err >&2; exit 3")
    assert (done.exit_code, done.stdout, done.stderr, done.ok) == (3, "out\n", "err\n", False)
    assert (await sandbox.exec("true")).ok
    assert (await sandbox.exec("kill -9 $$")).exit_code == 137
    assert (await sandbox.exec("kill -TERM $$")).exit_code == 143
    done = await sandbox.exec("echo $FROM_SPEC $FROM_CALL $PWD", env={"FROM_CALL": "2"}, cwd="/tmp")
    assert done.stdout == "1 2 /tmp\n"
    assert (await sandbox.exec(["printf", "%s|", "a b", "$HOME", "*"])).stdout == "a b|$HOME|*|"
    with pytest.raises(InvalidRequest, match="no-such-program"):
        await sandbox.exec(["no-such-program"])
    with pytest.raises(InvalidRequest):
        await sandbox.exec("true", cwd="/no/such/folder")


async def test_stdin_of_any_size_is_fed_while_output_is_read(backend) -> None:
    sandbox = await backend.create(SPEC)
    data = bytes(range(256)) * 4096
    done = await sandbox.exec("sha256sum | cut -c1-64; echo end", stdin=data)
    import hashlib

    assert done.stdout == hashlib.sha256(data).hexdigest() + "\nend\n"
    assert (await sandbox.exec("head -c 3", stdin=data * 4)).stdout_bytes == 3
    assert (await sandbox.exec("cat", stdin=b"")).ok


async def test_time_limit_kills_the_whole_tree(backend) -> None:
    sandbox = await backend.create(SPEC)
    began = time.monotonic()
    done = await sandbox.exec("echo first; sleep 7777 & sleep 7777", timeout_s=0.7)
    assert done.timed_out
    assert (done.exit_code, done.stdout) == (137, "first\n")
    assert time.monotonic() - began < 8
    assert "sleep 7777" not in (await sandbox.exec("ps axww")).stdout.replace("ps axww", "")


async def test_streaming_and_interaction(backend) -> None:
    sandbox = await backend.create(SPEC)
    seen = b""
    async with sandbox.start("while read line; do echo got $line; done", stdin=True) as process:
        assert process.pid > 0
        await process.write_stdin(b"one\n")
        async for chunk in process:
            seen += chunk.data
            if seen == b"got one\n":
                await process.write_stdin(b"two\n")
            elif seen == b"got one\ngot two\n":
                await process.close_stdin()
        assert process.exit is not None
        assert process.exit.exit_code == 0
    async with sandbox.start(
        "trap 'echo bye; exit 4' TERM; echo ready; while :; do sleep 0.05; done"
    ) as process:
        output = b""
        async for chunk in process:
            output += chunk.data
            if output == b"ready\n":
                await process.signal(signal.SIGTERM)
        assert output == b"ready\nbye\n"
        assert process.exit.exit_code == 4


async def test_leaving_or_cancelling_an_exec_kills_what_it_started(backend) -> None:
    sandbox = await backend.create(SPEC)
    async with sandbox.start("sleep 6666 & sleep 6666"):
        pass
    task = asyncio.ensure_future(sandbox.exec("sleep 6666 & sleep 6666"))
    await asyncio.sleep(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.3)
    assert "sleep 6666" not in (await sandbox.exec("ps axww")).stdout


async def test_background_processes_outlive_their_exec(backend) -> None:
    sandbox = await backend.create(SPEC)
    began = time.monotonic()
    await sandbox.exec("(sleep 0.5; echo late > late) >/dev/null 2>&1 &")
    await sandbox.exec("sleep 30 & echo started")  # holds the pipes, yet does not hold the caller
    assert time.monotonic() - began < 5
    await asyncio.sleep(0.8)
    assert await sandbox.read_file("late") == b"late\n"


async def test_files(backend) -> None:
    sandbox = await backend.create(SPEC)
    await sandbox.write_file("a/b/one.bin", bytes(range(256)))
    await sandbox.write_file("a/b/one.bin", b"second")
    assert await sandbox.read_file("a/b/one.bin") == b"second"
    assert await sandbox.read_file("/home/user/a/b/one.bin") == b"second"
    await sandbox.write_file("a/run.sh", "#!/bin/sh\necho ran\n", mode=0o755)
    assert (await sandbox.exec(["./a/run.sh"])).stdout == "ran\n"
    await sandbox.exec("ln -s b/one.bin a/link")
    listed = {e.path.removeprefix("/home/user/"): e for e in await sandbox.list_files("a", depth=2)}
    assert set(listed) == {"a/b", "a/run.sh", "a/link", "a/b/one.bin"}
    assert listed["a/b"].type is FileType.DIRECTORY
    assert listed["a/link"].type is FileType.SYMLINK
    assert listed["a/link"].target == "b/one.bin"
    assert (listed["a/b/one.bin"].size_bytes, listed["a/run.sh"].mode) == (6, 0o755)
    assert abs(listed["a/b/one.bin"].modified_at - time.time()) < 60
    await sandbox.move("a/b/one.bin", "elsewhere/two.bin")
    with pytest.raises(FileMissing):
        await sandbox.read_file("a/b/one.bin")
    await sandbox.make_dir("elsewhere")
    await sandbox.remove("elsewhere")
    for missing in (sandbox.stat("elsewhere"), sandbox.remove("elsewhere"), sandbox.list_files("nowhere")):
        with pytest.raises(FileMissing):
            await missing
    with pytest.raises(InvalidRequest):
        await sandbox.read_file("a")
    with pytest.raises(InvalidRequest):
        await sandbox.write_file("/etc/passwd", "x")
    with pytest.raises(OutOfSpace):
        await sandbox.read_file("a/run.sh", limit_bytes=4)
    assert await sandbox.list_files("a/b") == []


async def test_large_output_keeps_both_ends(backend) -> None:
    sandbox = await backend.create(SPEC)
    done = await sandbox.exec(
        "echo first; head -c 3000000 /dev/zero | tr '\\0' x; echo; echo last", output_limit_bytes=1000
    )
    assert done.stdout.startswith("first\nxxx")
    assert done.stdout.endswith("xxx\nlast\n")
    assert done.stdout_bytes == 3_000_012
    assert f"{3_000_012 - 1000} bytes left out" in done.stdout


async def test_metadata_finds_sandboxes_again(backend) -> None:
    made = [await backend.create(replace(SPEC, metadata={"run": "r=1", "n": str(n)})) for n in range(3)]
    assert {i.id for i in await backend.list({"run": "r=1"})} == {s.id for s in made}
    found = await backend.list({"run": "r=1", "n": "2"})
    assert [i.id for i in found] == [made[2].id]
    assert {k: v for k, v in found[0].metadata.items() if k in ("run", "n")} == {"run": "r=1", "n": "2"}
    assert await backend.list({"run": "r"}) == []


async def test_bad_requests_are_typed(backend) -> None:
    with pytest.raises(InvalidRequest):
        await backend.create(replace(SPEC, template="no-such-template"))
    with pytest.raises(InvalidRequest):
        await backend.create(replace(SPEC, ttl_s=-1))
    for odd in ("00000000-0000-0000-0000-000000000000", "../x", "a/b", "", "x" * 300):
        with pytest.raises(SandboxNotFound):
            await backend.connect(odd)
    sandbox = await backend.create(SPEC)
    with pytest.raises(InvalidRequest):
        await sandbox.fork(0)
    await sandbox.kill()
    await sandbox.kill()
    for gone in (
        sandbox.pause(),
        sandbox.resume(),
        sandbox.exec("true"),
        sandbox.extend(5),
        sandbox.snapshot(),
    ):
        with pytest.raises(SandboxNotFound):
            await gone


async def test_sandbox_killed_during_an_exec_is_a_typed_failure(backend) -> None:
    sandbox = await backend.create(SPEC)
    running = asyncio.ensure_future(sandbox.exec("sleep 30"))
    await asyncio.sleep(0.5)
    await sandbox.kill()
    with pytest.raises((BrokenStream, SandboxNotFound)):
        await asyncio.wait_for(running, 15)


async def test_memory_is_honest_about_forks_and_snapshots(backend) -> None:
    """A backend that says its forks keep processes must; one that says they don't must not pretend."""
    if backend.name == "agentenv":
        pytest.skip(
            "the test server runs local sandboxes, whose forks have no memory; a real server is needed"
        )
    sandbox = await backend.create(SPEC)
    async with sandbox.start("sleep 5555"):
        (child,) = await sandbox.fork()
    assert ("sleep 5555" in (await child.exec("ps axww")).stdout) == backend.capabilities.fork_keeps_memory


async def test_every_call_on_many_at_once(backend) -> None:
    async def one(n: int) -> str:
        sandbox = await backend.create(replace(SPEC, metadata={"n": str(n)}))
        await sandbox.write_file("n", str(n))
        await sandbox.pause()
        await sandbox.resume()
        done = await sandbox.exec("cat n")
        await sandbox.kill()
        return done.stdout

    assert await asyncio.gather(*(one(n) for n in range(12))) == [str(n) for n in range(12)]
    assert await backend.list() == []
