"""Small parts of K3's decoder: norm, SiTU, attention residuals. Source: spec/05 §5, §6.

Legend: T tokens, D hidden width, J values an attention residual mixes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype, device=device))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def situ_glu(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """beta tanh(g/beta) sigmoid(g) * linear_beta tanh(u/linear_beta), inside float32; bounded by beta * linear_beta."""
    dtype = gate.dtype
    if dtype in (torch.bfloat16, torch.float16):
        gate, up = gate.float(), up.float()
    capped = torch.tanh(gate * (1 / beta)) * torch.sigmoid(gate)
    return (capped * torch.tanh(up * (1 / linear_beta)) * (beta * linear_beta)).to(dtype)


class Values:
    """Finished values of attention residuals: block sums [T, D], kept with their inverse RMS.

    A block is normalised once, when it closes, whatever number of sublayers looks at it later. With ``readers``, the
    residuals that will read each set of finished blocks, they are all served from one pass over the blocks, when the
    last of these closes (the inference form's first phase).
    """

    def __init__(self, eps: float, readers: list[list[AttnRes]] | None = None) -> None:
        self.eps = eps
        self.sums: list[Tensor] = []
        self.inverse_rms: list[Tensor] = []
        self.readers = readers
        self.ahead: dict[AttnRes, tuple[Tensor, Tensor, Tensor]] = {}

    def append(self, value_TD: Tensor) -> None:
        self.sums.append(value_TD)
        self.inverse_rms.append(inverse_rms(value_TD, self.eps))
        if self.readers is not None and len(self.sums) <= len(self.readers):
            group = self.readers[len(self.sums) - 1]
            phase = attn_res_phase_one(self, torch.stack([reader.query() for reader in group]))
            self.ahead = {reader: tuple(x[i] for x in phase) for i, reader in enumerate(group)}  # type: ignore[misc]


def inverse_rms(value_TD: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(wide(value_TD).square().mean(-1) + eps)


def wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class AttnRes(nn.Module):
    """Softmax attention of a learnt pseudo-query over earlier block sums and the running sum.

    score_j = <RMS(V_j), w_norm * w_proj>; result = sum_j softmax(score)_j V_j, in float32. Parameters live in the
    parent under the released names, ``<name>_norm`` and ``<name>_proj``.
    """

    def __init__(self, width: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.norm = RMSNorm(width, eps, dtype, device)
        self.proj = nn.Linear(width, 1, bias=False, dtype=dtype, device=device)

    def query(self) -> Tensor:
        return wide(self.norm.weight) * wide(self.proj.weight[0])

    def forward(self, values: Values, running_TD: Tensor | None) -> Tensor:
        query_D = self.query()
        if self in values.ahead and running_TD is not None:
            return attn_res_phase_two(values.ahead[self], query_D, running_TD, values.eps)
        sums, inverse = list(values.sums), list(values.inverse_rms)
        if running_TD is not None:
            sums.append(running_TD)
            inverse.append(inverse_rms(running_TD, values.eps))
        scores_TJ = torch.stack([(wide(s) @ query_D) * i for s, i in zip(sums, inverse, strict=True)], -1)
        weights_TJ = scores_TJ.softmax(-1)
        mixed = weights_TJ[:, :1] * wide(sums[0])
        for j in range(1, len(sums)):
            mixed = torch.addcmul(mixed, weights_TJ[:, j : j + 1], wide(sums[j]))
        return mixed.to(sums[0].dtype)


def attn_res_phase_one(values: Values, queries_QD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """First phase of the inference form: all pseudo-queries of a block against all finished blocks at once.

    Returns, per query: running maximum [Q, T], sum of exponentials [Q, T], weighted sum [Q, T, D], all float32.
    """
    stack_JTD = torch.stack([wide(s) for s in values.sums])
    scores_QJT = torch.einsum("qd,jtd->qjt", queries_QD, stack_JTD) * torch.stack(values.inverse_rms)
    peak_QT = scores_QJT.amax(1)
    weights_QJT = (scores_QJT - peak_QT[:, None]).exp()
    return peak_QT, weights_QJT.sum(1), torch.einsum("qjt,jtd->qtd", weights_QJT, stack_JTD)


def attn_res_phase_two(
    phase_one: tuple[Tensor, Tensor, Tensor], query_D: Tensor, running_TD: Tensor, eps: float
) -> Tensor:
    """Second phase: merge one query's first phase with the running sum by online softmax. Returns [T, D]."""
    peak_T, total_T, mixed_TD = phase_one
    score_T = (wide(running_TD) @ query_D) * inverse_rms(running_TD, eps)
    new_peak_T = torch.maximum(peak_T, score_T)
    old, own = (peak_T - new_peak_T).exp(), (score_T - new_peak_T).exp()
    merged = mixed_TD * old[:, None] + own[:, None] * wide(running_TD)
    return (merged / (total_T * old + own)[:, None]).to(running_TD.dtype)


def attn_res_full(values_JTD: Tensor, query_D: Tensor, eps: float) -> Tensor:
    """The definition, over all J values stacked: the reference of the other two forms. Returns [T, D]."""
    values = wide(values_JTD)
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    weights_JT = (normed @ query_D).softmax(0)
    return (weights_JT[..., None] * values).sum(0).to(values_JTD.dtype)
