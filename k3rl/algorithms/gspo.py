"""GSPO: the importance ratio of the whole sequence, length-normalised, clipped as one.

    s = (pi_theta(y) / pi_old(y)) ^ (1 / |y|) = exp(mean_i l_i);   maximise min(s A, clip(s) A), mean over
    sequences

Written by token, s_i = sg[s] * pi_theta,i / sg[pi_theta,i]: the same value, the same gradient where A is
one number per sequence, and defined where A differs by token.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field

from k3rl.algorithms.advantages import Baseline
from k3rl.algorithms.batch import TokenBatch, TokenLoss, segment_sum
from k3rl.algorithms.corrections import proximal_logprobs
from k3rl.algorithms.normalisation import Normalisation
from k3rl.algorithms.objective import objective
from k3rl.algorithms.ppo import ClipConfig, clipped_surrogate


class GspoConfig(ClipConfig):
    type: Literal["gspo"] = "gspo"
    baseline: Baseline = "group-mean-std"
    """How a group's rewards become advantages."""
    normalisation: Normalisation = "sequence"
    """How token losses are averaged; a sequence is one unit here."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 3e-4
    """The sequence's ratio isn't rewarded below 1 - clip_low."""
    clip_high: Annotated[float, Field(gt=0)] = 4e-4
    """The sequence's ratio isn't rewarded above 1 + clip_high."""


@objective("gspo")
def gspo(batch: TokenBatch, config: GspoConfig) -> TokenLoss:
    """[T] losses. A sequence must lie in one batch whole: `ValueError` where tokens of it are missing."""
    l_T = (batch.logprobs_T - proximal_logprobs(batch)).detach()
    sum_S, place_T = segment_sum(l_T, batch.sequence_T)
    count_S, _ = segment_sum(torch.ones_like(l_T), batch.sequence_T)
    if not torch.equal(count_S[place_T].long(), batch.sequence_tokens_T):
        raise ValueError("gspo: a sequence was cut across micro-batches; its ratio needs all of its tokens")
    s_T = torch.exp(sum_S / count_S)[place_T]
    ratio_T = s_T * torch.exp(batch.logprobs_T - batch.logprobs_T.detach())
    return clipped_surrogate(ratio_T, batch.advantages_T, config)
