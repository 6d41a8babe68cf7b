"""Grouped linear layers that read MXFP4 weights as they are stored: a decode step is bound by their bytes.

The kernel is CUDA (mx_grouped.cu says how it works), compiled by the NVRTC that comes with torch when it is first used.
Triton's `dot_scaled` came before it and ran at 0.43 to 0.53 times the speed of bfloat16 on an H200, decoding element by
element; this runs at 1.9 to 2.2 times, two weights at a time (benchmarks/mxfp4.py).

Legend: A assignments (token, expert) sorted by expert, E experts, N outputs, K inputs.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3rl.quant.mx import BLOCK

ROWS, OUTPUTS, THREADS = 16, 16, 128
"""Assignments and outputs of one block of threads, as in the source."""
SOURCE = Path(__file__).with_suffix(".cu")


@cache
def _kernel(device: int) -> Any:
    from torch.utils import cpp_extension

    # torch puts the toolkit's headers on the path, and refuses where there is no toolkit; this source includes none.
    home = cpp_extension.CUDA_HOME
    cpp_extension.CUDA_HOME = home or ""
    try:
        with torch.cuda.device(device):
            return torch.cuda._compile_kernel(SOURCE.read_text(), "grouped_linear_mxfp4")
    finally:
        cpp_extension.CUDA_HOME = home


def row_blocks(ends_E: Tensor, assignments: int) -> tuple[Tensor, Tensor]:
    """Blocks of at most ROWS assignments of one expert: its expert (-1: the block is empty) and its first assignment.

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
    """x W_e^T for each expert's rows, bfloat16 [A, N]; sums in float32. CUDA, Ampere or later.

    ``x_AK`` bfloat16, sorted by expert; ``codes_ENK`` uint8 [E, N, K/2] and ``scale_ENK`` uint8 [E, N, K/32] as in
    `k3rl.quant.mx`; ``ends_E`` int32, where each expert's rows end; ``blocks`` from `row_blocks`. Raises ValueError
    where types or shapes do not fit.
    """
    A, K = x_AK.shape
    E, N, half = codes_ENK.shape
    if half * 2 != K or scale_ENK.shape != (E, N, K // BLOCK):
        raise ValueError(f"weights {tuple(codes_ENK.shape)} and inputs {tuple(x_AK.shape)} do not fit")
    if x_AK.dtype != torch.bfloat16 or ends_E.dtype != torch.int32:
        raise ValueError(f"inputs are {x_AK.dtype} and ends {ends_E.dtype}, not bfloat16 and int32")
    out_AN = torch.empty(A, N, dtype=x_AK.dtype, device=x_AK.device)
    grid = (-(-N // OUTPUTS), blocks[0].shape[0], 1)
    tensors = [t.contiguous() for t in (x_AK, codes_ENK, scale_ENK, out_AN, *blocks, ends_E)]
    _kernel(x_AK.device.index)(grid=grid, block=(THREADS, 1, 1), args=[*tensors, N, K])
    return out_AN
