"""Triton kernels of a decode step on a GPU, where a layer's small operations cost more than its matrices.

Each computes in float32 and rounds where the model's own modules round, so that the difference to the trainer's
forward is that of one rounding here and there. All shapes are static for a given batch size and cache width: they
can be captured in a CUDA graph.

Legend: N rows, S slots, L cache width, H query heads, G key heads, K head width, D hidden width, I intermediate.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_L = 64
_WARPS_WORTH = 4 * 132  # programs that fill a large GPU a few times over


@triton.jit
def _rms_norm(x_ptr, add_ptr, weight_ptr, sum_ptr, out_ptr, eps, D, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    ok = at < D
    x = tl.load(x_ptr + row * D + at, mask=ok, other=0.0)
    if ADD:
        x = (x.to(tl.float32) + tl.load(add_ptr + row * D + at, mask=ok, other=0.0).to(tl.float32)).to(
            x.dtype
        )
        tl.store(sum_ptr + row * D + at, x, mask=ok)
    x32 = x.to(tl.float32)
    scaled = (x32 * tl.rsqrt(tl.sum(x32 * x32) / D + eps)).to(x.dtype)
    weight = tl.load(weight_ptr + at, mask=ok, other=0.0)
    tl.store(out_ptr + row * D + at, (scaled.to(tl.float32) * weight.to(tl.float32)).to(x.dtype), mask=ok)


def rms_norm(
    x_ND: Tensor, weight_D: Tensor, eps: float, add_ND: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(normalised, x + add), both [N, D]; without ``add`` the second is x itself."""
    rows, width = x_ND.shape
    out_ND = torch.empty_like(x_ND)
    sum_ND = x_ND if add_ND is None else torch.empty_like(x_ND)
    block = triton.next_power_of_2(width)
    _rms_norm[(rows,)](
        x_ND, x_ND if add_ND is None else add_ND, weight_D, sum_ND, out_ND, eps, width,
        ADD=add_ND is not None, BLOCK=block, num_warps=min(16, max(1, block // 256)),
    )  # fmt: skip
    return out_ND, sum_ND


@triton.jit
def _rope_store(
    qkv_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, q_ptr, held_k_ptr, held_v_ptr, slots_ptr, lengths_ptr,
    eps, L, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    half = tl.arange(0, K // 2)
    base = qkv_ptr + (row * (H + 2 * G) + head) * K
    first, second = tl.load(base + half), tl.load(base + K // 2 + half)
    dtype = first.dtype
    slot, place = tl.load(slots_ptr + row), tl.load(lengths_ptr + row)
    if head >= H + G:
        into = held_v_ptr + ((slot * L + place) * G + head - H - G) * K
        tl.store(into + half, first)
        tl.store(into + K // 2 + half, second)
        return
    if NORM:
        a, b = first.to(tl.float32), second.to(tl.float32)
        scale = tl.rsqrt((tl.sum(a * a) + tl.sum(b * b)) / K + eps)
        weight_ptr = q_weight_ptr if head < H else k_weight_ptr
        wa, wb = tl.load(weight_ptr + half), tl.load(weight_ptr + K // 2 + half)
        first = ((a * scale).to(dtype).to(tl.float32) * wa.to(tl.float32)).to(dtype)
        second = ((b * scale).to(dtype).to(tl.float32) * wb.to(tl.float32)).to(dtype)
    a, b = first.to(tl.float32), second.to(tl.float32)
    cos_a, cos_b = tl.load(cos_ptr + row * K + half), tl.load(cos_ptr + row * K + K // 2 + half)
    sin_a, sin_b = tl.load(sin_ptr + row * K + half), tl.load(sin_ptr + row * K + K // 2 + half)
    turned_a = (a * cos_a.to(tl.float32) - b * sin_a.to(tl.float32)).to(dtype)
    turned_b = (b * cos_b.to(tl.float32) + a * sin_b.to(tl.float32)).to(dtype)
    if head < H:
        into = q_ptr + (row * H + head) * K
    else:
        into = held_k_ptr + ((slot * L + place) * G + head - H) * K
    tl.store(into + half, turned_a)
    tl.store(into + K // 2 + half, turned_b)


def rope_store(
    qkv_NM: Tensor, cos_NK: Tensor, sin_NK: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float,
    held_k: Tensor, held_v: Tensor, slots_N: Tensor, lengths_N: Tensor, heads: int,
) -> Tensor:  # fmt: skip
    """Normalise queries and keys per head (where the model does), turn them, and store keys and values in the
    cache [S, L, G, K] at each row's slot and length. Returns the queries [N, H, K]."""
    rows, (_, width, groups, head_dim) = qkv_NM.shape[0], held_k.shape
    q_NHK = torch.empty(rows, heads, head_dim, dtype=qkv_NM.dtype, device=qkv_NM.device)
    q_weight, k_weight = norms if norms is not None else (qkv_NM, qkv_NM)
    _rope_store[(rows, heads + 2 * groups)](
        qkv_NM, cos_NK, sin_NK, q_weight, k_weight, q_NHK, held_k, held_v, slots_N, lengths_N, eps, width,
        H=heads, G=groups, K=head_dim, NORM=norms is not None, num_warps=1,
    )  # fmt: skip
    return q_NHK


@triton.jit
def _attend(
    q_ptr, held_k_ptr, held_v_ptr, slots_ptr, lengths_ptr, out_ptr, part_ptr, peak_ptr, mass_ptr, scale, L, window,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, WINDOW: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    row, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    size: tl.constexpr = H // G
    slot = tl.load(slots_ptr + row).to(tl.int64)
    total = tl.load(lengths_ptr + row).to(tl.int32) + 1
    start = 0
    if WINDOW:
        start = tl.maximum(total - window, 0)
    share = tl.cdiv(tl.cdiv(total - start, SPLITS), BLOCK) * BLOCK
    begin = start + split * share
    end = tl.minimum(begin + share, total)
    heads, at = tl.arange(0, ROWS), tl.arange(0, K)
    q_at = (row * H + group * size + heads[:, None]) * K + at[None, :]
    q = tl.load(q_ptr + q_at, mask=heads[:, None] < size, other=0.0)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, K], tl.float32)
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    for block in range(begin, end, BLOCK):
        place = block + tl.arange(0, BLOCK)
        ok = place < end
        entry = ((slot * L + place[:, None]) * G + group) * K + at[None, :]
        k = tl.load(held_k_ptr + entry, mask=ok[:, None], other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision=precision) * scale
        score = tl.where(ok[None, :], score, float("-inf"))
        top = tl.maximum(peak, tl.max(score, 1))
        weight = tl.exp(score - top[:, None])
        shrink = tl.exp(peak - top)
        mass = mass * shrink + tl.sum(weight, 1)
        v = tl.load(held_v_ptr + entry, mask=ok[:, None], other=0.0)
        out = out * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=precision)
        peak = top
    if SPLITS == 1:
        tl.store(out_ptr + q_at, (out / mass[:, None]).to(q.dtype), mask=heads[:, None] < size)
    else:
        part = ((row * G + group) * SPLITS + split) * ROWS + heads
        tl.store(part_ptr + part[:, None] * K + at[None, :], out)
        tl.store(peak_ptr + part, peak)
        tl.store(mass_ptr + part, mass)


@triton.jit
def _combine(
    part_ptr, peak_ptr, mass_ptr, out_ptr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    size: tl.constexpr = H // G
    first = (row * G + head // size) * SPLITS * ROWS + head % size
    at = tl.arange(0, K)
    peak = float("-inf")
    mass = 0.0
    out = tl.zeros([K], tl.float32)
    for split in range(SPLITS):
        part = first + split * ROWS
        part_peak = tl.load(peak_ptr + part)
        top = tl.maximum(peak, part_peak)
        old, new = tl.exp(peak - top), tl.exp(part_peak - top)
        out = out * old + tl.load(part_ptr + part * K + at) * new
        mass = mass * old + tl.load(mass_ptr + part) * new
        peak = top
    tl.store(out_ptr + (row * H + head) * K + at, (out / mass).to(out_ptr.dtype.element_ty))


def decode_attention(
    q_NHK: Tensor, held_k: Tensor, held_v: Tensor, slots_N: Tensor, lengths_N: Tensor, scale: float,
    window: int | None = None,
) -> Tensor:  # fmt: skip
    """Each row's query against the first ``lengths + 1`` tokens of its slot of the cache [S, L, G, K], read in
    place: no byte beyond them, and each byte once for all query heads of its group. Returns [N, H, K]."""
    (rows, heads, head_dim), (_, width, groups, _) = q_NHK.shape, held_k.shape
    out_NHK = torch.empty_like(q_NHK)
    padded = max(16, triton.next_power_of_2(heads // groups))
    reach = min(width, window or width)
    splits = max(1, min(-(-reach // (4 * BLOCK_L)), _WARPS_WORTH // (rows * groups)))
    part = peak = mass = out_NHK
    if splits > 1:
        shape = (rows, groups, splits, padded)
        part = torch.empty(*shape, head_dim, dtype=torch.float32, device=q_NHK.device)
        peak, mass = (torch.empty(shape, dtype=torch.float32, device=q_NHK.device) for _ in range(2))
    _attend[(rows, groups, splits)](
        q_NHK, held_k, held_v, slots_N, lengths_N, out_NHK, part, peak, mass, scale, width, window or 0,
        H=heads, G=groups, K=head_dim, ROWS=padded, BLOCK=BLOCK_L, SPLITS=splits, WINDOW=window is not None,
        EXACT=q_NHK.dtype == torch.float32, num_warps=4, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        _combine[(rows, heads)](
            part, peak, mass, out_NHK, H=heads, G=groups, K=head_dim, ROWS=padded, SPLITS=splits, num_warps=1
        )
    return out_NHK


@triton.jit
def _silu_mul(both_ptr, out_ptr, I, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = at < I
    gate = tl.load(both_ptr + row * 2 * I + at, mask=ok, other=0.0)
    up = tl.load(both_ptr + row * 2 * I + I + at, mask=ok, other=0.0)
    gate32 = gate.to(tl.float32)
    silu = (gate32 / (1.0 + tl.exp(-gate32))).to(gate.dtype)
    tl.store(out_ptr + row * I + at, (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=ok)


def silu_mul(both_NI: Tensor) -> Tensor:
    """silu(gate) · up of a product that holds gate and up side by side: [N, 2·I] to [N, I]."""
    rows, width = both_NI.shape[0], both_NI.shape[1] // 2
    out_NI = torch.empty(rows, width, dtype=both_NI.dtype, device=both_NI.device)
    _silu_mul[(rows, triton.cdiv(width, 1024))](both_NI, out_NI, width, BLOCK=1024, num_warps=4)
    return out_NI
