"""Trajectories' sandboxes on an AgentENV server outlive their worker: found again where they are as the trajectory
knows them, made from the snapshot where they went on without it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from played import Played

from k3rl.config.rollout import SandboxConfig
from k3rl.data.shell_lookup import shell_lookup
from rollout.environments.sandboxes import Sandboxes
from sandbox_client import owners

sys.path.insert(0, str(Path(__file__).parent.parent / "sandbox"))

from agentenv_server import AgentEnvServer

PROBLEM = shell_lookup(size=1, level=2)[0]


@pytest.fixture
def server(tmp_path, monkeypatch) -> Iterator[AgentEnvServer]:
    with AgentEnvServer(tmp_path / "server") as found:
        monkeypatch.setenv("AGENTENV_URL", found.url)
        monkeypatch.setenv("AGENTENV_API_KEY", found.api_key)
        yield found
        assert found.mistakes == []


@pytest.fixture
def worker(tmp_path, server, do):
    """Sandboxes of a worker's process. What the test does not close is left behind, as by a crash."""
    made = []

    def start(owner: str = "rollout-0", keep=None) -> Sandboxes:
        made.append(
            Sandboxes(SandboxConfig(backend="agentenv"), folder=tmp_path / "run" / "sandboxes", owner=owner)
        )
        made[-1].keep = keep
        return made[-1]

    yield start
    for one in made:
        do(one.close(over=True))


def begun(do, sandboxes: Sandboxes) -> Played:
    game = Played(do, sandboxes, PROBLEM)
    game.call("bash", command="echo 1 > n; (sleep 60; echo late > late) & echo $! > pid")
    do(game.environment.save())
    game.call("bash", command="echo 2 >> n")
    do(game.environment.pause())
    return game


def measured(do, game: Played) -> dict[str, float]:
    return do(game.sandboxes.measured())


def crash(game: Played) -> dict:
    """The worker counts as gone; its sandboxes are not. -> what the controller still knows of them."""
    owners.release(game.sandboxes._fleet.owner.instance)
    return {game.environment.sandbox()["id"]: game.environment.sandbox()}


def test_a_sandbox_is_found_again_with_its_files(worker, do):
    game = begun(do, worker())
    keep = crash(game)
    game.sandboxes = worker(keep=keep)
    game.elsewhere()
    assert game.call("bash", command="cat n") == "1\n2"
    assert game.environment.sandbox()["id"] in keep
    found = measured(do, game)
    assert (found["restored"], found["recovered"], found["replayed"], found["swept"]) == (1, 0, 0, 0)
    assert game.answer(PROBLEM.metadata["task"]["answer"]) == 1.0


def test_one_that_went_on_after_the_checkpoint_is_made_from_the_snapshot(worker, do):
    game = begun(do, worker())
    state = game.environment.state()
    game.call("bash", command="echo 3 >> n")  # after the checkpoint; then the crash
    keep = crash(game)
    game.sandboxes = worker(keep=keep)
    game.environment = game.make()
    do(game.environment.resume(state))
    assert game.call("bash", command="cat n") == "1\n2"
    assert game.environment.sandbox()["id"] not in keep
    found = measured(do, game)
    assert (found["recovered"], found["replayed"]) == (1, 1)
    do(game.environment.close())


def test_what_nobody_needs_any_more_is_swept(worker, server, do):
    game = begun(do, worker())
    backend = game.sandboxes._backend
    crash(game)
    second = worker(keep={})  # the same owner, and no trajectory needs it
    do(second.fleet())
    assert do(backend.list()) == []
    assert do(backend.list_snapshots()) == []


def test_a_trajectory_moves_to_another_worker_with_its_sandbox(worker, do):
    game = begun(do, worker())
    old, first = game.environment, game.environment.sandbox()["id"]
    game.sandboxes = worker("rollout-1", keep=crash(game))
    game.elsewhere()
    do(old.leave())
    assert game.call("bash", command="cat n") == "1\n2"
    assert game.environment.sandbox()["id"] == first
    do(game.environment.close())
    do(old.close())


def test_a_resumed_trajectory_that_ends_without_a_call_leaves_no_sandbox(worker, do):
    game = begun(do, worker())
    game.sandboxes = worker(keep=crash(game))
    game.elsewhere()
    do(game.environment.close())
    assert do(game.sandboxes._backend.list()) == []
