"""Quantile balancing of a router's selection-only bias, exact and by histograms. Source: spec/05 §6, report App. D.

Of n experts a token takes the k with the largest score + bias. With alpha the token's (k+1)-th largest biased score,
expert j is taken where s_j + b_j > alpha, that is where r_j = alpha - s_j < b_j. So the bias that gives expert j its
share of the tokens is the k/n quantile of r_j over the tokens:

    P(r_j < b_j) = k / n

Legend: T tokens, E experts, B bins.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def margins(scores_TE: Tensor, bias_E: Tensor, top_k: int) -> Tensor:
    """r_j = alpha - s_j of every token, [T, E]. Raises ValueError where every expert is always taken."""
    if top_k >= scores_TE.shape[-1]:
        raise ValueError(f"{top_k} of {scores_TE.shape[-1]} experts are taken: there is nothing to balance")
    alpha_T = (scores_TE + bias_E).topk(top_k + 1, -1).values[:, -1]
    return alpha_T[:, None] - scores_TE


def exact_quantile(margins_TE: Tensor, top_k: int) -> Tensor:
    """The ceil(T k / n)-th smallest margin of each expert, float64 [E]."""
    tokens, experts = margins_TE.shape
    rank = -(-tokens * top_k // experts)
    return margins_TE.kthvalue(rank, 0).values.double()


@dataclass(frozen=True)
class Bins:
    """Equal bins over [low, high): every margin under biases between b_min and b_max lies in (b_min - 1, b_max + 1),
    because scores lie in (0, 1)."""

    low: float
    high: float
    number: int

    @classmethod
    def around(cls, bias_E: Tensor, number: int) -> Bins:
        return cls(float(bias_E.min()) - 1.0, float(bias_E.max()) + 1.0, number)

    @property
    def width(self) -> float:
        return (self.high - self.low) / self.number

    def count(self, margins_TE: Tensor) -> Tensor:
        """How many tokens fall into each expert's bins, int64 [E, B]: integers, so that sums over micro-batches
        and ranks are the same in any order."""
        experts = margins_TE.shape[-1]
        bin_TE = ((margins_TE.double() - self.low) / self.width).long().clamp_(0, self.number - 1)
        flat = (bin_TE + torch.arange(experts, device=bin_TE.device) * self.number).flatten()
        counts = torch.zeros(experts * self.number, dtype=torch.int64, device=flat.device)
        return counts.scatter_add_(0, flat, torch.ones_like(flat)).view(experts, self.number)

    def quantile(self, counts_EB: Tensor, top_k: int) -> Tensor:
        """The k/n quantile of each expert by linear interpolation inside its bin, float64 [E]."""
        experts = counts_EB.shape[0]
        reached_EB = counts_EB.cumsum(-1)
        wanted_E1 = reached_EB[:, -1:].double() * top_k / experts
        bin_E1 = torch.searchsorted(reached_EB.double(), wanted_E1).clamp_(max=self.number - 1)
        inside_E1 = counts_EB.gather(1, bin_E1).double()
        below_E1 = reached_EB.gather(1, bin_E1).double() - inside_E1
        part_E1 = (wanted_E1 - below_E1) / inside_E1
        return (self.low + (bin_E1 + part_E1) * self.width).squeeze(1)


def next_bias(quantile_E: Tensor, bias_E: Tensor, ema: float = 0.0) -> Tensor:
    """Centred quantiles, mixed with the old bias where ``ema`` > 0. A common shift of all biases selects nothing."""
    centred_E = quantile_E - quantile_E.mean()
    return (ema * bias_E.double() + (1.0 - ema) * centred_E).to(bias_E.dtype)


def sign_step(load_E: Tensor, bias_E: Tensor, speed: float) -> Tensor:
    """Up for experts whose integer load is below the mean, down for those above."""
    total, experts = load_E.sum(), load_E.shape[0]
    return bias_E + speed * torch.sign(total - load_E * experts).to(bias_E.dtype)
