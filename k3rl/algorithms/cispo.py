"""CISPO: clips the importance weight instead of the update, so that every token keeps a gradient.

maximise  sg[clip(r, 1 - clip_low, 1 + clip_high)] * A * log pi_theta,   r = pi_theta / pi_old
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field

from k3rl.algorithms.advantages import Baseline
from k3rl.algorithms.batch import Sum, TokenBatch, TokenLoss
from k3rl.algorithms.corrections import proximal_logprobs
from k3rl.algorithms.objective import CorrectedConfig, objective


class CispoConfig(CorrectedConfig):
    type: Literal["cispo"] = "cispo"
    baseline: Baseline = "group-mean-std"
    """How a group's rewards become advantages."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The weight isn't below 1 - clip_low; 1: no lower bound, as published."""
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """The weight isn't above 1 + clip_high."""


@objective("cispo")
def cispo(batch: TokenBatch, config: CispoConfig) -> TokenLoss:
    """[T] losses."""
    ratio_T = torch.exp(batch.logprobs_T - proximal_logprobs(batch)).detach()
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    weight_T = ratio_T.clamp(low, high)
    metrics = {"clip/below": Sum.over(ratio_T < low), "clip/above": Sum.over(ratio_T > high)}
    return TokenLoss(-weight_T * batch.advantages_T * batch.logprobs_T, metrics)
