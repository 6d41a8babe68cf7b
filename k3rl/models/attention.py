"""Causal attention over packed sequences, with or without cached earlier tokens.

Legend: T query tokens packed, U key tokens packed, N sequences, L longest, H query heads, G key heads, K query/key
width, V value width.
"""

from __future__ import annotations

import inspect

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from k3rl.models.packing import Layout

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch without the varlen entry point: the padded form below serves every device
    varlen_attn = None
    _CAUSAL: dict[str, object] = {}
else:  # the flag's name changed between torch 2.10 and 2.11
    _by_window = "window_size" in inspect.signature(varlen_attn).parameters
    _CAUSAL = {"window_size": (-1, 0)} if _by_window else {"is_causal": True}


def packed_attention(
    q_THK: Tensor, k_UGK: Tensor, v_UGV: Tensor, layout: Layout, scale: float, window: int | None = None
) -> Tensor:
    """Attention where each query sees its own sequence's tokens up to itself.

    Keys hold, for each sequence, its cached tokens and then its new ones (U = T without a cache). ``window`` keeps
    only the last so many tokens, the query's own included. Returns [T, H, V] in the query's dtype.
    """
    past = layout.past if k_UGK.shape[0] != layout.num_tokens else np.zeros_like(layout.lengths)
    fast = q_THK.is_cuda and q_THK.dtype in (torch.bfloat16, torch.float16) and window is None
    if fast and varlen_attn is not None and q_THK.shape[-1] <= 256:
        return _varlen(q_THK, k_UGK, v_UGV, layout, past, scale)
    return padded_attention(q_THK, k_UGK, v_UGV, layout, past, scale, window)


def _varlen(
    q_THK: Tensor, k_UGK: Tensor, v_UGV: Tensor, layout: Layout, past: np.ndarray, scale: float
) -> Tensor:
    """Flash attention's own varlen form; its causal mask is aligned to the end, as cached continuation needs."""
    groups = q_THK.shape[1] // k_UGK.shape[1]
    if groups > 1:
        k_UGK, v_UGV = k_UGK.repeat_interleave(groups, 1), v_UGV.repeat_interleave(groups, 1)
    width_V = v_UGV.shape[-1]
    v_pad = F.pad(v_UGV, (0, q_THK.shape[-1] - width_V))
    cu_q = torch.from_numpy(layout.cu.astype(np.int32)).to(q_THK.device)
    cu_k = torch.from_numpy((layout.cu + np.concatenate([[0], np.cumsum(past)])).astype(np.int32)).to(
        q_THK.device
    )
    longest_q, longest_k = int(layout.lengths.max()), int((layout.lengths + past).max())
    packed = (q_THK.contiguous(), k_UGK.contiguous(), v_pad.contiguous())
    out = varlen_attn(*packed, cu_q, cu_k, longest_q, longest_k, scale=scale, **_CAUSAL)
    return out[..., :width_V]


def _buckets(lengths: np.ndarray, totals: np.ndarray) -> list[np.ndarray]:
    """Sequences of similar size together: padding within a bucket stays under about half."""
    order = np.lexsort((totals, lengths))
    buckets: list[list[int]] = []
    for i in order:
        head = buckets[-1][0] if buckets else -1
        if buckets and lengths[i] <= 1.25 * lengths[head] + 8 and totals[i] <= 1.5 * totals[head] + 32:
            buckets[-1].append(int(i))
        else:
            buckets.append([int(i)])
    return [np.array(b) for b in buckets]


def padded_attention(
    q_THK: Tensor,
    k_UGK: Tensor,
    v_UGV: Tensor,
    layout: Layout,
    past: np.ndarray,
    scale: float,
    window: int | None,
) -> Tensor:
    """`packed_attention` for any device and type, by scaled-dot-product attention over similar lengths padded."""
    lengths, totals = layout.lengths, layout.lengths + past
    starts_U = np.concatenate([[0], np.cumsum(totals)])
    device = q_THK.device
    outs, places = [], []
    for rows in _buckets(lengths, totals):
        long_q, long_k = int(lengths[rows].max()), int(totals[rows].max())
        q_at, q_ok = _padded_index(layout.cu[rows], lengths[rows], long_q)
        k_at, k_ok = _padded_index(starts_U[rows], totals[rows], long_k)
        q = _take(q_THK, q_at, device)
        k, v = _take(k_UGK, k_at, device), _take(v_UGV, k_at, device)
        causal_only = (past[rows] == 0).all() and window is None
        if causal_only:  # padding stands at the end, where no valid query sees it
            out = F.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=True, enable_gqa=True)
        else:
            reach = past[rows][:, None] + np.arange(long_q)
            seen = (np.arange(long_k) <= reach[..., None]) & (k_ok[:, None] | ~q_ok[..., None])
            if window is not None:
                seen &= np.arange(long_k) > reach[..., None] - window
            mask = torch.from_numpy(seen).to(device)[:, None]
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        flat = out.transpose(1, 2).reshape(-1, out.shape[1], out.shape[3])
        outs.append(flat if q_ok.all() else flat[torch.from_numpy(np.flatnonzero(q_ok)).to(device)])
        places.append(q_at[q_ok])
    if len(outs) == 1 and (places[0] == np.arange(layout.num_tokens)).all():
        return outs[0]
    back = np.argsort(np.concatenate(places))
    return torch.cat(outs).index_select(0, torch.from_numpy(back).to(device))


def _padded_index(starts: np.ndarray, lengths: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    within = np.arange(longest)
    ok = within < lengths[:, None]
    return starts[:, None] + np.minimum(within, lengths[:, None] - 1), ok


def _take(x_TGK: Tensor, index_NL: np.ndarray, device: torch.device) -> Tensor:
    flat = torch.from_numpy(index_NL.reshape(-1)).to(device)
    return x_TGK.index_select(0, flat).unflatten(0, index_NL.shape).transpose(1, 2)


def write_tokens(cache_SLR: Tensor, layout: Layout, new_TR: Tensor) -> None:
    """Store new tokens' entries in their slots at their positions."""
    if layout.decode:
        cache_SLR[layout.slots_N, layout.positions_T] = new_TR.to(cache_SLR.dtype)
    else:
        slots_T = layout.slots_N.index_select(0, layout.sequence_T)
        cache_SLR[slots_T, layout.positions_T] = new_TR.to(cache_SLR.dtype)


def read_packed(cache_SLR: Tensor, layout: Layout) -> Tensor:
    """All tokens of each sequence, cached and just written, back to back: [U, ...]."""
    totals = layout.past + layout.lengths
    slots = np.repeat(layout.slots_N.cpu().numpy(), totals)
    within = np.arange(totals.sum()) - np.repeat(np.cumsum(totals) - totals, totals)
    flat = torch.from_numpy(slots * cache_SLR.shape[1] + within).to(cache_SLR.device)
    return cache_SLR.flatten(0, 1).index_select(0, flat)


def read_decode(cache_SLR: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Cached tokens of a decode step, padded: ([N, L, ...], bool [N, L] where a token is seen).

    On the CPU L is the longest sequence. On a GPU it is the cache's width, so that shapes never depend on data.
    """
    length = layout.max_total if cache_SLR.device.type == "cpu" else cache_SLR.shape[1]
    rows = cache_SLR[:, :length]
    if not layout.all_slots:
        rows = rows.index_select(0, layout.slots_N)
    seen = torch.arange(length, device=cache_SLR.device) <= layout.past_N[:, None]
    return rows, seen
