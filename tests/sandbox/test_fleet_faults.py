"""A fleet when calls are slow, fail or come twice at a time."""

from __future__ import annotations

import asyncio
import random

import pytest
from agentenv_server import Fault

from sandbox_client import Fleet, FleetConfig, SandboxSpec, State
from sandbox_client.errors import SandboxError, SandboxNotFound, Unavailable, Unsupported
from sandbox_client.fleet import LEASED, ROLE_KEY, TASK_KEY, WARM
from sandbox_client.owners import OWNER_KEY, RUN_KEY


def config(**changes) -> FleetConfig:
    return FleetConfig(**{"run": "r1", "spec": SandboxSpec(ttl_s=120), "heartbeat_s": 30.0, **changes})


async def until(condition, limit_s: float = 10.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.02)


async def sandbox_class(backend) -> type:
    """The class of the backend's handles, to let one of its calls fail."""
    sandbox = await backend.create(SandboxSpec())
    await sandbox.kill()
    return type(sandbox)


@pytest.mark.parametrize("lost", [False, True], ids=["found", "recovered"])
async def test_a_record_restored_twice_at_a_time_gives_one_sandbox(backend, lost: bool) -> None:
    async with Fleet(backend, config()) as fleet:
        lease = await fleet.acquire("t")
        record = await lease.save()
        await lease.detach()
        if lost:
            await lease.sandbox.kill()
        both = await asyncio.gather(*(fleet.restore(record) for _ in range(3)))
        assert len({id(x) for x in both}) == 1
        assert len(await backend.list()) == 1
        assert fleet.stats()["alive"] == 1
        assert await fleet.restore(record) is both[0]
        again = await both[0].detach()
        assert (await fleet.restore(record)).sandbox.id == again["id"]  # the old record leads to the new one
        await (await fleet.restore(again)).release()
        assert await backend.list() == []
        with pytest.raises(SandboxNotFound):
            await fleet.restore(record)
        assert fleet._restoring == {}
        assert fleet._places.taken == 0


async def test_a_restore_that_fails_leaves_the_next_one_free(backend, monkeypatch) -> None:
    async with Fleet(backend, config(quota=1)) as fleet:
        lease = await fleet.acquire("t")
        record = await lease.detach()
        failing = [Unavailable("down")]
        info = type(await backend.connect(record["id"])).info

        async def sometimes(self):
            if failing:
                raise failing.pop()
            return await info(self)

        monkeypatch.setattr(await sandbox_class(backend), "info", sometimes)
        first, second = await asyncio.gather(
            fleet.restore(record), fleet.restore(record), return_exceptions=True
        )
        assert isinstance(first, Unavailable)
        assert second.sandbox.id == record["id"]
        await second.release()


async def test_a_place_that_becomes_free_is_filled_with_a_warm_sandbox(backend) -> None:
    async with Fleet(backend, config(quota=2, warm=1)) as fleet:
        await until(lambda: len(fleet._places.warm) == 1)
        leases = [await fleet.acquire(name) for name in "ab"]
        await until(lambda: fleet._filling is None or fleet._filling.done())
        assert len(fleet._places.warm) == 0
        await leases[0].release()
        await until(lambda: len(fleet._places.warm) == 1)
        assert len(await backend.list()) == 2


async def test_a_warm_sandbox_makes_way_and_leaves_its_place(backend) -> None:
    async with Fleet(backend, config(quota=2, warm=2, acquire_s=5.0)) as fleet:
        await until(lambda: len(fleet._places.warm) == 2)
        lease = await fleet.acquire("t")
        async with lease.judge() as judge:  # takes the last place; the pool may not take it back meanwhile
            assert (await judge.exec("true")).ok
            assert len(await backend.list()) == 2
        await until(lambda: len(fleet._places.warm) == 1)


