"""A trajectory's sandbox: rests between calls, is found, recovered or made again, and dies alone."""

from __future__ import annotations

import time

import pytest

from k3rl.config.rollout import SandboxConfig
from k3rl.data.shell_lookup import shell_lookup
from rollout.environments.sandboxes import Sandboxes, run_identity
from sandbox_client.types import State


@pytest.fixture
def own(tmp_path, do):
    """Sandboxes of this test alone; `again` gives those of another process with the same folder."""
    made = []

    def make(owner: str = "w0", **config) -> Sandboxes:
        made.append(
            Sandboxes(SandboxConfig(**config), folder=tmp_path / "s", owner=owner, tool_timeout_s=10.0)
        )
        return made[-1]

    yield make
    for one in made:
        do(one.close(over=True))


PROBLEM = shell_lookup(size=1, level=2)[0]


def state_of(game) -> State:
    return game.do(game.environment._lease.sandbox.info()).state


def rested(game) -> bool:
    deadline = time.monotonic() + 5
    while state_of(game) is not State.PAUSED:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def snapshots(game) -> int:
    return len(game.do(game.sandboxes._backend.list_snapshots()))


def test_no_sandbox_is_made_before_the_first_call(play, own, do):
    game = play(PROBLEM, own())
    assert game.environment.sandbox() is None
    assert do(game.sandboxes.measured()) == {}


def test_the_sandbox_rests_while_the_policy_generates(play, own):
    game = play(PROBLEM, own())
    game.call("bash", command="echo 1 > n")
    assert rested(game)
    assert game.call("bash", command="cat n") == "1"
    assert rested(game)


def test_a_longer_rest_keeps_it_awake_between_quick_calls(play, own):
    game = play(PROBLEM, own(rest_s=30.0))
    game.call("bash", command="true")
    time.sleep(0.2)
    assert state_of(game) is State.RUNNING
    game.do(game.environment.pause())  # the trajectory is paused: at once
    assert state_of(game) is State.PAUSED


def test_the_state_names_the_sandbox_and_the_calls(play, own):
    game = play(PROBLEM, own())
    game.call("bash", command="echo 1 > n")
    state, record = game.environment.state(), game.environment.sandbox()
    assert state["journal"] == [["bash", {"command": "echo 1 > n"}]]
    assert record == {"backend": "local", "id": game.environment._lease.sandbox.id, "task": PROBLEM.id}
    game.do(game.environment.save())
    assert game.environment.sandbox()["snapshot"] == game.environment.state()["snapshot"]


def test_a_checkpoint_of_what_did_not_change_makes_no_new_snapshot(play, own):
    game = play(PROBLEM, own())
    game.do(game.environment.save())
    game.call("bash", command="echo 1 > n")
    for _ in range(3):
        game.do(game.environment.save())
    assert snapshots(game) == 1


@pytest.mark.parametrize("saved", [False, True], ids=["from all calls", "from the snapshot and later calls"])
def test_another_process_goes_on_with_the_files_as_they_were(play, own, do, saved):
    game = play(PROBLEM, own())
    game.call("bash", command="date +%N > n; cat n")
    number = game.call("bash", command="cat n")
    if saved:
        do(game.environment.save())
    game.call("bash", command="echo later >> log")
    game.call("bash", command="cat gone")
    state = game.environment.state()
    do(game.sandboxes.close())  # the process ends, its sandboxes with it
    game.sandboxes = own()
    game.elsewhere()
    assert game.environment.state() == state
    files = game.call("bash", command="ls; cat log").splitlines()
    assert "n" in files
    assert files[-1] == "later"
    assert (
        game.call("bash", command="cat n") == number
    ) == saved  # what chance made is the snapshot's to keep
    assert game.environment.state()["replayed"] == (2 if saved else 4)
    measured = do(game.sandboxes.measured())
    assert (measured["recovered"], measured["replayed"]) == ((1, 2) if saved else (0, 4))


def test_a_lost_snapshot_costs_the_calls_again(play, own, do):
    game = play(PROBLEM, own())
    game.call("bash", command="echo 1 > n")
    do(game.environment.save())
    do(game.sandboxes.drop_snapshots([game.environment.state()["snapshot"]]))
    do(game.sandboxes.close())
    game.sandboxes = own()
    game.elsewhere()
    assert game.call("bash", command="cat n") == "1"


def test_a_sandbox_that_died_is_made_again_before_the_call(play, own, do):
    game = play(PROBLEM, own())
    game.call("bash", command="echo 1 > n")
    do(game.environment._lease.sandbox.kill())
    assert game.call("bash", command="cat n") == "1"
    do(game.environment._lease.sandbox.kill())
    assert game.answer(PROBLEM.metadata["task"]["answer"]) == 1.0


def test_a_call_that_ends_its_sandbox_is_told_so_and_harms_nothing_else(play, own, do):
    game, other = play(PROBLEM, own()), play(PROBLEM, own("w1"))
    game.call("bash", command="echo 1 > n")

    async def dies(sandbox, limits, *, command: str) -> str:
        if command == "die":
            await sandbox.kill()
        return await real(sandbox, limits, command=command)

    from rollout.environments import tools

    real, tools.TOOLS["bash"] = tools.TOOLS["bash"], dies
    try:
        assert "ended the sandbox" in game.call("bash", command="die")
        assert game.call("bash", command="cat n") == "1"
    finally:
        tools.TOOLS["bash"] = real
    assert other.call("bash", command="echo 2") == "2"


def test_a_closed_environment_leaves_no_sandbox(play, own, do):
    game = play(PROBLEM, own())
    game.call("bash", command="true")
    do(game.environment.close())
    assert do(game.sandboxes._backend.list()) == []
    do(game.environment.close())  # again: nothing happens


def test_as_many_sandboxes_as_the_quota_and_judges_beside_them(play, own, do):
    import asyncio

    from played import says

    from k3rl.data.code_repair import code_repair
    from rollout.environment import Turn

    sandboxes = own(quota=2)
    problem = code_repair(size=1, level=1)[0]
    games = [play(problem, sandboxes) for _ in range(6)]

    async def one(game) -> float:
        await game.environment.step(Turn(says("", ("bash", {"command": "sleep 0.2"})), 1))
        seen.append(await sandboxes.measured())
        await game.environment.step(Turn(says("done"), 2))
        await game.environment.close()
        return game.environment.state()["score"]

    async def all_() -> list[float]:
        return await asyncio.wait_for(asyncio.gather(*(one(g) for g in games)), 60)

    seen: list[dict[str, float]] = []
    assert do(all_()) == [0.0] * 6
    assert max(s["alive"] for s in seen) <= 2
    assert do(sandboxes._backend.list()) == []


def test_what_is_measured(play, own, do):
    game = play(PROBLEM, own(warm=1))
    game.call("bash", command="sleep 0.1")
    assert rested(game)
    measured = do(game.sandboxes.measured())
    assert measured["calls"] == 1
    assert measured["paused"] >= 1
    assert 0.1 < measured["exec_p50_s"] < 5
    assert 0 < measured["pause_share"] < 1


def test_a_run_keeps_its_identity(tmp_path):
    first = run_identity(tmp_path / "runs" / "mine" / "sandboxes")
    assert first == run_identity(tmp_path / "runs" / "mine" / "sandboxes")
    assert first.startswith("mine-")
    assert first != run_identity(tmp_path / "other" / "mine" / "sandboxes")
