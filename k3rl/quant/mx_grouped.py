"""Grouped linear layers that read MXFP4 weights as they are stored: a decode step is bound by their bytes.

Each block of rows belongs to one expert. Weights are the left factor of the product, so that their rows fill the tensor
cores even where an expert has one token; Triton's `dot_scaled` turns codes and scales into bfloat16 in registers, where
the GPU has no MXFP4 product of its own.

Legend: A assignments (token, expert) sorted by expert, E experts, N outputs, K inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3rl.quant.mx import BLOCK

ROWS, OUTPUTS, INPUTS = 16, 64, 256
"""Of one tile: assignments, outputs, inputs."""


@triton.jit
def _grouped_linear(
    x_pointer, codes_pointer, scale_pointer, out_pointer, expert_pointer, start_pointer, end_pointer, N, K,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    expert = tl.load(expert_pointer + block).to(tl.int64)
    if expert < 0:
        return
    rows = tl.load(start_pointer + block) + tl.arange(0, ROWS)
    inside = rows < tl.load(end_pointer + expert)
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    real = outputs < N
    weight_row = expert * N + outputs
    ks, bytes_, blocks = tl.arange(0, INPUTS), tl.arange(0, INPUTS // 2), tl.arange(0, INPUTS // 32)
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for k in range(0, K, INPUTS):
        codes = tl.load(
            codes_pointer + weight_row[:, None] * (K // 2) + (k // 2 + bytes_)[None, :],
            mask=real[:, None] & (k // 2 + bytes_ < K // 2)[None, :], other=0,
        )  # fmt: skip
        scale = tl.load(
            scale_pointer + weight_row[:, None] * (K // 32) + (k // 32 + blocks)[None, :],
            mask=real[:, None] & (k // 32 + blocks < K // 32)[None, :], other=127,
        )  # fmt: skip
        x = tl.load(
            x_pointer + rows[None, :].to(tl.int64) * K + (k + ks)[:, None],
            mask=inside[None, :] & (k + ks < K)[:, None], other=0.0,
        )  # fmt: skip
        total = tl.dot_scaled(codes, scale, "e2m1", x, None, "bf16", total)
    at = rows[None, :].to(tl.int64) * N + outputs[:, None]
    tl.store(out_pointer + at, total.to(out_pointer.dtype.element_ty), mask=inside[None, :] & real[:, None])


def row_blocks(ends_E: Tensor, assignments: int) -> tuple[Tensor, Tensor]:
    """(expert, first row) of each block of at most `ROWS` rows, int32; expert -1 where there is none.

    As many as there can be for so many assignments, so that the launch is the same for every routing and a CUDA graph
    can hold it.
    """
    E = ends_E.shape[0]
    starts_E = torch.cat([ends_E.new_zeros(1), ends_E[:-1]])
    last_E = ((ends_E - starts_E + ROWS - 1) // ROWS).cumsum(0)
    most = min(E, assignments) + assignments // ROWS
    index = torch.arange(most, device=ends_E.device, dtype=last_E.dtype)
    expert = torch.searchsorted(last_E, index, right=True)
    known = expert.clamp(max=E - 1)
    before = torch.where(known > 0, last_E[(known - 1).clamp(min=0)], 0)
    first = starts_E[known] + (index - before) * ROWS
    return torch.where(expert < E, expert, -1).int(), first.int()


def grouped_linear_mxfp4(
    x_AK: Tensor, codes_ENK: Tensor, scale_ENK: Tensor, ends_E: Tensor, blocks: tuple[Tensor, Tensor]
) -> Tensor:
    """x W_e^T for each expert's rows, bfloat16 [A, N]; sums in float32.

    ``x_AK`` bfloat16, sorted by expert; ``codes_ENK`` uint8 [E, N, K/2] and ``scale_ENK`` uint8 [E, N, K/32] as in
    `k3rl.quant.mx`; ``ends_E`` int32, where each expert's rows end; ``blocks`` from `row_blocks`.
    """
    A, K = x_AK.shape
    E, N, half = codes_ENK.shape
    if half * 2 != K or scale_ENK.shape != (E, N, K // BLOCK):
        raise ValueError(f"weights {tuple(codes_ENK.shape)} and inputs {tuple(x_AK.shape)} do not fit")
    out_AN = torch.empty(A, N, dtype=x_AK.dtype, device=x_AK.device)
    _grouped_linear[(blocks[0].shape[0], triton.cdiv(N, OUTPUTS))](
        x_AK.contiguous(), codes_ENK, scale_ENK, out_AN, *blocks, ends_E, N, K,
        ROWS=ROWS, OUTPUTS=OUTPUTS, INPUTS=INPUTS, num_warps=4, num_stages=4,
    )  # fmt: skip
    return out_AN