async def test_a_slow_heartbeat_starves_no_other(backend, monkeypatch) -> None:
    kind = await sandbox_class(backend)
    extend, slow, beats = kind.extend, [], []

    async def sometimes(self, ttl_s: float) -> None:
        beats.append(self.id)
        if self.id in slow:
            await asyncio.sleep(3600)
        await extend(self, ttl_s)

    monkeypatch.setattr(kind, "extend", sometimes)
    spec = SandboxSpec(ttl_s=2, auto_pause=False)
    async with Fleet(backend, config(spec=spec, heartbeat_s=0.5)) as fleet:
        stuck, lease = await fleet.acquire("a"), await fleet.acquire("b")
        slow.append(stuck.sandbox.id)
        async with stuck.awake(), lease.awake() as sandbox:
            assert (await sandbox.exec("sleep 3; echo done", timeout_s=20)).stdout == "done\n"
        assert beats.count(stuck.sandbox.id) >= 2  # given up and tried again
        assert fleet.faults["TimeoutError"] >= 1
        slow.clear()


async def test_the_judges_own_error_is_seen_though_its_fork_will_not_die(backend, monkeypatch) -> None:
    monkeypatch.setattr("sandbox_client.fleet.KILL_AGAIN_S", (0.05, 0.05))
    async with Fleet(backend, config(quota=2, acquire_s=5.0)) as fleet:
        lease = await fleet.acquire("t")
        kind = await sandbox_class(backend)
        kill, failing = kind.kill, [Unavailable("down"), Unavailable("down")]

        async def sometimes(self) -> None:
            if failing:
                raise failing.pop()
            await kill(self)

        monkeypatch.setattr(kind, "kill", sometimes)
        with pytest.raises(ZeroDivisionError):
            async with lease.judge():
                raise ZeroDivisionError
        async with lease.judge() as judge:  # waits for the place of the fork that is killed at last
            assert (await judge.exec("true")).ok
        assert fleet.faults["Unavailable"] == 2
        assert fleet.stats()["faults"] == 2
        assert [i.id for i in await backend.list()] == [lease.sandbox.id]


async def test_a_released_sandbox_that_will_not_die_fails_nobody(backend, monkeypatch) -> None:
    monkeypatch.setattr("sandbox_client.fleet.KILL_AGAIN_S", (0.05,))
    async with Fleet(backend, config()) as fleet:
        lease = await fleet.acquire("t")
        await lease.save()
        kind = await sandbox_class(backend)
        kill, failing = kind.kill, [Unavailable("down")]

        async def sometimes(self) -> None:
            if failing:
                raise failing.pop()
            await kill(self)

        monkeypatch.setattr(kind, "kill", sometimes)
        await lease.release()
        assert await backend.list_snapshots() == []
        await until(lambda: fleet._places.taken == 0)
        assert await backend.list() == []


async def test_a_warm_sandbox_takes_the_label_of_who_takes_it(backend) -> None:
    async with Fleet(backend, config(warm=1, owner="w0")) as fleet:
        await until(lambda: len(fleet._places.warm) == 1)
        (info,) = await backend.list()
        can = backend.capabilities.relabels
        assert info.metadata.get(ROLE_KEY) == (WARM if can else None)
        lease = await fleet.acquire("t7", metadata={"sample": "3"})
        assert fleet.metrics.from_warm == 1
        mine = {RUN_KEY: "r1", OWNER_KEY: "w0", ROLE_KEY: LEASED, TASK_KEY: "t7", "sample": "3"}
        assert mine.items() <= lease.metadata.items()
        said = next(i for i in await backend.list() if i.id == lease.sandbox.id).metadata
        assert said.get(ROLE_KEY) == (LEASED if can else None)  # never the wrong one
        if can:
            assert mine.items() <= said.items()
            assert lease.sandbox.metadata == said
            assert [i.id for i in await backend.list({TASK_KEY: "t7"})] == [lease.sandbox.id]
        else:
            with pytest.raises(Unsupported, match="at creation only"):
                await lease.sandbox.relabel({})


async def test_a_warm_sandbox_that_died_is_replaced(backend) -> None:
    async with Fleet(backend, config(warm=1)) as fleet:
        await until(lambda: len(fleet._places.warm) == 1)
        await fleet._places.warm[0].kill()
        lease = await fleet.acquire("t")
        if backend.capabilities.relabels:  # else it shows at the first use, and the trajectory starts again
            async with lease.awake() as sandbox:
                assert (await sandbox.exec("echo here")).ok
        await lease.release()


