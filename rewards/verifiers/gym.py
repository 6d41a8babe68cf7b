"""`reasoning-gym`'s own scorers. The problem is generated again from its task, arguments and index, so that
the scorer gets its metadata as the generator made them."""

from __future__ import annotations

from typing import Any

from k3rl.data.gym import gym_dataset
from rewards.api import GraderError, Scored, reward
from rewards.verifiers.extract import Extract
from rewards.verifiers.extract import extract as extract_part


@reward(name="reasoning_gym", depends="content", deterministic=True)
def reasoning_gym(
    scored: Scored,
    task: str,
    arguments: dict[str, Any],
    index: int,
    answer: str | None = None,
    extract: Extract = "whole",
) -> float:
    """The task's own score, 0 to 1, of the part of the response that ``extract`` names."""
    dataset = gym_dataset(task, arguments)
    entry = dataset[index]
    if answer is not None and entry["answer"] != answer:
        raise GraderError(
            f"reasoning-gym now generates another problem {index} of '{task}' (answer {entry['answer']!r}, "
            f"was {answer!r}): its version differs from that of the data"
        )
    found = extract_part(scored.content, extract)
    return float(dataset.score_answer(found, entry)) if found else 0.0
