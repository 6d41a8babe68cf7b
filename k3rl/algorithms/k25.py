"""K2.5's objective, which K3 uses (spec/02 §1). The default.

To be maximised, with l = log pi_theta - log mu at each sampled token, mu as the inference engine stated it:

    Clip(exp l; alpha, beta) * (r_j - mean r)  -  tau * l^2

The clip is a gradient mask: inside the interval the gradient is ratio * A * grad log pi, outside it is
zero, whatever the sign of A. It isn't PPO's pessimistic minimum. The squared log-ratio is the trust region:
no reference policy, no standard deviation, no value network.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator

from k3rl.algorithms.batch import Sum, TokenBatch, TokenLoss
from k3rl.algorithms.objective import ObjectiveConfig, objective


class K25Config(ObjectiveConfig):
    type: Literal["k25"] = "k25"
    low: float = -math.log(2.0)
    """alpha: lower bound of the log-ratio (or of the ratio, see `bounds_on`). No value is published."""
    high: float = math.log(2.0)
    """beta: upper bound of the log-ratio (or of the ratio)."""
    bounds_on: Literal["log_ratio", "ratio"] = "log_ratio"
    """What `low` and `high` bound. The formula prints the ratio, the text speaks of the log-ratio."""
    tau: Annotated[float, Field(ge=0)] = 0.1
    """Weight of the squared log-ratio. No value is published."""
    regularise: Literal["all", "inside"] = "all"
    """Does the squared log-ratio also pull tokens whose policy gradient is masked? The formula says yes."""
    pg_form: Literal["ratio", "logprob"] = "ratio"
    """Policy gradient through the ratio (the formula) or through the log-prob (for ablations)."""

    @model_validator(mode="after")
    def _bounds(self) -> K25Config:
        if self.bounds_on == "ratio" and self.low <= 0:
            raise ValueError(f"k25: a ratio's lower bound must be above 0, got low={self.low}")
        low, high = self.log_bounds
        if not low < 0 < high:
            raise ValueError(
                f"k25: the bounds must enclose an unchanged policy (log-ratio 0), got {self.low}..{self.high}"
            )
        return self

    @property
    def log_bounds(self) -> tuple[float, float]:
        """(low, high) of the log-ratio."""
        if self.bounds_on == "ratio":
            return math.log(self.low), math.log(self.high)
        return self.low, self.high


@objective("k25")
def k25(batch: TokenBatch, config: K25Config) -> TokenLoss:
    """[T] losses (negated objective). Worked example of spec/02 §1: sum of the objective 0.882415."""
    low, high = config.log_bounds
    l_T = batch.log_ratio_T
    below_T, above_T = l_T.detach() < low, l_T.detach() > high
    inside_T = ~(below_T | above_T)
    clipped_T = l_T.clamp(low, high)  # no gradient outside
    if config.pg_form == "ratio":
        gain_T = torch.exp(clipped_T) * batch.advantages_T
    else:
        gain_T = clipped_T * batch.advantages_T
    pull_T = config.tau * l_T.square()
    if config.regularise == "inside":
        pull_T = torch.where(inside_T, pull_T, torch.zeros_like(pull_T))
    metrics = {
        "clip/below": Sum.over(below_T),
        "clip/above": Sum.over(above_T),
        "k25/regulariser": Sum.over(pull_T),
    }
    return TokenLoss(pull_T - gain_T, metrics)
