"""Hand-made and random token batches for the objective tests."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from k3rl.algorithms import TokenBatch


def make_batch(
    log_ratio_T: Tensor,
    advantages_T: Tensor,
    lengths: list[int],
    *,
    behaviour_T: Tensor | None = None,
    groups: list[int] | None = None,
    **optional: Tensor,
) -> TokenBatch:
    """Sequences back to back; ``groups[s]`` is the group of sequence s (one group where left out)."""
    total = sum(lengths)
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    group_S = torch.tensor(groups if groups is not None else [0] * len(lengths))
    group_T = group_S[sequence_T]
    behaviour_T = torch.full((total,), -1.0, dtype=log_ratio_T.dtype) if behaviour_T is None else behaviour_T
    return TokenBatch(
        logprobs_T=behaviour_T + log_ratio_T,
        behaviour_logprobs_T=behaviour_T,
        advantages_T=advantages_T,
        mask_T=torch.ones(total, dtype=torch.bool),
        sequence_T=sequence_T,
        sequence_tokens_T=torch.tensor(lengths)[sequence_T],
        group_tokens_T=torch.bincount(group_T)[group_T],
        **optional,
    )


def random_batch(seed: int, lengths: list[int], spread: float = 0.6) -> tuple[TokenBatch, Tensor]:
    """float64 batch and its leaf of log-probs; each sequence one advantage."""
    g = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    behaviour_T = -torch.rand(total, generator=g, dtype=torch.float64) * 3 - 0.1
    old_T = behaviour_T + 0.2 * torch.randn(total, generator=g, dtype=torch.float64)
    leaf_T = (behaviour_T + spread * torch.randn(total, generator=g, dtype=torch.float64)).requires_grad_()
    advantages_S = torch.randn(len(lengths), generator=g, dtype=torch.float64)
    base = make_batch(
        torch.zeros(total, dtype=torch.float64),
        advantages_S.repeat_interleave(torch.tensor(lengths)),
        lengths,
        behaviour_T=behaviour_T,
        groups=[i // 2 for i in range(len(lengths))],
        old_logprobs_T=old_T,
        reference_logprobs_T=behaviour_T - 0.3,
    )
    return with_logprobs(base, leaf_T), leaf_T


def with_logprobs(batch: TokenBatch, logprobs_T: Tensor) -> TokenBatch:
    return replace(batch, logprobs_T=logprobs_T)


def take(batch: TokenBatch, index: Tensor) -> TokenBatch:
    """Some tokens of a batch, as a micro-batch would hold them."""
    return replace(
        batch, **{f.name: v[index] for f in fields(batch) if (v := getattr(batch, f.name)) is not None}
    )
