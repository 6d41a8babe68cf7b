"""Advantages of one group, as pure functions of its rewards.

    group-mean        r_j - mean(r)                        (K2.5, K3; Dr. GRPO)
    group-mean-std    (r_j - mean(r)) / (std(r) + eps)     (GRPO; std with K - 1, as torch.std)
    leave-one-out     r_j - mean of the others             (RLOO)
    none              r_j                                  (REINFORCE)

A reward of ``None`` (never scored) takes no part in the baseline and gets no advantage: a failed grader is
no zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

Baseline = Literal["group-mean", "group-mean-std", "leave-one-out", "none"]


def advantages(
    rewards_K: Sequence[float | None], baseline: Baseline, eps: float = 1e-6
) -> list[float | None]:
    """By trajectory, ``None`` where its reward is. Raises `ValueError` for a reward that isn't finite."""
    for k, r in enumerate(rewards_K):
        if r is not None and not math.isfinite(r):
            raise ValueError(f"reward {k} of the group is {r}")
    scored = [r for r in rewards_K if r is not None]
    n = len(scored)
    if n == 0:
        return [None] * len(rewards_K)
    mean = math.fsum(scored) / n

    def one(r: float) -> float:
        if baseline == "none":
            return r
        if baseline == "group-mean":
            return r - mean
        if n == 1:
            return 0.0  # nothing to compare with
        if baseline == "leave-one-out":
            return (r - mean) * n / (n - 1)
        variance = math.fsum((x - mean) ** 2 for x in scored) / (n - 1)
        return (r - mean) / (math.sqrt(variance) + eps)

    return [None if r is None else one(r) for r in rewards_K]


def zero_variance(rewards_K: Sequence[float | None]) -> bool:
    """All scored rewards equal: the group says nothing about which response is better."""
    scored = [r for r in rewards_K if r is not None]
    return bool(scored) and max(scored) == min(scored)
