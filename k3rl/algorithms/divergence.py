"""Distillation by whole next-token distributions, or their K likeliest tokens, instead of sampled tokens alone.

With student p and teacher q at one position, over the ids that the teacher gives:

    reverse_kl   sum_v  p log(p/q) - p + q                                     KL(p || q)
    forward_kl   sum_v  q log(q/p) - q + p                                     KL(q || p)
    jsd          beta KL(q || m) + (1 - beta) KL(p || m),  m = beta q + (1 - beta) p     (Agarwal et al. 2024, GKD)

Over the whole vocabulary the terms -p + q add up to zero. Over the teacher's top K they make p = q stationary, where
the truncated sums alone would push the student's mass out of the K (spec/03 §2, M's top-k form). In jsd they cancel.

Suffixes: T tokens, K ids.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from k3rl.algorithms.batch import Sum, TokenBatch, TokenLoss
from k3rl.algorithms.objective import ObjectiveConfig, objective

Kind = Literal["reverse_kl", "forward_kl", "jsd"]


class DivergenceConfig(ObjectiveConfig):
    """Needs a teacher's log-probs of K ids for every trained token; `token_advantages` are the tokens' weights."""

    type: Literal["divergence"] = "divergence"
    divergence: Kind = "reverse_kl"
    """What is minimised, at every token that the student sampled."""
    beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """jsd: the teacher's share of the mixture."""


@objective("divergence")
def divergence_loss(batch: TokenBatch, config: DivergenceConfig) -> TokenLoss:
    """[T] losses: the divergence times the token's weight. No importance weights: given the prefix it is exact."""
    student_TK = batch.require("student_TK", "a divergence needs the policy's log-probs of the teacher's ids")
    teacher_TK = batch.require("teacher_TK", "a divergence needs the teacher's log-probs")
    value_T = divergence(student_TK, teacher_TK, config.divergence, config.beta)
    mass_T = teacher_TK.exp().sum(1)
    metrics = {
        f"divergence/{config.divergence}": Sum.over(value_T),
        "divergence/teacher_mass": Sum.over(mass_T),
    }
    return TokenLoss(value_T * batch.advantages_T, metrics)


def divergence(student_TK: Tensor, teacher_TK: Tensor, kind: Kind, beta: float = 0.5) -> Tensor:
    """[T], in nats, from natural log-probs; gradient through the student alone is the caller's to arrange."""
    p_TK, q_TK = student_TK.exp(), teacher_TK.exp()
    if kind == "reverse_kl":
        return (p_TK * (student_TK - teacher_TK) - p_TK + q_TK).sum(1)
    if kind == "forward_kl":
        return (q_TK * (teacher_TK - student_TK) - q_TK + p_TK).sum(1)
    log_beta, log_rest = torch.log(student_TK.new_tensor([beta, 1 - beta]))
    mix_TK = torch.logaddexp(teacher_TK + log_beta, student_TK + log_rest)
    return (beta * q_TK * (teacher_TK - mix_TK) + (1 - beta) * p_TK * (student_TK - mix_TK)).sum(1)
