"""Make failing tests pass. Problems are made by `k3rl.data.code_repair`.

The policy sees some tests as a file. Others are hidden: their inputs enter only a fork of the sandbox, after the
policy is done, and their results enter no sandbox at all; they are compared here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from k3rl.types import Problem
from rollout.environment import register_environment
from rollout.environments.sandboxed import SandboxEnvironment, task_of, write_files
from sandbox_client import Sandbox

HARNESS = Path(__file__).with_name("code_harness.py")
OUTPUT_BYTES = 1 << 20


@register_environment("code_repair")
class CodeRepair(SandboxEnvironment):
    """1 where every hidden test passes. What the policy answers besides does not count."""

    default_tools: ClassVar[tuple[str, ...]] = ("bash", "view", "edit", "submit")

    def __init__(self, problem: Problem, **arguments: Any) -> None:
        super().__init__(problem, **arguments)
        self._task = task_of(problem, "files", "file", "entry", "hidden")

    async def prepare(self, sandbox: Sandbox) -> None:
        await write_files(sandbox, self._task["files"])

    async def judge(self, answer: str) -> float:
        return float(await self.in_fork(self._passes))

    async def _passes(self, sandbox: Sandbox) -> bool:
        hidden = self._task["hidden"]
        given = {k: self._task[k] for k in ("file", "entry")} | {"calls": [a for a, _ in hidden]}
        result = await sandbox.exec(
            ["python3", "-c", HARNESS.read_text(encoding="utf-8")],
            stdin=json.dumps(given).encode(),
            timeout_s=self.limits.python_s,
            output_limit_bytes=OUTPUT_BYTES,
        )
        wanted = [{"value": value} for _, value in hidden]
        return result.ok and equal(lines_of(result.stdout), wanted)


def lines_of(text: str) -> list[Any]:
    """Lines of JSON; one that is not stands for itself as text."""
    found: list[Any] = []
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            found.append(line)
    return found


def equal(found: Any, wanted: Any) -> bool:
    """Equal as JSON: 1 and 1.0 are one number, and ``true`` is none."""
    if isinstance(found, list) and isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(equal, found, wanted))
    if isinstance(found, dict) and isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(equal(found[k], wanted[k]) for k in wanted)
    return isinstance(found, bool) == isinstance(wanted, bool) and bool(found == wanted)
