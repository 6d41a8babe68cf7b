"""What becomes of responses that are too long: two intents, chosen by name.

soft_penalty   (DAPO) added to the reward, by sampled tokens n, maximum L and interval C:
               0 for n <= L - C;  (L - C - n) / C for L - C < n <= L;  -1 for n > L
mask           a response cut by a limit doesn't train; its reward still counts in the baseline
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from k3rl.config.base import Config


class SoftPenalty(Config):
    type: Literal["soft_penalty"] = "soft_penalty"
    max_tokens: Annotated[int, Field(gt=0)]
    """L: sampled tokens from which the whole penalty applies."""
    interval_tokens: Annotated[int, Field(gt=0)]
    """C: the penalty grows linearly over the last so many tokens before `max_tokens`."""

    @model_validator(mode="after")
    def _fits(self) -> SoftPenalty:
        if self.interval_tokens > self.max_tokens:
            raise ValueError(
                f"overlong: interval_tokens ({self.interval_tokens}) is above max_tokens ({self.max_tokens})"
            )
        return self


class MaskTruncated(Config):
    type: Literal["mask"] = "mask"


Overlong = Annotated[SoftPenalty | MaskTruncated, Field(discriminator="type")]


def soft_penalty(sampled_tokens: int, config: SoftPenalty) -> float:
    """In [-1, 0]; see the module's table."""
    free = config.max_tokens - config.interval_tokens
    if sampled_tokens <= free:
        return 0.0
    if sampled_tokens <= config.max_tokens:
        return (free - sampled_tokens) / config.interval_tokens
    return -1.0
