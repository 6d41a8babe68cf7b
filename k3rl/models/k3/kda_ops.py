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

from k3rl.models.context_parallel import state_before
from k3rl.models.k3.kda_fla import Backend, kda_fla, pick_backend
from k3rl.models.packing import Chunks, Layout

TILE = 16  # tokens whose decay factors share one reference; 16 steps of at most e^-5 stay in float32 and bfloat16
L2_EPS = 1e-6


def decay(z_THK: Tensor, A_log_H: Tensor, dt_bias_HK: Tensor, lower_bound: float) -> Tensor:
    """Log-decay g = lower_bound * sigmoid(exp(A_log) * (z + dt_bias)), float32, in (lower_bound, 0)."""
    wide = torch.float64 if z_THK.dtype == torch.float64 else torch.float32
    rate = A_log_H.to(wide).exp()[:, None]
    return lower_bound * torch.sigmoid(torch.addcmul(rate * dt_bias_HK.to(wide), rate, z_THK.to(wide)))


def l2_normalise(x: Tensor, length: float = 1.0) -> Tensor:
    """x scaled to this Euclidean length."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * (length * torch.rsqrt(norm.square() + L2_EPS))


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
    torch for all others, and where the sequence is shared with other ranks (``layout.shard``).
    """
    if layout.shard is None and pick_backend(q_THK, backend) == "fla":
        return kda_fla(q_THK, k_THK, v_THV, z_THK, b_TH, A_log_H, dt_bias_HK, lower_bound, layout, state_NHKV)
    wide = torch.float64 if q_THK.dtype == torch.float64 else torch.float32
    g = decay(z_THK, A_log_H, dt_bias_HK, lower_bound)
    beta = torch.sigmoid(b_TH.to(wide))
    q = l2_normalise(q_THK.to(wide), q_THK.shape[-1] ** -0.5)
    k = l2_normalise(k_THK.to(wide))
    v = v_THV.to(wide)
    if layout.decode:
        state = q.new_zeros(*q.shape, v.shape[-1]) if state_NHKV is None else state_NHKV
        out, state = kda_step(q, k, v, g, beta, state)
    else:
        if layout.shard is not None:
            scan = lambda values, first: kda_chunked(k, k, values, g, beta, layout, first)[1]  # noqa: E731
            state_NHKV = state_before(v, k.shape[-1], scan, layout.shard)
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
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The same by chunks of C tokens: everything within chunks at once, then one small step per chunk.

    With G the running sum of g in a chunk and S its first state, the corrected values U of a chunk solve

        (I + tril(diag(beta) A, -1)) U = diag(beta) (V - (K exp G) S),   A_ci = sum_d k_c exp(G_c - G_i) k_i

    and outputs are (Q exp G) S + tril(B) U, with B_ci like A but from q_c. ``chunk`` is a multiple of `TILE`: one tile
    by default on the CPU, where small products are cheap, four on a GPU, where launches are not.
    """
    C = chunk or (4 * TILE if q.is_cuda else TILE)
    H, V = q.shape[1], v.shape[-1]
    cut, index, slot, padding = layout.chunks_of_heads(C, H)

    def gather(x: Tensor) -> Tensor:  # [T, H, ...] -> [M * H, C, ...]
        return _Take.apply(x.flatten(0, 1), index, slot).unflatten(0, (-1, C))

    q_, k_, v_ = gather(q), gather(k), gather(v)
    # A padded token neither decays nor writes: log-decay 0 and beta 0.
    G = gather(g).masked_fill(padding, 0.0).cumsum(1)
    beta_ = gather(beta[..., None]).masked_fill(padding, 0.0)
    factors = _one_tile if C == TILE else _many_tiles
    A, B, q_start, k_start, k_end, decay_end = factors(q_, k_, k_ * beta_, G)
    # solve_triangular reads the strict lower part alone; a unit diagonal is implied.
    right = torch.cat([v_ * beta_, k_start], -1)
    U0, W = torch.linalg.solve_triangular(A, right, upper=False, unitriangular=True).split(
        [V, k.shape[-1]], -1
    )
    U, S_before, S_after = _across_chunks(U0, W, k_end, decay_end, cut, state, H)
    out = torch.baddbmm(q_start @ S_before, B, U)
    return _Take.apply(out.flatten(0, 1), slot, None).unflatten(0, (-1, H)), S_after


class _Take(torch.autograd.Function):
    """Rows by index, with a backward pass that takes rows too instead of adding them up one by one.

    ``inverse``: for each row of x the place where its gradient stands; rows taken elsewhere as padding have none.
    None: ``index`` names each row at most once.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor | None) -> Tensor:
        ctx.save_for_backward(index, inverse)
        ctx.rows = x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        index, inverse = ctx.saved_tensors
        if inverse is not None:
            return gradient.index_select(0, inverse), None, None
        zeros = gradient.new_zeros(ctx.rows, *gradient.shape[1:])
        return zeros.index_copy_(0, index, gradient), None, None


