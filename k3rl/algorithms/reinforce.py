"""REINFORCE: maximise A * log pi_theta, with the reward itself as advantage."""

from __future__ import annotations

from typing import Literal

from k3rl.algorithms.advantages import Baseline
from k3rl.algorithms.batch import TokenBatch, TokenLoss
from k3rl.algorithms.objective import CorrectedConfig, objective


class ReinforceConfig(CorrectedConfig):
    type: Literal["reinforce"] = "reinforce"
    baseline: Baseline = "none"
    """How a group's rewards become advantages; REINFORCE takes them as they are."""


@objective("reinforce")
def reinforce(batch: TokenBatch, config: CorrectedConfig) -> TokenLoss:
    """[T] losses."""
    return TokenLoss(-batch.advantages_T * batch.logprobs_T)
