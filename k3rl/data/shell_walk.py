"""Walks whose start lies in a file: first find it with a shell, then think. For very small models.

The question ``Q>3`` says that file Q holds two fingers, such as ``ep``, or ``@`` and the name of the file that holds
them. Where are they after three steps back along the alphabet? So the policy calls ``cat Q`` in the trajectory's
sandbox, reads, perhaps calls ``cat`` once more, and then walks in its thoughts, as finely as its effort asks
(`k3rl.data.tasks`). Tools are not declared: the demonstrations show them.

The environment is ``shell_lookup``; its task's ``files`` and ``answer`` are seen by no policy but through the tools.

    problems = shell_walk(part="train")                    # for reinforcement learning
    conversations = shell_walk_demonstrations(size=9600)   # for the cold start
"""

from __future__ import annotations

import random

from k3rl.data.agent_tasks import turns
from k3rl.data.conversations import Conversation
from k3rl.data.tasks import EFFORTS, KEYS, RINGS, Part, careless, questions, said, step, thoughts
from k3rl.errors import UserError
from k3rl.types import Effort, Message, Problem

RING = RINGS["alphabet"]
DECOYS = 3


def shell_walk(
    part: Part = "train",
    min_steps: int = 2,
    max_steps: int = 6,
    named: float = 0.5,
    domain: str = "agent",
) -> list[Problem]:
    """A problem for each start and number of steps, in a fixed shuffled order. In a share of ``named`` the first file
    names another. ``budget_tokens`` (b0) is the length of the thoughts at high effort."""
    _check(named)
    return [
        _problem(start, steps, named, domain) for start, steps in questions(part, min_steps, max_steps, RING)
    ]


def shell_walk_demonstrations(
    size: int = 9600,
    seed: int = 1,
    min_steps: int = 2,
    max_steps: int = 6,
    named: float = 0.5,
    unread: float = 0.1,
    skipped: float = 0.2,
    cut: float = 0.2,
    domain: str = "agent",
) -> list[Conversation]:
    """Demonstrations over the train part, a third each at low, high and max effort.

    A share of ``unread`` does not read the last file and guesses; of the others, shares of ``skipped`` and ``cut`` have
    no thoughts, or too few, and guess too. So what is right is left to reinforcement learning.
    """
    _check(named, unread)
    asked = questions("train", min_steps, max_steps, RING)
    rng = random.Random(f"shell walk {seed}")
    out = []
    for index in range(size):
        start, steps = rng.choice(asked)
        problem, effort = _problem(start, steps, named, domain, str(index)), EFFORTS[index % len(EFFORTS)]
        messages = _demonstrated(rng, problem, effort, unread, skipped, cut)
        out.append(Conversation(f"shell-walk-demonstration-{index}", messages, effort=effort, domain=domain))
    return out


def _problem(start: str, steps: int, named: float, domain: str, salt: str = "") -> Problem:
    """Files' names depend on the question and ``salt`` alone."""
    rng = random.Random(f"shell walk {start} {steps} {salt}")
    first, second, *decoys = rng.sample(KEYS, 2 + DECOYS)
    files = {key: "".join(rng.choices(RING, k=2)) for key in decoys}
    files |= {first: f"@{second}", second: start} if rng.random() < named else {first: start}
    task = {"files": {k: v + "\n" for k, v in sorted(files.items())}, "answer": step(start, steps, RING)}
    return Problem(
        id=f"shell-walk-{start}-{steps}{salt and '-' + salt}",
        domain=domain,
        messages=[{"role": "user", "content": f"{first}>{steps}"}],
        reward={"name": "environment"},
        budget_tokens=len(thoughts(start, steps, Effort.HIGH, RING)),
        metadata={
            "environment": {"name": "shell_lookup", "arguments": {"declare": False}},
            "task": task,
            "steps": steps,
        },
    )


def _demonstrated(
    rng: random.Random, problem: Problem, effort: Effort, unread: float, skipped: float, cut: float
) -> list[Message]:
    task, steps = problem.metadata["task"], problem.metadata["steps"]
    read = [str(problem.messages[0]["content"])[0]]
    while (text := task["files"][read[-1]].strip()).startswith("@"):
        read.append(text[1])
    thought = thoughts(text, steps, effort, RING)

    def guess() -> str:
        return "".join(rng.choices(RING, k=2))

    if rng.random() < unread:
        read, thought, answer = read[:-1], "", guess()
    else:
        thought, answer = careless(rng, thought, task["answer"], guess, skipped, cut)
    calls = [["bash", {"command": f"cat {name}"}, task["files"][name].strip()] for name in read]
    return [*problem.messages, *turns(calls), said(answer, thought)]


def _check(*shares: float) -> None:
    if any(not 0 <= share <= 1 for share in shares):
        raise UserError(f"shell walks: shares are from 0 to 1, not {' and '.join(map(str, shares))}")
