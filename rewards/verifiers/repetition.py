"""How much a response repeats itself."""

from __future__ import annotations

from rewards.api import Scored, reward


def repeated_share(tokens: list[str] | list[int], n: int) -> float:
    """Share of the n-grams that occurred before: 1 - distinct / all. 0 for texts shorter than n + 1."""
    total = len(tokens) - n + 1
    if total < 2:
        return 0.0
    return 1.0 - len({tuple(tokens[i : i + n]) for i in range(total)}) / total


@reward(name="repetition", depends="trajectory", trusted=True, deterministic=True)
def repetition(scored: Scored, n: int = 8, channel: str = "all", unit: str = "token") -> float:
    """1 minus the share of repeated n-grams: 1 for a text without repeats, near 0 for a loop.

    ``channel``: ``think``, ``response`` or ``all``. ``unit``: ``token`` (all sampled tokens, whatever the
    channel) or
    ``word`` (white space between).
    """
    if unit == "token":
        return 1.0 - repeated_share(scored.trajectory.token_ids, n)
    texts = {"think": scored.reasoning, "response": scored.content}
    text = texts.get(channel, f"{scored.reasoning} {scored.content}")
    return 1.0 - repeated_share(text.split(), n)