Factors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _one_tile(q: Tensor, k: Tensor, kb: Tensor, G: Tensor) -> Factors:
    """(A, tril B, Q exp G, beta K exp G, K exp(G_end - G), exp G_end) of chunks that are one tile; kb = beta k.

    exp(G_c - G_i) is a row and a column factor around the tile's middle, so that no exponent passes half a tile's worth
    of decay upwards (5 * 8 = 40), where a whole one's would overflow. All other factors follow from these two.
    """
    C = q.shape[1]
    middle = G[:, C // 2 - 1, None]
    end = G[:, -1, None]
    from_middle = G - middle
    rows = (torch.stack([kb, q], 1) * from_middle.exp()[:, None]).flatten(1, 2)
    columns = k * (-from_middle).exp()
    A, B = (rows @ columns.mT).split(C, 1)
    k_start, q_start = (rows * middle.exp()).split(C, 1)
    return A, B.tril(), q_start, k_start, columns * (end - middle).exp(), end.squeeze(1).exp()


def _many_tiles(q: Tensor, k: Tensor, kb: Tensor, G: Tensor) -> Factors:
    """The same for chunks of several tiles: each tile's rows meet all columns before its end, around its own middle."""
    C = q.shape[1]
    rows_A, rows_B = [], []
    for start in range(0, C, TILE):
        stop = min(start + TILE, C)
        middle = G[:, (start + stop) // 2 - 1, None]
        up = (G[:, start:stop] - middle).exp()
        columns = k[:, :stop] * (middle - G[:, :stop]).exp()
        both = torch.cat([kb[:, start:stop] * up, q[:, start:stop] * up], 1) @ columns.mT
        both = F.pad(both, (0, C - stop))
        rows_A.append(both[:, : stop - start])
        rows_B.append(both[:, stop - start :])
    eG = G.exp()
    k_end = k * (G[:, -1:] - G).exp()
    return torch.cat(rows_A, 1), torch.cat(rows_B, 1).tril(), q * eG, kb * eG, k_end, eG[:, -1]


def _across_chunks(
    U0: Tensor, W: Tensor, k_end: Tensor, decay_end: Tensor, cut: Chunks, state: Tensor | None, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Carry the state from chunk to chunk. All sequences that have a chunk j move together.

    Returns corrected values U [M * H, C, V], the state before each chunk [M * H, K, V], and the last states
    [N, H, K, V].
    """
    V, K = U0.shape[-1], W.shape[-1]
    N = cut.order_N.shape[0]
    if state is None:
        S = U0.new_zeros(N * heads, K, V)
    else:
        S = state.to(U0.dtype).index_select(0, cut.order_N).flatten(0, 1)
    sizes = [count * heads for count in cut.counts]
    # split, not slices: the gradient of each slice would be a whole zero-filled tensor
    parts = (x.split(sizes) for x in (U0, W, k_end.mT, decay_end[..., None]))
    before, corrected, finished = [], [], []
    for size, U0_j, W_j, k_end_j, decay_j in zip(sizes, *parts, strict=True):
        if size < S.shape[0]:
            S, ended = S.split([size, S.shape[0] - size])
            finished.append(ended)
        U = torch.baddbmm(U0_j, W_j, S, alpha=-1)
        before.append(S)
        corrected.append(U)
        S = torch.baddbmm(S * decay_j, k_end_j, U)
    finished.append(S)
    last = torch.cat(finished[::-1]).unflatten(0, (N, heads)).index_select(0, torch.argsort(cut.order_N))
    return torch.cat(corrected), torch.cat(before), last
