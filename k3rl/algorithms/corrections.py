"""Off-policy corrections: weights for the gap between the engine that sampled and the trainer that scores.

w = pi_old / mu, where pi_old is the trainer's log-prob before the update and mu the behaviour log-prob; no
gradient flows through w.

    none          1
    truncated     min(w, high)                              (truncated importance sampling)
    masked        w where low <= w <= high, else 0          (IcePop)

``level: sequence`` uses the product over the sequence's trained tokens instead of the token's own ratio.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from k3rl.algorithms.batch import Sum, TokenBatch, segment_sum
from k3rl.config.base import Config


class NoCorrection(Config):
    type: Literal["none"] = "none"


class TruncatedCorrection(Config):
    type: Literal["truncated"] = "truncated"
    high: Annotated[float, Field(gt=0)] = 2.0
    """Largest weight."""
    level: Literal["token", "sequence"] = "token"
    """Ratio of the token, or product over its sequence."""


class MaskedCorrection(Config):
    type: Literal["masked"] = "masked"
    low: Annotated[float, Field(ge=0)] = 0.5
    """Tokens (or sequences) with a smaller weight don't train."""
    high: Annotated[float, Field(gt=0)] = 2.0
    """Tokens (or sequences) with a larger weight don't train."""
    level: Literal["token", "sequence"] = "token"
    """Ratio of the token, or product over its sequence."""

    @model_validator(mode="after")
    def _ordered(self) -> MaskedCorrection:
        if self.low >= self.high:
            raise ValueError(f"correction: low ({self.low}) must be below high ({self.high})")
        return self


Correction = Annotated[NoCorrection | TruncatedCorrection | MaskedCorrection, Field(discriminator="type")]


def correction_weights(config: Correction, batch: TokenBatch) -> tuple[Tensor | None, dict[str, Sum]]:
    """[T] weights without gradient (``None``: all one) and metrics. ``batch`` holds trained tokens only."""
    if isinstance(config, NoCorrection):
        return None, {}
    gap_T = (proximal_logprobs(batch) - batch.behaviour_logprobs_T).detach()
    if config.level == "sequence":
        gap_S, place_T = segment_sum(gap_T, batch.sequence_T)
        gap_T = gap_S[place_T]
    weights_T = torch.exp(gap_T)
    if isinstance(config, TruncatedCorrection):
        cut_T = weights_T > config.high
        kept_T = weights_T.clamp(max=config.high)
    else:
        cut_T = (weights_T < config.low) | (weights_T > config.high)
        kept_T = torch.where(cut_T, torch.zeros_like(weights_T), weights_T)
    return kept_T, {"correction/weight": Sum.over(kept_T), "correction/cut": Sum.over(cut_T)}


def proximal_logprobs(batch: TokenBatch) -> Tensor:
    """log pi_old. Where it wasn't computed apart, this is the first update on the batch and pi_old is
    pi_theta.
    """
    return batch.logprobs_T.detach() if batch.old_logprobs_T is None else batch.old_logprobs_T
