"""KDA by flash-linear-attention's Triton kernels (fla-core >= 0.6), and when they are taken.

The kernels normalise q and k, make the bounded decay and beta's sigmoid, and keep the state in float32 themselves.
Legend: T tokens packed, N sequences, H heads, K key width, V value width.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from k3rl.models.packing import Layout

Backend = Literal["auto", "torch", "fla"]
WIDEST_KEY = 256
CONFIGURATIONS = "K3RL_FLA_CONFIGURATIONS"
"""Environment variable: how many ways of running each kernel are tried out on first use. 0: all of fla's, which takes
minutes and was no faster on an H200; 2 unless said otherwise."""


@cache
def _installed() -> bool:
    return importlib.util.find_spec("fla") is not None


@cache
def _kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`chunk_kda` and `fused_recurrent_kda`. Tuners are made while fla is imported; only then is the number cut."""
    from triton.runtime.autotuner import Autotuner

    most = int(os.environ.get(CONFIGURATIONS, "2"))
    original = Autotuner.__init__

    def fewer(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if most:
            self.configs = self.configs[:: max(1, len(self.configs) // most)][:most]

    Autotuner.__init__ = fewer  # type: ignore[method-assign]
    try:
        from fla.ops.kda import chunk_kda, fused_recurrent_kda
    finally:
        Autotuner.__init__ = original  # type: ignore[method-assign]
    return chunk_kda, fused_recurrent_kda


def pick_backend(q_THK: Tensor, backend: Backend = "auto") -> Literal["torch", "fla"]:
    """fla's kernels for CUDA tensors in bfloat16 or float16 where they are installed, plain torch elsewhere.

    Float32 stays with torch: the kernels' products round their inputs to tf32 or bfloat16, and who runs in float32
    wants its digits. Raises RuntimeError where fla is asked for by name and cannot run.
    """
    if backend == "torch":
        return "torch"
    if backend == "fla":
        if not q_THK.is_cuda or not _installed():
            raise RuntimeError(
                f"fla's kernels need a CUDA tensor (got {q_THK.device}) and `pip install flash-linear-attention`"
            )
        return "fla"
    half = q_THK.dtype in (torch.bfloat16, torch.float16)
    return "fla" if q_THK.is_cuda and half and q_THK.shape[-1] <= WIDEST_KEY and _installed() else "torch"


def kda_fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    layout: Layout,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Arguments and results as in `kda_ops.kda`.

    A decode step is a plain batch of one-token sequences through the recurrent kernel, which has no backward pass:
    where gradients flow, one-token sequences go through the chunked kernel like all others.
    """
    chunk_kda, fused_recurrent_kda = _kernels()
    common: dict[str, Any] = {
        "A_log": A_log.float(),
        "dt_bias": dt_bias.float().reshape(-1),
        "initial_state": None if state is None else state.float(),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "lower_bound": lower_bound,
    }
    if layout.decode and not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, z, b))):
        step = (x.unsqueeze(1) for x in (q, k, v, z, b))
        out, state = fused_recurrent_kda(*step, **common)
        return out.squeeze(1), state
    packed = (x.unsqueeze(0) for x in (q, k, v, z, b))
    cu, cu_host = layout.kernel_cu
    out, state = chunk_kda(*packed, safe_gate=True, cu_seqlens=cu, cu_seqlens_cpu=cu_host, **common)
    return out.squeeze(0), state
