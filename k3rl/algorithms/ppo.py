"""PPO's clipped surrogate, and GRPO, which is it with group-normalised advantages.

To be maximised: min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = pi_theta / pi_old. With ``dual_clip``
c > 1 the objective of a negative advantage is at least c A, which bounds the loss of tokens whose ratio
exploded.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field

from k3rl.algorithms.advantages import Baseline
from k3rl.algorithms.batch import Sum, TokenBatch, TokenLoss
from k3rl.algorithms.corrections import Correction, NoCorrection, proximal_logprobs
from k3rl.algorithms.normalisation import Normalisation
from k3rl.algorithms.objective import CorrectedConfig, objective


class ClipConfig(CorrectedConfig):
    """Fields of every PPO-like objective."""

    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio isn't rewarded below 1 - clip_low."""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """The ratio isn't rewarded above 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound c for negative advantages; none by default."""


class PpoConfig(ClipConfig):
    type: Literal["ppo"] = "ppo"


class GrpoConfig(ClipConfig):
    type: Literal["grpo"] = "grpo"
    baseline: Baseline = "group-mean-std"
    """How a group's rewards become advantages; GRPO divides by the standard deviation."""
    normalisation: Normalisation = "sequence"
    """How token losses are averaged; GRPO takes the mean of each sequence first."""
    correction: Correction = NoCorrection()
    """Off-policy correction between engine and trainer (`k3rl.algorithms.corrections`)."""


@objective("ppo")
def ppo_clip(batch: TokenBatch, config: ClipConfig) -> TokenLoss:
    """[T] losses."""
    ratio_T = torch.exp(batch.logprobs_T - proximal_logprobs(batch))
    return clipped_surrogate(ratio_T, batch.advantages_T, config)


def clipped_surrogate(ratio_T: torch.Tensor, advantages_T: torch.Tensor, config: ClipConfig) -> TokenLoss:
    """The formula of the module, for any ratio (GSPO brings the sequence's)."""
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    gain_T = torch.minimum(ratio_T * advantages_T, ratio_T.clamp(low, high) * advantages_T)
    if config.dual_clip is not None:
        floor_T = torch.maximum(gain_T, config.dual_clip * advantages_T)
        gain_T = torch.where(advantages_T < 0, floor_T, gain_T)
    ratio = ratio_T.detach()
    metrics = {
        "clip/below": Sum.over((ratio < low) & (advantages_T < 0)),
        "clip/above": Sum.over((ratio > high) & (advantages_T > 0)),
        "ratio/proximal": Sum.over(ratio),
    }
    return TokenLoss(-gain_T, metrics)


objective("grpo")(ppo_clip)
