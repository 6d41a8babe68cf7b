"""A real local backend for the tests of this folder, on an event loop that lives as long as they do."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from k3rl.config.rollout import AgentConfig, SandboxConfig
from k3rl.types import ParsedResponse, Problem, ToolCall
from rollout.environment import Reply, Turn, make_environment
from rollout.environments.sandboxed import SandboxEnvironment
from rollout.environments.sandboxes import Sandboxes
from sandbox_client import LocalBackend


@pytest.fixture(scope="session")
def do() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Runs a coroutine to its end on a loop in a thread of its own, as a rollout worker does."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield lambda call: asyncio.run_coroutine_threadsafe(call, loop).result(120)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(scope="session")
def backend(tmp_path_factory, do) -> Iterator[LocalBackend]:
    backend = LocalBackend(tmp_path_factory.mktemp("sandboxes"))
    assert backend.capabilities.isolated, backend.capabilities.notes
    yield backend
    do(backend.close())


@pytest.fixture(scope="session")
def sandboxes(tmp_path_factory, do) -> Iterator[Sandboxes]:
    sandboxes = Sandboxes(
        SandboxConfig(), run="tests", owner="w0", root=tmp_path_factory.mktemp("fleet"), tool_timeout_s=20.0
    )
    yield sandboxes
    do(sandboxes.close())


def says(text: str = "", *calls: tuple[str, dict[str, Any]]) -> ParsedResponse:
    """A turn of the policy."""
    made = tuple(ToolCall(name, arguments, index) for index, (name, arguments) in enumerate(calls, 1))
    return ParsedResponse("", text, made)


class Played:
    """An environment and a scripted policy in it."""

    def __init__(self, do, sandboxes: Sandboxes, problem: Problem) -> None:
        self.do, self.sandboxes, self.problem, self.turns = do, sandboxes, problem, 0
        self.environment = self.make()
        self.opening = do(self.environment.reset())

    def make(self) -> SandboxEnvironment:
        made = make_environment(self.problem, AgentConfig(), self.sandboxes)
        assert isinstance(made, SandboxEnvironment)
        return made

    def turn(self, text: str = "", *calls: tuple[str, dict[str, Any]]) -> Reply:
        self.turns += 1
        return self.do(self.environment.step(Turn(says(text, *calls), self.turns)))

    def call(self, tool: str, **arguments: Any) -> str:
        """What one call answers."""
        (message,) = self.turn("", (tool, arguments)).messages
        return message["content"]

    def answer(self, text: str = "") -> float:
        """Ends; the score."""
        reply = self.turn(text)
        assert reply.done
        return self.environment.state()["score"]

    def solve(self) -> float:
        """The way that the generator knows, with a look at each of its answers."""
        solution = self.problem.metadata["task"]["solution"]
        for tool, arguments, answers in solution["calls"]:
            said = self.call(tool, **arguments)
            assert answers is None or said == answers
        return self.answer(solution["answer"])

    def elsewhere(self) -> None:
        """Go on with another object, from the state as it is stored."""
        state = json.loads(json.dumps(self.environment.state()))
        self.environment = self.make()
        self.do(self.environment.resume(state))


@pytest.fixture
def play(do, sandboxes) -> Iterator[Callable[[Problem], Played]]:
    played: list[Played] = []

    def start(problem: Problem, own: Sandboxes | None = None) -> Played:
        played.append(Played(do, own or sandboxes, problem))
        return played[-1]

    yield start
    for one in played:
        do(one.environment.close())
