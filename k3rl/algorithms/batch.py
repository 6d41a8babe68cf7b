"""What an objective reads and what it returns.

Suffixes: T tokens, S sequences. Every per-token field of a `TokenBatch` has the same length, and
``field[i]`` belongs to token i. Tokens without loss never reach an objective: `TokenBatch.selected` takes
them out by index, so that a NaN in a masked position can change neither loss nor gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Tokens of one micro-batch, sequences back to back.

    ``sequence_tokens_T`` and ``group_tokens_T`` count the trained tokens of the token's *whole* sequence
    and of its whole group, over all micro-batches and ranks: the normalisations need them, and they can't
    be counted here.
    """

    logprobs_T: Tensor  # float, with gradient: log pi_theta
    behaviour_logprobs_T: Tensor  # float: log-prob at sampling time, as the engine stated it
    advantages_T: Tensor  # float
    mask_T: Tensor  # bool: tokens that carry loss
    sequence_T: Tensor  # int64: index of the token's sequence
    sequence_tokens_T: Tensor  # int64
    group_tokens_T: Tensor  # int64
    staleness_T: Tensor | None = None  # int64: trainer's version minus the token's
    old_logprobs_T: Tensor | None = (
        None  # float: the trainer's log-prob before the first update on this batch
    )
    reference_logprobs_T: Tensor | None = None  # float: of the frozen reference policy
    entropy_T: Tensor | None = None  # float, with gradient where an entropy bonus is asked
    student_TK: Tensor | None = None  # float, with gradient: log pi_theta of the K ids that a teacher gives
    teacher_TK: Tensor | None = None  # float: the teacher's log-probs of these ids

    def __post_init__(self) -> None:
        length = len(self.logprobs_T)
        for f in fields(self):
            value = getattr(self, f.name)
            shape = (
                (length,)
                if f.name.endswith("_T")
                else (length, *value.shape[1:])
                if value is not None
                else ()
            )
            if value is not None and tuple(value.shape) != shape:
                raise ValueError(f"{f.name} has shape {tuple(value.shape)}, logprobs_T has {length} tokens")
        if self.mask_T.dtype is not torch.bool:
            raise ValueError(f"mask_T must be bool, got {self.mask_T.dtype}")

    def __len__(self) -> int:
        return len(self.logprobs_T)

    def selected(self) -> TokenBatch:
        """Only the tokens that carry loss, by index. Raises `ValueError` where one of their inputs isn't
        finite.
        """
        if bool(self.mask_T.all()):
            picked = self
        else:
            index = self.mask_T.nonzero().squeeze(1)
            changes = {f.name: v[index] for f in fields(self) if (v := getattr(self, f.name)) is not None}
            picked = replace(self, **changes)
        for name in ("behaviour_logprobs_T", "advantages_T", "old_logprobs_T", "reference_logprobs_T"):
            value = getattr(picked, name)
            if value is not None and not bool(torch.isfinite(value).all()):
                where = int((~torch.isfinite(value)).nonzero()[0])
                raise ValueError(
                    f"{name} is {value[where].item()} at a trained token of sequence "
                    f"{int(picked.sequence_T[where])}"
                )
        return picked

    @property
    def log_ratio_T(self) -> Tensor:
        """log pi_theta minus behaviour log-prob, by token, with gradient."""
        return self.logprobs_T - self.behaviour_logprobs_T

    def require(self, name: str, why: str) -> Tensor:
        """An optional field; `ValueError` where it is missing: nothing is filled in."""
        value: Tensor | None = getattr(self, name)
        if value is None:
            raise ValueError(f"{name} is missing, and {why}")
        return value


@dataclass(frozen=True, slots=True)
class Sum:
    """A metric as the sum of its parts and the weight of the parts, so that micro-batches and ranks add
    up.
    """

    total: Tensor
    weight: Tensor

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.total + other.total, self.weight + other.weight)

    @property
    def mean(self) -> float:
        return float(self.total / self.weight) if float(self.weight) > 0 else float("nan")

    @staticmethod
    def over(values: Tensor) -> Sum:
        """Of one value per token (bool counts)."""
        detached = values.detach().double()
        return Sum(
            detached.sum(), torch.tensor(float(detached.numel()), dtype=torch.float64, device=values.device)
        )


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """What an objective gives back: one loss value per token it was given, before any normalisation."""

    loss_T: Tensor
    metrics: dict[str, Sum] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LossOutput:
    """``loss_sum`` / (sum of ``denominator`` over all micro-batches and ranks) is the loss of the whole
    batch.

    ``denominator`` is ``token_count`` under token normalisation; see `k3rl.algorithms.normalisation` for
    the others.
    """

    loss_sum: Tensor
    token_count: int
    denominator: float
    metrics: dict[str, Sum]


def segment_sum(values_T: Tensor, index_T: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of ``values_T`` by ``index_T``, for each index that occurs, and every token's place among them.

    Returns ``(sums_S, place_T)``, so that ``sums_S[place_T]`` broadcasts back.
    """
    present_S, place_T = torch.unique(index_T, return_inverse=True)
    zeros = torch.zeros(len(present_S), dtype=values_T.dtype, device=values_T.device)
    return zeros.index_add(0, place_T, values_T), place_T
