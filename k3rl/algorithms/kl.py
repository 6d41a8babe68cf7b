"""Penalty towards a frozen reference policy.

With d = log pi_theta - log pi_ref at a sampled token:

    estimator   value                 as a plain loss term, its gradient is
    k1          d                     zero in expectation (only noise)
    k2          d^2 / 2               that of reverse KL(pi_theta || pi_ref)
    k3          exp(-d) - 1 + d       that of *forward* KL(pi_ref || pi_theta)

``gradient: exact`` (default) makes every estimator follow the gradient of reverse KL: k1 and k3 are
multiplied by the differentiable importance weight pi_theta / mu (it matters even where it equals 1), k2 by
the same weight without gradient. ``gradient: plain`` is the bare estimator, as many code bases have it.
Source: spec/10 F; checked against the exact gradient of an enumerable policy in
tests/algorithms/test_kl.py.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from k3rl.algorithms.batch import Sum, TokenBatch
from k3rl.config.base import Config


class KlPenalty(Config):
    coefficient: Annotated[float, Field(gt=0)]
    """Weight of the penalty, per token."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Which estimator of KL(policy || reference)."""
    gradient: Literal["exact", "plain"] = "exact"
    """`exact` follows the gradient of reverse KL; `plain` differentiates the bare estimator."""


def kl_estimate(estimator: Literal["k1", "k2", "k3"], log_ratio_T: Tensor) -> Tensor:
    """[T] estimate of KL(p || q) from ``log_ratio_T`` = log p - log q at tokens sampled from p. Natural
    logs.
    """
    if estimator == "k1":
        return log_ratio_T
    if estimator == "k2":
        return 0.5 * log_ratio_T.square()
    return torch.expm1(-log_ratio_T) + log_ratio_T


def kl_loss(config: KlPenalty, batch: TokenBatch) -> tuple[Tensor, dict[str, Sum]]:
    """[T] loss terms, already multiplied by the coefficient, and metrics."""
    reference_T = batch.require("reference_logprobs_T", "a KL penalty needs the reference policy's log-probs")
    estimate_T = kl_estimate(config.estimator, batch.logprobs_T - reference_T)
    metrics = {f"kl_reference/{config.estimator}": Sum.over(estimate_T)}
    if config.gradient == "exact":
        weight_T = torch.exp(batch.log_ratio_T)
        estimate_T = estimate_T * (weight_T.detach() if config.estimator == "k2" else weight_T)
    return config.coefficient * estimate_T, metrics
