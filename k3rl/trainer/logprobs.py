"""Log-probs of a linear head over a large vocabulary, without ever holding the logits of a batch.

Suffixes: T tokens, D hidden width, V vocabulary, K requested ids, C tokens of one chunk.

For each token, ``z = h W^T / temperature``, ``logprob = z[target] - logsumexp(z)``. Only [T] results and
the inputs are kept for the backward pass, which does one of two things:

- head frozen: the forward pass also keeps the expected head row ``M = softmax(z) W`` [T, D]. The gradient
of hidden is then
  ``(g W[target] - g M) / temperature``: two matrix products in all, nothing is recomputed;
- head trained (or a gradient through the entropy): logits are computed again chunk by chunk.

Logits and everything made of them are float32 whatever the dtype of hidden and head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from k3rl.trainer import logprobs_triton as fused

CPU_CHUNK_BYTES = 64 << 20
CUDA_CHUNK_BYTES = 640 << 20


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """Natural logs, in nats."""

    logprobs_T: Tensor
    entropy_T: Tensor | None = None
    requested_TK: Tensor | None = None


def linear_logprobs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    entropy_gradient: bool = False,
    requested_TK: Tensor | None = None,
    chunk_bytes: int = 0,
) -> HeadOutput:
    """float32 log-probs of ``targets_T`` (int64), and on demand the entropy and the log-probs of other ids.

    ``temperature`` divides the logits, as in the sampler. ``chunk_bytes`` bounds one chunk's float32 logits
    (0: a default by device). Raises `ValueError` for shapes that don't fit or a temperature that isn't
    positive.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    if hidden_TD.shape[0] != targets_T.shape[0] or hidden_TD.shape[1] != weight_VD.shape[1]:
        shapes = [tuple(x.shape) for x in (hidden_TD, weight_VD, targets_T)]
        raise ValueError(f"hidden, head and targets of shapes {shapes} don't fit")
    default = CUDA_CHUNK_BYTES if hidden_TD.is_cuda else CPU_CHUNK_BYTES
    chunk_tokens = max(1, (chunk_bytes or default) // (4 * weight_VD.shape[0]))
    logprobs_T, entropy_T, requested = _LinearLogprobs.apply(
        hidden_TD,
        weight_VD,
        targets_T,
        requested_TK,
        float(temperature),
        entropy or entropy_gradient,
        entropy_gradient,
        chunk_tokens,
    )
    return HeadOutput(
        logprobs_T,
        entropy_T if entropy or entropy_gradient else None,
        requested if requested_TK is not None else None,
    )


def chunk_logits(hidden_CD: Tensor, weight_VD: Tensor, temperature: float) -> Tensor:
    """float32 [C, V], accumulated in float32 where the device can."""
    if hidden_CD.is_cuda and hidden_CD.dtype in (torch.bfloat16, torch.float16):
        logits_CV = torch.mm(hidden_CD, weight_VD.t(), out_dtype=torch.float32)
    else:
        logits_CV = torch.mm(hidden_CD, weight_VD.t()).float()
    return logits_CV if temperature == 1.0 else logits_CV.mul_(1.0 / temperature)


def _softmax(logits_CV: Tensor, lse_C: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(logits - lse), in the place of the logits where the dtype allows."""
    return logits_CV.sub_(lse_C[:, None]).exp_().to(dtype)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden_TD, weight_VD, targets_T, requested_TK, temperature, entropy, entropy_gradient, chunk
    ):
        keep_mean = hidden_TD.requires_grad and not weight_VD.requires_grad and not entropy_gradient
        total, width = hidden_TD.shape
        new = hidden_TD.new_empty
        logprobs_T, lse_T = new(total, dtype=torch.float32), new(total, dtype=torch.float32)
        entropy_T = new(total if entropy else 0, dtype=torch.float32)
        extra_TK = new(requested_TK.shape if requested_TK is not None else 0, dtype=torch.float32)
        mean_TD = new((total, width)) if keep_mean else None
        for start in range(0, total, chunk):
            s = slice(start, start + chunk)
            logits_CV = chunk_logits(hidden_TD[s], weight_VD, temperature)
            target_C = logits_CV.gather(1, targets_T[s, None]).squeeze(1)
            if requested_TK is not None:
                extra_TK[s] = logits_CV.gather(1, requested_TK[s])
            if fused.usable(logits_CV):
                lse_T[s], probs_CV, entropy_C = fused.softmax(logits_CV, hidden_TD.dtype, keep_mean, entropy)
                if entropy:
                    entropy_T[s] = entropy_C
            else:
                lse_T[s] = torch.logsumexp(logits_CV, 1)
                if entropy or keep_mean:
                    values_CV = logits_CV.clone() if entropy else None
                    probs_CV = _softmax(logits_CV, lse_T[s], torch.float32)
                    if values_CV is not None:
                        entropy_T[s] = lse_T[s] - torch.einsum("cv,cv->c", probs_CV, values_CV)
                    probs_CV = probs_CV.to(hidden_TD.dtype)
            if mean_TD is not None:
                torch.mm(probs_CV, weight_VD, out=mean_TD[s])
            logprobs_T[s] = target_C - lse_T[s]
            del logits_CV
        if requested_TK is not None:
            extra_TK -= lse_T[:, None]
        ctx.save_for_backward(hidden_TD, weight_VD, targets_T, requested_TK, lse_T, entropy_T, mean_TD)
        ctx.temperature, ctx.chunk, ctx.entropy_gradient = temperature, chunk, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T, extra_TK

    @staticmethod
    def backward(ctx, grad_T, grad_entropy_T, grad_TK):
        hidden_TD, weight_VD, targets_T, requested_TK, lse_T, entropy_T, mean_TD = ctx.saved_tensors
        ids_TK, g_TK = targets_T[:, None], grad_T[:, None]
        if requested_TK is not None:
            ids_TK, g_TK = torch.cat([ids_TK, requested_TK], 1), torch.cat([g_TK, grad_TK], 1)
        if mean_TD is not None:
            grad_hidden = _from_mean(weight_VD, ids_TK, g_TK, mean_TD, ctx.temperature)
            return grad_hidden, None, None, None, None, None, None, None
        grad_hidden = torch.empty_like(hidden_TD) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight_VD, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden_TD), ctx.chunk):
            s = slice(start, start + ctx.chunk)
            logits_CV = chunk_logits(hidden_TD[s], weight_VD, ctx.temperature)
            g_C = g_TK[s].sum(1)
            h_C = grad_entropy_T[s] if ctx.entropy_gradient else None
            dz_CV = _logit_gradient(
                logits_CV, lse_T[s], g_C, entropy_T[s] if h_C is not None else None, h_C, hidden_TD.dtype
            )
            dz_CV.scatter_add_(1, ids_TK[s], g_TK[s].to(dz_CV.dtype))
            if ctx.temperature != 1.0:
                dz_CV.mul_(1.0 / ctx.temperature)
            if grad_hidden is not None:
                torch.mm(dz_CV, weight_VD, out=grad_hidden[s])
            if grad_weight is not None:
                _accumulate(grad_weight, dz_CV, hidden_TD[s])
            del logits_CV, dz_CV
        grad_weight = grad_weight.to(weight_VD.dtype) if grad_weight is not None else None
        return grad_hidden, grad_weight, None, None, None, None, None, None


def _from_mean(weight_VD, ids_TK, g_TK, mean_TD, temperature):
    """Gradient of hidden from the kept expected head rows: sum_k g_k W[id_k] - (sum_k g_k) M."""
    grad = mean_TD.float() * -g_TK.sum(1, keepdim=True)
    for k in range(ids_TK.shape[1]):
        grad.addcmul_(weight_VD[ids_TK[:, k]].float(), g_TK[:, k : k + 1])
    return (grad if temperature == 1.0 else grad.mul_(1.0 / temperature)).to(mean_TD.dtype)


def _logit_gradient(logits_CV, lse_C, g_C, entropy_C, h_C, dtype):
    """d loss / d logits without the targets' own part: -g p - h p (log p + H)."""
    if fused.usable(logits_CV):
        return fused.logit_gradient(logits_CV, lse_C, g_C, entropy_C, h_C, dtype)
    if h_C is None:
        return logits_CV.sub_(lse_C[:, None]).exp_().mul_(-g_C[:, None]).to(dtype)
    log_p_CV = logits_CV.sub_(lse_C[:, None])
    factor_CV = (log_p_CV + entropy_C[:, None]).mul_(h_C[:, None]).add_(g_C[:, None])
    return log_p_CV.exp_().mul_(factor_CV).neg_().to(dtype)


def _accumulate(grad_VD, dz_CV, hidden_CD):
    """grad += dz^T h in float32."""
    if hidden_CD.is_cuda and hidden_CD.dtype in (torch.bfloat16, torch.float16):
        torch.addmm(grad_VD, dz_CV.t(), hidden_CD, out_dtype=torch.float32, out=grad_VD)
    elif hidden_CD.dtype is torch.float32:
        grad_VD.addmm_(dz_CV.t(), hidden_CD)
    else:
        grad_VD.add_(torch.mm(dz_CV.t(), hidden_CD))
