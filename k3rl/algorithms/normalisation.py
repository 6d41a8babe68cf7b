"""How token losses become one number, without depending on how the batch was cut.

Each normalisation is a weight per token (a function of whole-batch counts that the token carries with it)
and a denominator. Both are sums over tokens, so micro-batches and ranks add up to the same loss whatever
the cut.

    name        loss                                                  denominator of a token
    token       sum_i l_i / N_batch                                   1
    sequence    mean over sequences of the mean over tokens           1 / |y|      adds up to sequences
    group       mean over groups of sum / N_group (spec/02 §1, E_x)   1 / N_group  adds up to groups
    constant    sum_i l_i / (sequences * constant_tokens)             constant_tokens / |y|
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from k3rl.algorithms.batch import TokenBatch

Normalisation = Literal["token", "sequence", "group", "constant"]


def token_weights(kind: Normalisation, batch: TokenBatch) -> Tensor:
    """float64 [T]: what each token's loss is multiplied with before it is summed."""
    if kind == "sequence":
        return 1.0 / _counts(batch.sequence_tokens_T, "sequence_tokens_T")
    if kind == "group":
        return 1.0 / _counts(batch.group_tokens_T, "group_tokens_T")
    return torch.ones(len(batch), dtype=torch.float64, device=batch.logprobs_T.device)


def denominator(kind: Normalisation, batch: TokenBatch, constant_tokens: int = 0) -> float:
    """This batch's share of the global denominator. ``batch`` holds trained tokens only."""
    if kind == "token":
        return float(len(batch))
    if kind == "constant":
        if constant_tokens <= 0:
            raise ValueError("constant normalisation needs constant_tokens > 0")
        return constant_tokens * float((1.0 / _counts(batch.sequence_tokens_T, "sequence_tokens_T")).sum())
    return float(token_weights(kind, batch).sum())


def _counts(counts_T: Tensor, name: str) -> Tensor:
    if len(counts_T) and int(counts_T.min()) < 1:
        raise ValueError(f"{name} must count at least the token itself: the whole batch's counts are missing")
    return counts_T.double()