async def test_a_pause_of_unknown_outcome_is_followed_by_a_resume(backend, monkeypatch) -> None:
    async with Fleet(backend, config(rest_s=60.0)) as fleet:
        lease = await fleet.acquire("t")
        kind = await sandbox_class(backend)
        pause = kind.pause

        async def loses_the_answer(self) -> None:
            await pause(self)
            raise Unavailable("connection lost")

        monkeypatch.setattr(kind, "pause", loses_the_answer)
        with pytest.raises(Unavailable):
            await lease.pause()
        assert (await lease.sandbox.info()).state is State.PAUSED
        async with lease.awake() as sandbox:
            assert (await sandbox.exec("echo here")).stdout == "here\n"
        monkeypatch.undo()


async def test_a_snapshot_of_unknown_outcome_is_deleted(backend, monkeypatch) -> None:
    async with Fleet(backend, config()) as fleet:
        lease = await fleet.acquire("t")
        kind = await sandbox_class(backend)
        snapshot = kind.snapshot

        async def loses_the_answer(self, name=None):
            await snapshot(self, name)
            raise Unavailable("connection lost")

        monkeypatch.setattr(kind, "snapshot", loses_the_answer)
        with pytest.raises(Unavailable):
            await lease.save()
        async with asyncio.timeout(10):
            while await backend.list_snapshots():
                await asyncio.sleep(0.05)


async def test_commands_are_timed(backend) -> None:
    async with Fleet(backend, config()) as fleet:
        lease = await fleet.acquire("t")
        async with lease.awake() as sandbox:
            await sandbox.exec("sleep 0.2")
        async with lease.judge() as judge:
            await judge.exec("true")
        stats = fleet.stats()
        assert len(fleet.metrics.exec_s) == 2
        assert stats["exec_p99_s"] >= 0.2


async def turns(fleet: Fleet, name: str) -> list[str]:
    """A trajectory: three tool calls with pauses between, saved and let go half-way. -> what its file holds."""
    lease = await fleet.acquire(name)
    for turn in range(3):
        async with lease.awake() as sandbox:
            done = await sandbox.exec(f"echo {name} {turn} >> turns")
            assert done.ok, done
        if turn == 1:
            await lease.save()
            lease = await fleet.restore(await lease.detach())
    async with lease.awake() as sandbox:
        said = (await sandbox.read_file("turns")).decode().splitlines()
    await lease.release()
    return said


@pytest.mark.parametrize("seed", range(3))
async def test_each_trajectory_ends_well_or_fails_alone_with_its_reason(server, agentenv, seed: int) -> None:
    """A server that answers 500 to 504 and 409, is slow, and cuts connections before, during and after the work."""
    rng = random.Random(seed)
    faults = [{"status": s} for s in (500, 502, 503, 504)] + [{"status": 500, "code": 503}]
    faults += [{"status": 409, "code": 409}, {"delay_s": 0.3}]
    faults += [{"drop": d} for d in ("before", "after", "stream")]
    calls = [
        "/sandboxes",
        "/sandboxes/[^/]+/(pause|resume|snapshots)",
        "/process.Process/Start",
        "/v2/sandboxes",
    ]
    for _ in range(25):
        fault = {"method": "POST", "path": rng.choice(calls), **rng.choice(faults)}
        server.faults.append(Fault(**fault))
    fleet = Fleet(agentenv, config(quota=8, acquire_s=60.0))
    await fleet.open()
    ended = await asyncio.gather(*(turns(fleet, f"t{n}") for n in range(16)), return_exceptions=True)
    for n, end in enumerate(ended):
        if isinstance(end, BaseException):
            assert isinstance(end, SandboxError), repr(end)
            assert str(end)
        else:
            assert end == [f"t{n} {turn}" for turn in range(3)]  # nothing lost, nothing done twice
    assert sum(isinstance(end, list) for end in ended) >= 4
    server.faults.clear()
    await fleet.close(keep_resumable=False)
    assert await agentenv.list() == []
    assert await agentenv.list_snapshots() == []
