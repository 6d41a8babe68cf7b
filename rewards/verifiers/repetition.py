"""How much a response repeats itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from k3rl.types import Author, Channel, Trajectory
from rewards.api import GraderError, Scored, reward

CHANNELS = {"think": (Channel.THINK,), "response": (Channel.RESPONSE,), "all": tuple(Channel)}


def repeated_share(tokens: Sequence[str] | Sequence[int], n: int) -> float:
    """Share of the n-grams that occurred before: 1 - distinct / all. 0 for texts shorter than n + 1."""
    total = len(tokens) - n + 1
    if total < 2:
        return 0.0
    return 1.0 - len({tuple(tokens[i : i + n]) for i in range(total)}) / total


def sampled_in(trajectory: Trajectory, channels: Sequence[Channel]) -> list[int]:
    """Ids of the tokens that the policy sampled in some channels. What the environment said is not the policy's."""
    own = [s for s in trajectory.segments if s.author is Author.MODEL and s.channel in channels]
    return [token for segment in own for token in segment.token_ids]


@reward(name="repetition", depends="trajectory", trusted=True, deterministic=True)
def repetition(
    scored: Scored,
    n: int = 8,
    channel: Literal["think", "response", "all"] = "all",
    unit: Literal["token", "word"] = "token",
) -> float:
    """1 minus the share of repeated n-grams: 1 for a text without repeats, near 0 for a loop.

    ``token`` counts the sampled tokens of the channel over all turns; ``word`` the words of the last turn.
    """
    if channel not in CHANNELS or unit not in ("token", "word") or n < 1:
        raise GraderError(f"there is no channel '{channel}', no unit '{unit}', or n = {n} is below 1")
    if unit == "token":
        return 1.0 - repeated_share(sampled_in(scored.trajectory, CHANNELS[channel]), n)
    texts = {"think": scored.reasoning, "response": scored.content}
    text = texts.get(channel, f"{scored.reasoning} {scored.content}")
    return 1.0 - repeated_share(text.split(), n)
