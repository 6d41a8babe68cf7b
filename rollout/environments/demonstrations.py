"""Finished trajectories of a scripted policy, for the cold start of small models.

The observations are those that the sandbox would give; a test compares. A share of the demonstrations is careless: it
guesses, or does not follow a file to the next. So the model learns how to use the tool and not that this pays, which
is left to reinforcement learning.
"""

from __future__ import annotations

import random

from k3rl.data.agent_tasks import turns
from k3rl.data.conversations import Conversation
from k3rl.data.shell_lookup import shell_lookup, value
from k3rl.errors import UserError
from rollout.environments.shell_lookup import ShellLookup
from rollout.environments.tools import declaration


def shell_lookup_demonstrations(
    size: int = 1000,
    seed: int = 1,
    level: int = 1,
    terse: bool = True,
    guessed: float = 0.0,
    cut: float = 0.0,
) -> list[Conversation]:
    """Of problems with this ``seed``. A share ``guessed`` answers at once; a share ``cut`` reads one file and then
    guesses, where that file names another. Raises `UserError` for shares that are none."""
    if not (guessed >= 0 and cut >= 0 and guessed + cut <= 1):
        raise UserError(f"demonstrations: guessed {guessed:g} and cut {cut:g} are shares, at most 1 together")
    tools = [] if terse else [declaration(name) for name in ShellLookup.default_tools]
    out = []
    for index, problem in enumerate(shell_lookup(size=size, seed=seed, level=level, terse=terse)):
        rng = random.Random(f"demonstration/{seed}/{index}")
        solution = problem.metadata["task"]["solution"]
        calls, answer, fate = solution["calls"], solution["answer"], rng.random()
        guess = value(rng, terse)
        if fate < guessed:
            calls, answer = [], guess
        elif fate < guessed + cut and len(calls) > 1:
            calls, answer = calls[:1], guess
        messages = [*problem.messages, *turns(calls), {"role": "assistant", "content": answer}]
        out.append(Conversation(problem.id, messages, tools, domain=problem.domain))
    return out
