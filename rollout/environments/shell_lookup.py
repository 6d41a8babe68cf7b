"""Find a fact in files. Problems are made by `k3rl.data.shell_lookup`."""

from __future__ import annotations

from typing import Any, ClassVar

from k3rl.types import Problem
from rollout.environment import register_environment
from rollout.environments.sandboxed import SandboxEnvironment, task_of, write_files
from sandbox_client import Sandbox


@register_environment("shell_lookup")
class ShellLookup(SandboxEnvironment):
    """1 where the answer is the fact, spaces around it and letters' case aside."""

    default_tools: ClassVar[tuple[str, ...]] = ("bash",)

    def __init__(self, problem: Problem, **arguments: Any) -> None:
        super().__init__(problem, **arguments)
        self._task = task_of(problem, "files", "answer")

    async def prepare(self, sandbox: Sandbox) -> None:
        await write_files(sandbox, self._task["files"])

    async def judge(self, answer: str) -> float:
        return float(answer.strip().casefold() == str(self._task["answer"]).casefold())
