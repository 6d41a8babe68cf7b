"""Two Triton kernels for `k3rl.trainer.logprobs` on CUDA: one read of a chunk's logits instead of five.

Suffixes: C tokens of a chunk, V vocabulary. Without Triton or CUDA, `usable` is false and torch does the
same. ``TRITON_INTERPRET=1`` runs them on the CPU, which is how CI tests them.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # torch's CPU build comes without it
    triton = None

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
BLOCK_V = 4096


def usable(logits_CV: Tensor) -> bool:
    return triton is not None and (logits_CV.is_cuda or INTERPRET)


if triton is not None:

    @triton.jit
    def _softmax_kernel(
        z_ptr, lse_ptr, entropy_ptr, p_ptr, V, WRITE: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr
    ):
        """Row by row: online logsumexp (and expected logit), then exp(z - lse) in p's dtype."""
        row = tl.program_id(0).to(tl.int64)
        offsets = tl.arange(0, BLOCK)
        top = tl.full((BLOCK,), float("-inf"), tl.float32)
        mass = tl.zeros((BLOCK,), tl.float32)
        weighted = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, V, BLOCK):
            inside = start + offsets < V
            z = tl.load(z_ptr + row * V + start + offsets, mask=inside, other=float("-inf"))
            new = tl.maximum(top, z)
            shrink = tl.where(top == float("-inf"), 0.0, tl.exp(top - new))
            grow = tl.where(z == float("-inf"), 0.0, tl.exp(z - new))
            mass = mass * shrink + grow
            if ENTROPY:
                weighted = weighted * shrink + grow * tl.where(inside, z, 0.0)
            top = new
        highest = tl.max(top, 0)
        scale = tl.where(top == float("-inf"), 0.0, tl.exp(top - highest))
        total = tl.sum(mass * scale, 0)
        lse = highest + tl.log(total)
        tl.store(lse_ptr + row, lse)
        if ENTROPY:
            tl.store(entropy_ptr + row, lse - tl.sum(weighted * scale, 0) / total)
        if WRITE:
            for start in range(0, V, BLOCK):
                inside = start + offsets < V
                z = tl.load(z_ptr + row * V + start + offsets, mask=inside, other=float("-inf"))
                tl.store(
                    p_ptr + row * V + start + offsets, tl.exp(z - lse).to(p_ptr.dtype.element_ty), mask=inside
                )

    @triton.jit
    def _gradient_kernel(
        z_ptr, lse_ptr, g_ptr, entropy_ptr, h_ptr, out_ptr, V, ENTROPY: tl.constexpr, BLOCK: tl.constexpr
    ):
        """out = -p (g + h (log p + H))."""
        row = tl.program_id(0).to(tl.int64)
        offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < V
        log_p = tl.load(z_ptr + row * V + offsets, mask=inside, other=float("-inf")) - tl.load(lse_ptr + row)
        factor = tl.load(g_ptr + row)
        if ENTROPY:
            factor = factor + tl.load(h_ptr + row) * (log_p + tl.load(entropy_ptr + row))
        tl.store(
            out_ptr + row * V + offsets, (-tl.exp(log_p) * factor).to(out_ptr.dtype.element_ty), mask=inside
        )


def softmax(
    logits_CV: Tensor, dtype: torch.dtype, write: bool, entropy: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(logsumexp [C] float32, softmax [C, V] in ``dtype`` where ``write``, entropy [C] float32 where
    asked).
    """
    rows, vocabulary = logits_CV.shape
    lse_C = torch.empty(rows, dtype=torch.float32, device=logits_CV.device)
    entropy_C = torch.empty_like(lse_C) if entropy else None
    probs_CV = torch.empty((rows, vocabulary), dtype=dtype, device=logits_CV.device) if write else None
    _softmax_kernel[(rows,)](
        logits_CV,
        lse_C,
        entropy_C if entropy else lse_C,
        probs_CV if write else logits_CV,
        vocabulary,
        WRITE=write,
        ENTROPY=entropy,
        BLOCK=BLOCK_V,
        num_warps=8,
    )
    return lse_C, probs_CV, entropy_C


def logit_gradient(
    logits_CV: Tensor,
    lse_C: Tensor,
    g_C: Tensor,
    entropy_C: Tensor | None,
    h_C: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """[C, V] in ``dtype``: the part of d loss / d logits that every id has."""
    rows, vocabulary = logits_CV.shape
    out_CV = torch.empty((rows, vocabulary), dtype=dtype, device=logits_CV.device)
    with_entropy = h_C is not None
    _gradient_kernel[(rows, triton.cdiv(vocabulary, BLOCK_V))](
        logits_CV,
        lse_C,
        g_C.contiguous(),
        entropy_C if with_entropy else lse_C,
        h_C.contiguous() if with_entropy else lse_C,
        out_CV,
        vocabulary,
        ENTROPY=with_entropy,
        BLOCK=BLOCK_V,
        num_warps=8,
    )
    return out_CV
