"""What the generators of agents' problems share: problems whose task lies in files of a sandbox.

The files, the right answer and a way to it are in ``metadata["task"]``, which no policy and no sandbox sees. Problem
number i of a generator depends on its arguments and i alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from k3rl.errors import UserError
from k3rl.types import Message, Problem

Task = dict[str, Any]
Call = list[Any]
"""Tool, its arguments, and what it answers (``None`` where that is not told in advance)."""


def call(tool: str, answers: str | None = None, **arguments: Any) -> Call:
    return [tool, arguments, answers]


def turns(calls: Sequence[Call]) -> list[Message]:
    """A turn of the policy for each call, and what it answers."""
    out: list[Message] = []
    for tool, arguments, answers in calls:
        name = f"{tool}:0"
        called = {"id": name, "type": "function", "function": {"name": tool, "arguments": arguments}}
        out.append({"role": "assistant", "content": "", "tool_calls": [called]})
        out.append({"role": "tool", "tool_call_id": name, "name": tool, "content": answers})
    return out


def make_problems(
    environment: str,
    make: Callable[[random.Random], tuple[str, Task]],
    *,
    size: int,
    seed: int,
    level: int,
    levels: int,
    domain: str,
    arguments: dict[str, Any],
) -> list[Problem]:
    """``make`` gives the user's message and the task; ``arguments`` are the environment's. Raises `UserError` for a
    level that there is not."""
    if not 1 <= level <= levels:
        raise UserError(f"{environment}: level is 1 to {levels}, not {level}")
    if size < 1:
        raise UserError(f"{environment}: size is {size}, and at least one problem is needed")
    named = {"name": environment} | ({"arguments": arguments} if arguments else {})
    problems = []
    for index in range(size):
        text, task = make(random.Random(f"{environment}/{level}/{seed}/{index}"))
        problems.append(
            Problem(
                id=f"{environment}-{level}-{seed}-{index}",
                domain=domain,
                messages=[{"role": "user", "content": text}],
                reward={"name": "environment"},
                metadata={"environment": named, "task": task},
            )
        )
    return problems
