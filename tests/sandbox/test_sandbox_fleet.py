"""The life cycle of a run's sandboxes, on both backends."""

from __future__ import annotations

import asyncio
import json

import pytest

from sandbox_client import Fleet, FleetConfig, SandboxSpec, State
from sandbox_client.errors import InvalidRequest, QuotaExceeded, SandboxNotFound

SPEC = SandboxSpec(ttl_s=120)


def config(**changes) -> FleetConfig:
    return FleetConfig(**{"run": "r1", "spec": SPEC, "heartbeat_s": 30.0, **changes})


async def until(condition, limit_s: float = 10.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.02)


async def test_a_trajectorys_sandbox_rests_while_nobody_uses_it(backend) -> None:
    async with Fleet(backend, config()) as fleet:
        lease = await fleet.acquire("t1")
        async with lease.awake() as sandbox:
            await sandbox.exec(
                "echo 1 > f; (while :; do echo x >> ticks; sleep 0.02; done) >/dev/null 2>&1 &"
            )
            async with lease.awake():  # two calls of one turn
                pass
            assert not lease.paused
        await until(lambda: lease.paused)
        assert (await lease.sandbox.info()).state is State.PAUSED
        await asyncio.sleep(0.3)
        async with lease.awake() as sandbox:
            assert await sandbox.read_file("f") == b"1\n"
        stats = fleet.stats()
        assert stats["alive"] == 1
        assert 0 < stats["pause_share"] < 1
        assert stats["resume_p50_s"] > 0
        await lease.release()
        await lease.release()
        assert await backend.list() == []
        assert fleet.stats()["alive"] == 0


async def test_rest_waits_for_its_time(backend) -> None:
    async with Fleet(backend, config(rest_s=0.4)) as fleet:
        lease = await fleet.acquire("t1")
        async with lease.awake():
            pass
        await asyncio.sleep(0.1)
        assert not lease.paused
        async with lease.awake():
            await asyncio.sleep(0.5)
            assert not lease.paused
        await until(lambda: lease.paused)


async def test_warm_sandboxes_are_made_ahead_and_within_the_quota(backend) -> None:
    async with Fleet(backend, config(quota=3, warm=2)) as fleet:
        await until(lambda: len(fleet._places.warm) == 2)
        assert [i.state for i in await backend.list()] == [State.PAUSED] * 2
        first = await fleet.acquire("a")
        assert fleet.metrics.from_warm == 1
        async with first.awake() as sandbox:
            assert (await sandbox.exec("echo warm")).stdout == "warm\n"
        others = [await fleet.acquire(name) for name in "bc"]
        assert len(await backend.list()) == 3
        assert len({first.sandbox.id, *(o.sandbox.id for o in others)}) == 3


async def test_quota_waits_and_then_says_so(backend) -> None:
    async with Fleet(backend, config(quota=1, acquire_s=0.3)) as fleet:
        lease = await fleet.acquire("a")
        with pytest.raises(QuotaExceeded, match="all 1 sandboxes"):
            await fleet.acquire("b")
        waiting = asyncio.ensure_future(fleet.acquire("c"))
        await asyncio.sleep(0.05)
        await lease.release()
        assert (await waiting).task == "c"


async def test_judging_happens_in_a_fork_that_goes(backend) -> None:
    async with Fleet(backend, config()) as fleet:
        lease = await fleet.acquire("t")
        async with lease.awake() as sandbox:
            await sandbox.write_file("answer", "mine")
        async with lease.judge() as judge:
            assert await judge.read_file("answer") == b"mine"
            await judge.write_file("answer", "spoiled by the tests")
            assert len(await backend.list()) == 2
        async with lease.awake() as sandbox:
            assert await sandbox.read_file("answer") == b"mine"
        assert [i.id for i in await backend.list()] == [lease.sandbox.id]


