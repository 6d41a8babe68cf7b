"""Work whose outcome is no single answer: reports, designs, programs of taste. It is not scored here; a judge reads
what was said, and the files that were made (`artifacts`)."""

from __future__ import annotations

from typing import Any

from k3rl.types import Problem
from rollout.environment import register_environment
from rollout.environments.sandboxed import SandboxEnvironment, write_files
from sandbox_client import Sandbox


@register_environment("workspace")
class Workspace(SandboxEnvironment):
    """``metadata.task.files`` of the problem, if any, lie in the home folder at the start. Always 0: rewards judge."""

    def __init__(self, problem: Problem, **arguments: Any) -> None:
        super().__init__(problem, **{"artifacts": ("*",), **arguments})
        self._files = dict((problem.metadata.get("task") or {}).get("files") or {})

    async def prepare(self, sandbox: Sandbox) -> None:
        await write_files(sandbox, self._files)

    async def judge(self, answer: str) -> float:
        return 0.0
