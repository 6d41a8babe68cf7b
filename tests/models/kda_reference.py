"""KDA written as its definition says, in float64, one token and one head at a time: what all forms are held to."""

from __future__ import annotations

import torch
from torch import Tensor


def naive_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lengths: list[int], state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """S_t = (I - beta k k^T) Diag(exp g) S_{t-1} + beta k v^T and o_t = S_t^T q_t for each sequence and head.

    q, k, g [T, H, K]; v [T, H, V]; beta [T, H]; state [N, H, K, V]. Everything is computed in float64.
    """
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    heads, width = q.shape[1:]
    eye = torch.eye(width, dtype=torch.float64)
    outs: list[Tensor] = []
    lasts: list[Tensor] = []
    start = 0
    for n, length in enumerate(lengths):
        per_head: list[list[Tensor]] = []
        ends: list[Tensor] = []
        for h in range(heads):
            S = (
                torch.zeros(width, v.shape[-1], dtype=torch.float64)
                if state is None
                else state[n, h].double()
            )
            rows = []
            for t in range(start, start + length):
                forget = (eye - beta[t, h] * torch.outer(k[t, h], k[t, h])) @ torch.diag(g[t, h].exp())
                S = forget @ S + beta[t, h] * torch.outer(k[t, h], v[t, h])
                rows.append(S.T @ q[t, h])
            per_head.append(rows)
            ends.append(S)
        outs += [torch.stack([per_head[h][t] for h in range(heads)]) for t in range(length)]
        lasts.append(torch.stack(ends))
        start += length
    return torch.stack(outs), torch.stack(lasts)


def relative(a: Tensor, b: Tensor) -> float:
    """Norm of the difference over the norm of ``b``."""
    a, b = a.detach(), b.detach()
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))