async def test_records_find_the_sandbox_or_its_snapshot(backend) -> None:
    async with Fleet(backend, config()) as fleet:
        lease = await fleet.acquire("t")
        async with lease.awake() as sandbox:
            await sandbox.write_file("f", "half done")
        first = await lease.save()
        record = json.loads(json.dumps(await lease.save()))
        assert record["snapshot"] != first["snapshot"]
        assert [s.id for s in await backend.list_snapshots()] == [record["snapshot"]]
        await lease.detach()
        assert (await lease.sandbox.info()).state is State.PAUSED

        same = await fleet.restore(record)
        assert same.sandbox.id == record["id"]
        assert same.paused
        async with same.awake() as sandbox:
            assert await sandbox.read_file("f") == b"half done"
        await same.detach()
        await same.sandbox.kill()  # a fault: the node is lost

        recovered = await fleet.restore(record)
        assert recovered.sandbox.id != record["id"]
        async with recovered.awake() as sandbox:
            assert await sandbox.read_file("f") == b"half done"
        assert fleet.metrics.restored == 1
        assert fleet.metrics.recovered == 1
        await recovered.release()
        assert await backend.list_snapshots() == []
        with pytest.raises(SandboxNotFound):
            await fleet.restore(record)
        with pytest.raises(InvalidRequest, match="elsewhere"):
            await fleet.restore({**record, "backend": "elsewhere"})
        assert fleet.stats()["lost"] == 1


async def test_orphans_are_swept_at_start_and_exit_by_metadata(backend) -> None:
    fleet = Fleet(backend, config())
    await fleet.open()
    orphan, kept = await fleet.acquire("orphan"), await fleet.acquire("kept")
    other = Fleet(backend, config(run="another-run"))
    await other.open()
    foreign = await other.acquire("x")

    successor = Fleet(backend, config())  # the process died; another takes over
    keep = {kept.sandbox.id: "its trajectory is in the checkpoint"}
    assert await successor.open(keep, dead=[fleet.owner.name]) == 1
    left = {i.id for i in await backend.list()}
    assert left == {kept.sandbox.id, foreign.sandbox.id}
    with pytest.raises(SandboxNotFound):
        await orphan.sandbox.info()
    await successor.close(keep_resumable=False)
    assert {i.id for i in await backend.list()} == {foreign.sandbox.id}
    await other.close()
    assert await backend.list() == []
    await fleet.close()


async def test_heartbeats_keep_a_long_call_alive(backend) -> None:
    async with Fleet(backend, config(spec=SandboxSpec(ttl_s=2, auto_pause=False), heartbeat_s=0.5)) as fleet:
        lease = await fleet.acquire("t")
        async with lease.awake() as sandbox:
            assert (await sandbox.exec("sleep 3; echo done", timeout_s=20)).stdout == "done\n"


async def test_faulty_configurations_are_refused() -> None:
    for bad in ({"run": ""}, {"quota": 0}, {"warm": 9, "quota": 3}, {"heartbeat_s": 100.0}):
        with pytest.raises(ValueError):
            config(**bad)


def test_synchronous_face(tmp_path, needs_isolation) -> None:
    from sandbox_client import LocalBackend, SyncBackend

    with SyncBackend(LocalBackend(tmp_path)) as backend:
        sandbox = backend.create(SPEC)
        seen = []
        assert sandbox.exec("cat; echo end", stdin=b"in\n", on_output=seen.append).stdout == "in\nend\n"
        assert b"".join(c.data for c in seen) == b"in\nend\n"
        sandbox.write_file("d/f", "x")
        assert sandbox.read_file("d/f") == b"x"
        assert [e.name for e in sandbox.list_files("d")] == ["f"]
        sandbox.move("d/f", "d/g")
        assert sandbox.stat("d/g").size_bytes == 1
        sandbox.remove("d/g")
        sandbox.make_dir("e")
        sandbox.pause()
        assert sandbox.info().state is State.PAUSED
        sandbox.resume(ttl_s=60)
        sandbox.extend(30)
        (child,) = sandbox.fork()
        snapshot = sandbox.snapshot("n")
        assert backend.list_snapshots("n")[0].id == snapshot.id
        assert {i.id for i in backend.list()} == {sandbox.id, child.id}
        assert backend.connect(child.id).exec("test -d e").ok
        backend.delete_snapshot(snapshot.id)
        sandbox.kill()
        with pytest.raises(SandboxNotFound):
            sandbox.exec("true")
    backend.close()
