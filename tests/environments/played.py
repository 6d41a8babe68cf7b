"""A scripted policy in an environment."""

from __future__ import annotations

import json
from typing import Any

from k3rl.config.rollout import AgentConfig
from k3rl.types import ParsedResponse, Problem, ToolCall
from rollout.environment import Reply, Turn, make_environment
from rollout.environments.sandboxed import SandboxEnvironment
from rollout.environments.sandboxes import Sandboxes


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
