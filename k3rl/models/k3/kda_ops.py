"""Kimi Delta Attention as functions: gate, one step, chunks, and the choice of kernel by device.

Source: spec/05 §3. For one head, with S in R^{KxV} float32 and log-decay g <= 0 per key channel:

    S <- Diag(exp g_t) S;   S <- S + beta_t k_t (v_t - S^T k_t)^T;   o_t = S^T q_t

Legend: T tokens packed, N sequences, H heads, K key width, V value width, M chunks, C tokens a chunk, R tile rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from k3rl.models.k3.kda_fla import Backend, kda_fla, pick_backend
from k3rl.models.packing import Layout

TILE = 16  # tokens whose decay factors share one reference; 16 steps of at most e^-5 stay in float32 and bfloat16
CHUNK = 32
L2_EPS = 1e-6


def decay(z_THK: Tensor, A_log_H: Tensor, dt_bias_HK: Tensor, lower_bound: float) -> Tensor:
    """Log-decay g = lower_bound * sigmoid(exp(A_log) * (z + dt_bias)), float32, in (lower_bound, 0)."""
    wide = torch.float64 if z_THK.dtype == torch.float64 else torch.float32
    rate = A_log_H.to(wide).exp()[:, None]
    return lower_bound * torch.sigmoid(rate * (z_THK.to(wide) + dt_bias_HK.to(wide)))


def l2_normalise(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def kda(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    z_THK: Tensor,
    b_TH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    lower_bound: float,
    layout: Layout,
    state_NHKV: Tensor | None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """KDA over packed sequences from raw projections: normalises q and k, makes the decay from z and beta from b.

    ``state_NHKV`` is each sequence's float32 state (zeros where None). Returns outputs [T, H, V] in v's dtype and the
    states after the last token, float32 [N, H, K, V]. ``auto`` takes fla's kernels for half-precision CUDA tensors and
    torch for all others.
    """
    if pick_backend(q_THK, backend) == "fla":
        return kda_fla(q_THK, k_THK, v_THV, z_THK, b_TH, A_log_H, dt_bias_HK, lower_bound, layout, state_NHKV)
    wide = torch.float64 if q_THK.dtype == torch.float64 else torch.float32
    g = decay(z_THK, A_log_H, dt_bias_HK, lower_bound)
    beta = torch.sigmoid(b_TH.to(wide))
    q = l2_normalise(q_THK.to(wide)) * q_THK.shape[-1] ** -0.5
    k = l2_normalise(k_THK.to(wide))
    v = v_THV.to(wide)
    if layout.decode:
        state = q.new_zeros(*q.shape, v.shape[-1]) if state_NHKV is None else state_NHKV
        out, state = kda_step(q, k, v, g, beta, state)
    else:
        out, state = kda_chunked(q, k, v, g, beta, layout, state_NHKV)
    return out.to(v_THV.dtype), state


def kda_step(
    q_NHK: Tensor, k_NHK: Tensor, v_NHV: Tensor, g_NHK: Tensor, beta_NH: Tensor, state_NHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of every sequence. The decayed state is read once for both k and q: with e = beta (v - S^T k),
    the output S'^T q of the new state S' = S + k e^T is S^T q + <k, q> e."""
    state = state_NHKV * g_NHK.exp()[..., None]
    read_k, read_q = (torch.stack([k_NHK, q_NHK], -2) @ state).unbind(-2)
    error = (v_NHV - read_k) * beta_NH[..., None]
    out = torch.addcmul(read_q, (k_NHK * q_NHK).sum(-1, keepdim=True), error)
    return out, torch.addcmul(state, k_NHK[..., None], error[..., None, :])


