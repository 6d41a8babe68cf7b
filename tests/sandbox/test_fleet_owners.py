"""Whose sandboxes and snapshots are swept, and whose are kept: several workers of one run on one server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from sandbox_client import Fleet, FleetConfig, SandboxSpec, State, owners
from sandbox_client.errors import SandboxNotFound
from sandbox_client.owners import Owner, snapshot_owner
from sandbox_client.sweep import is_dead


def config(**changes) -> FleetConfig:
    return FleetConfig(**{"run": "r1", "spec": SandboxSpec(ttl_s=120), "heartbeat_s": 30.0, **changes})


async def ids(backend) -> set[str]:
    return {i.id for i in await backend.list()}


# ------------------------------------------------------------ owners


async def test_one_workers_sweep_spares_another_workers_sandboxes(backend) -> None:
    first, second = Fleet(backend, config()), Fleet(backend, config())
    await first.open()
    mine = await first.acquire("a")
    assert await second.open() == 0
    other = await second.acquire("b")
    assert await ids(backend) == {mine.sandbox.id, other.sandbox.id}
    await second.close()
    assert await ids(backend) == {mine.sandbox.id}
    async with mine.awake() as sandbox:
        assert (await sandbox.exec("echo alive")).ok
    await first.close()
    assert await ids(backend) == set()


async def test_owners_are_swept_when_they_are_named_dead(backend) -> None:
    gone, living = Fleet(backend, config(owner="w0")), Fleet(backend, config(owner="w1"))
    await gone.open()
    await living.open()
    orphan, used = await gone.acquire("a"), await living.acquire("b")
    successor = Fleet(backend, config(owner="w2"))
    with pytest.raises(ValueError, match="a collection of owners' names or 'all', got 'w0'"):
        await successor.sweep(dead="w0")
    assert await successor.open(dead=["w0"]) == 1
    assert await ids(backend) == {used.sandbox.id}
    with pytest.raises(SandboxNotFound):
        await orphan.sandbox.info()
    assert await successor.sweep(dead="all") == 1
    assert await ids(backend) == set()
    for fleet in (gone, living, successor):
        await fleet.close()


OWNER = """
    import asyncio, json, sys
    from sandbox_client import Fleet, FleetConfig, LocalBackend, SandboxSpec
    from sandbox_client.agentenv import AgentEnvBackend, AgentEnvConfig

    async def main(where, key):
        backend = AgentEnvBackend(AgentEnvConfig(where, key)) if key else LocalBackend(where)
        fleet = Fleet(backend, FleetConfig("r1", SandboxSpec(ttl_s=120), heartbeat_s=30))
        await fleet.open()
        saved, plain = await fleet.acquire("saved"), await fleet.acquire("plain")
        async with saved.awake() as sandbox:
            await sandbox.write_file("f", "half done")
        print(json.dumps([await saved.save(), plain.sandbox.id]), flush=True)
        await asyncio.sleep(600)

    asyncio.run(main(*sys.argv[1:]))
"""


def dead_worker(where: str, key: str) -> tuple[dict[str, str], str]:
    """A process that makes two sandboxes and a snapshot, and is killed. -> the record, the other's id."""
    command = [sys.executable, "-c", textwrap.dedent(OWNER), where, key]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert process.stdout is not None
    line = process.stdout.readline()
    process.kill()
    process.wait()
    record, plain = json.loads(line)
    return record, plain


async def test_what_a_dead_process_left_is_swept_without_being_told(server, agentenv) -> None:
    record, plain = dead_worker(server.url, server.api_key)
    assert await ids(agentenv) == {record["id"], plain}
    async with Fleet(agentenv, config(run="another")):  # of another run: none of its business
        assert await ids(agentenv) == {record["id"], plain}
    fleet = Fleet(agentenv, config())
    assert await fleet.open(keep={record["id"]: record}) == 1
    assert await ids(agentenv) == {record["id"]}
    lease = await fleet.restore(record)
    async with lease.awake() as sandbox:
        assert await sandbox.read_file("f") == b"half done"
    await lease.release()
    assert await agentenv.list_snapshots() == []
    await fleet.close()


