"""Answer a question from a CSV file with Python. Problems are made by `k3rl.data.data_question`."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from k3rl.types import Problem
from rollout.environment import register_environment
from rollout.environments.sandboxed import SUBMIT, SandboxEnvironment, task_of, write_files
from sandbox_client import Sandbox

TOLERANCE = 1e-6


@register_environment("data_question")
class DataQuestion(SandboxEnvironment):
    """1 where the answer is the right number, or the right word whatever its letters' case."""

    default_tools: ClassVar[tuple[str, ...]] = ("python", SUBMIT)

    def __init__(self, problem: Problem, **arguments: Any) -> None:
        super().__init__(problem, **arguments)
        self._task = task_of(problem, "files", "answer")

    async def prepare(self, sandbox: Sandbox) -> None:
        await write_files(sandbox, self._task["files"])

    async def judge(self, answer: str) -> float:
        return float(same(answer, str(self._task["answer"])))


def same(answer: str, right: str) -> bool:
    """Numbers by value, to `TOLERANCE` relative; other answers as text."""
    answer, right = answer.strip(), right.strip()
    try:
        return math.isclose(float(answer), float(right), rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except ValueError:
        return bool(answer) and answer.casefold() == right.casefold()