def kda_recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layout: Layout, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Token by token over packed sequences [T, H, ...]: slow, and the reference of the other two."""
    N, H, K, V = layout.num_sequences, *q.shape[1:], v.shape[-1]
    states = list((q.new_zeros(N, H, K, V) if state is None else state).unbind(0))
    outs = []
    for n in range(N):
        for t in range(int(layout.cu[n]), int(layout.cu[n + 1])):
            out, states[n] = kda_step(q[t], k[t], v[t], g[t], beta[t], states[n])
            outs.append(out)
    return torch.stack(outs), torch.stack(states)


def kda_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    layout: Layout,
    state: Tensor | None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """The same by chunks of C tokens: everything within chunks at once, then one small step per chunk.

    With G the running sum of g in a chunk and S its first state, the corrected values U of a chunk solve

        (I + tril(diag(beta) A)) U = diag(beta) (V - (K exp G) S),   A_ci = sum_d k_c exp(G_c - G_i) k_i,  i < c

    and outputs are (Q exp G) S + tril(B) U, with B_ci like A but from q_c, for i <= c.
    """
    cut = layout.chunks(chunk)
    invalid = ~cut.valid_MC
    flat = cut.index_MC.reshape(-1)

    def gather(x: Tensor) -> Tensor:  # [T, H, ...] -> [M, H, C, ...]
        return x.index_select(0, flat).unflatten(0, cut.index_MC.shape).transpose(1, 2)

    q_, k_, v_ = gather(q), gather(k), gather(v)
    # A padded token neither decays nor writes: log-decay 0 and beta 0.
    g_ = gather(g).masked_fill(invalid[:, None, :, None], 0.0)
    beta_ = gather(beta).masked_fill(invalid[:, None], 0.0)[..., None]
    G = g_.cumsum(2)
    A, B = _within_chunk(q_, k_, G)
    eG = G.exp()
    # Unit diagonal is implied by unitriangular, and the strict part is all that is read.
    solved = torch.linalg.solve_triangular(
        A * beta_, torch.cat([v_ * beta_, k_ * eG * beta_], -1), upper=False, unitriangular=True
    )
    U0, W = solved.split([v.shape[-1], k.shape[-1]], -1)
    U, S_before, S_after = _across_chunks(U0, W, k_ * (G[:, :, -1:] - G).exp(), eG[:, :, -1], cut, state)
    out = (q_ * eG) @ S_before + B @ U
    out_T = out.transpose(1, 2).flatten(0, 1).index_select(0, cut.slot_T)
    return out_T, S_after


def _within_chunk(q: Tensor, k: Tensor, G: Tensor) -> tuple[Tensor, Tensor]:
    """Decayed products of a chunk's keys (strictly lower) and of its queries with its keys (lower), [M, H, C, C].

    exp(G_c - G_i) is split into a row and a column factor around the middle of the row's tile, so that no exponent
    passes half a tile's worth of decay upwards (5 * 8 = 40), where a whole chunk's would overflow.
    """
    C = k.shape[2]
    rows_A, rows_B = [], []
    for start in range(0, C, TILE):
        end = min(start + TILE, C)
        middle = G[:, :, (start + end) // 2 - 1, None]
        up = (G[:, :, start:end] - middle).exp()
        columns = (k[:, :, :end] * (middle - G[:, :, :end]).exp()).transpose(-1, -2)
        both = torch.cat([k[:, :, start:end] * up, q[:, :, start:end] * up], 2) @ columns
        both = F.pad(both, (0, C - end))
        rows_A.append(both[:, :, : end - start])
        rows_B.append(both[:, :, end - start :])
    A, B = (r[0] if len(r) == 1 else torch.cat(r, 2) for r in (rows_A, rows_B))
    return A.tril(-1), B.tril()


def _across_chunks(
    U0: Tensor, W: Tensor, k_end: Tensor, decay_end: Tensor, cut: Any, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Carry the state from chunk to chunk. All sequences that have a chunk j move together.

    Returns corrected values U [M, H, C, V], the state before each chunk [M, H, K, V], and the last states [N, H, K, V].
    """
    H, V, K = U0.shape[1], U0.shape[3], W.shape[3]
    N = cut.order_N.shape[0]
    S = U0.new_zeros(N, H, K, V) if state is None else state.to(U0.dtype).index_select(0, cut.order_N)
    # split, not slices: the gradient of each slice would be a whole zero-filled tensor
    parts = (x.split(cut.counts) for x in (U0, W, k_end.transpose(-1, -2), decay_end[..., None]))
    before, corrected, finished = [], [], []
    for count, U0_j, W_j, k_end_j, decay_j in zip(cut.counts, *parts, strict=True):
        if count < S.shape[0]:
            S, ended = S.split([count, S.shape[0] - count])
            finished.append(ended)
        U = U0_j - W_j @ S
        before.append(S)
        corrected.append(U)
        S = S * decay_j + k_end_j @ U
    finished.append(S)
    last = torch.cat(finished[::-1]).index_select(0, torch.argsort(cut.order_N))
    return torch.cat(corrected), torch.cat(before), last