async def test_snapshots_of_the_dead_are_swept_by_who_knows_what_is_needed(
    backend, request, tmp_path
) -> None:
    server = request.getfixturevalue("server") if backend.name == "agentenv" else None
    where, key = (server.url, server.api_key) if server else (str(tmp_path / "local"), "")
    first, second = dead_worker(where, key)[0], dead_worker(where, key)[0]
    snapshots = {first["snapshot"], second["snapshot"]}
    foreign = await (await backend.create(SandboxSpec())).snapshot("somebody-elses")

    async def left() -> set[str]:
        return {s.id for s in await backend.list_snapshots()} - {foreign.id}

    living = Fleet(backend, config())
    await living.open()  # knows of no records, so none of them is touched
    assert await left() == snapshots
    mine = await living.acquire("mine")
    snapshots.add((await mine.save())["snapshot"])

    fleet = Fleet(backend, config())
    await fleet.open(keep={first["id"]: first})
    assert await left() == snapshots - {second["snapshot"]}
    assert (await backend.list_snapshots("somebody-elses"))[0].id == foreign.id
    recovered = await fleet.restore(first)
    async with recovered.awake() as sandbox:
        assert await sandbox.read_file("f") == b"half done"
    await fleet.close(keep_resumable=False)
    assert await left() == {mine.snapshot}
    await living.close(keep_resumable=False)
    assert await left() == set()


def test_a_snapshots_name_tells_its_maker() -> None:
    instance = owners.claim()
    me = Owner("a run / with ünusual name", "worker 1", instance)
    name = me.snapshot_name("9d0f1a52-4bbf-4b39-a06d-2b8a5fb0a0b7")
    assert len(name) <= 128
    assert name.replace("-", "").isalnum()
    assert name == name.lower()
    for said in (name, f"team/{name}:default"):
        assert snapshot_owner(said) == (me.digested(), owners.digest("9d0f1a52-4bbf-4b39-a06d-2b8a5fb0a0b7"))
    for other in ("checkpoint", f"x{name}", name[:-1], "k3rl-0123"):
        assert snapshot_owner(other) is None
    assert me.snapshot_name("s") != me.snapshot_name("s")
    owners.release(instance)


def test_life_is_judged_only_where_it_can_be_seen() -> None:
    mine = owners.claim()
    machine, pid = mine.rsplit("x", 3)[0], os.getpid()
    assert owners.alive(mine) is True
    owners.release(mine)
    assert owners.alive(mine) is False
    parent = owners._started(os.getppid())
    assert owners.alive(f"{machine}x{os.getppid()}x{parent}x1") is True
    assert owners.alive(f"{machine}x{os.getppid()}x{int(parent) - 1}x1") is False  # its pid, used again
    assert owners.alive(f"{machine}x{2**22 + 1}x1x1") is False
    for unknown in ("", "u00", f"p0x1x{pid}x1x1", "pxxxx"):
        assert owners.alive(unknown) is None


def test_who_is_dead() -> None:
    elsewhere, also = "p0x1x1x1x1", "p0x1x2x2x1"
    me = Owner("r", "w0", owners.claim())
    assert is_dead(Owner("r", "w0", elsewhere), me, ())  # an earlier life of the same worker
    assert not is_dead(Owner("r", "w1", elsewhere), me, ())
    assert is_dead(Owner("r", "w1", elsewhere), me, ["w1"])
    assert is_dead(Owner("r", "w1", also), me, "all")
    assert not is_dead(me, me, "all")
    twin = Owner("r", "w0", owners.claim())  # a live one that got the same name
    assert not is_dead(twin, me, ())
    owners.release(twin.instance)
    assert is_dead(twin, me, ())
    owners.release(me.instance)


# ------------------------------------------------------------ resumable


async def test_closing_keeps_paused_what_a_record_was_handed_out_for(backend) -> None:
    fleet = Fleet(backend, config())
    await fleet.open()
    detached, running, plain = [await fleet.acquire(name) for name in ("detached", "running", "plain")]
    async with detached.awake() as sandbox:
        await sandbox.write_file("f", "half done")
    record = await detached.detach()
    await running.save()
    async with running.awake():
        await fleet.close()
    assert await ids(backend) == {detached.sandbox.id, running.sandbox.id}
    assert {i.state for i in await backend.list()} == {State.PAUSED}
    with pytest.raises(SandboxNotFound):
        await plain.sandbox.info()

    successor = Fleet(backend, config())
    await successor.open(keep={record["id"]: record, running.sandbox.id: running.record()})
    lease = await successor.restore(record)
    async with lease.awake() as sandbox:
        assert await sandbox.read_file("f") == b"half done"
    await lease.release()
    await successor.close()  # what it was told of at its start is still resumable
    assert await ids(backend) == {running.sandbox.id}

    last = Fleet(backend, config())
    await last.open(keep={running.sandbox.id: running.record()})
    await last.close(keep_resumable=False)
    assert await ids(backend) == set()
    assert await backend.list_snapshots() == []


async def test_released_sandboxes_are_not_kept(backend) -> None:
    fleet = Fleet(backend, config())
    await fleet.open()
    lease = await fleet.acquire("t")
    await lease.save()
    await lease.release()
    await fleet.close()
    assert fleet.resumable == {}
    assert await ids(backend) == set()
    assert await backend.list_snapshots() == []
