"""The decode step of Llama-like models in few, large operations: what a GPU needs at small batches.

transformers' own layer is some fifty small operations; at a batch of 64 their launches, not the weights' bytes, are
what a step waits for. Here a layer is five matrix products and five kernels (`rollout.native.kernels`), and attention
reads the slot cache in place. Prefill and everything else stay with the model's own forward.

Query, key and value weights of a layer become views into one matrix, and so do the MLP's two: loading weights by name
fills them as ever, and no byte is held twice.

Legend: N rows, D hidden width, K head width.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3rl.models.base import LanguageModel
from k3rl.models.cache import Cache
from k3rl.models.hf import HFModel

MODEL_TYPES = {"llama", "mistral", "qwen2", "qwen3"}
"""Of transformers: pre-norm layers, rotary over the whole head, SiLU-gated MLP, no scaling elsewhere."""


def why_not(model: LanguageModel) -> str:
    """Empty where `FusedDecode` can serve this model; else the reason."""
    if not isinstance(model, HFModel):
        return f"{type(model).__name__} has a decode step of its own"
    config = model.hf.config.get_text_config()
    if config.model_type not in MODEL_TYPES:
        return f"model type '{config.model_type}' is not one of {', '.join(sorted(MODEL_TYPES))}"
    if config.hidden_act != "silu":
        return f"activation '{config.hidden_act}'"
    if model.head_dim & (model.head_dim - 1) or model.head_dim < 16:
        return f"a head width of {model.head_dim}, which is no power of two"
    if importlib.util.find_spec("triton") is None:
        return "no triton"
    return ""


def _fuse(layers: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """One weight and bias; the layers' own become views into them."""
    weight = torch.cat([x.weight.data for x in layers])
    bias = torch.cat([x.bias.data for x in layers]) if layers[0].bias is not None else None
    at = 0
    for layer in layers:
        rows = layer.weight.shape[0]
        layer.weight.data = weight[at : at + rows]
        if bias is not None:
            layer.bias.data = bias[at : at + rows]
        at += rows
    return weight, bias


def window_of(attention: Any) -> int | None:
    """A layer's sliding window: its own attribute where it has one, else the config's (Mistral)."""
    holder = attention if hasattr(attention, "sliding_window") else attention.config
    return getattr(holder, "sliding_window", None)


@dataclass(slots=True)
class _Layer:
    module: Any
    qkv: tuple[Tensor, Tensor | None]
    gate_up: tuple[Tensor, Tensor | None]
    norms: tuple[Tensor, Tensor] | None
    window: int | None


class FusedDecode:
    """Made anew whenever the model's tensors moved (after a sleep), since it holds their storage."""

    def __init__(self, model: HFModel) -> None:
        from rollout.native import kernels

        if reason := why_not(model):
            raise ValueError(f"no fused decode: {reason}")
        self._kernels, self._model = kernels, model
        self._inner = model.hf.base_model
        config = model.hf.config.get_text_config()
        self._heads, self._eps = config.num_attention_heads, config.rms_norm_eps
        self._layers = [self._layer(module) for module in self._inner.layers]

    @staticmethod
    @torch.no_grad()
    def _layer(module: Any) -> _Layer:
        attention, mlp = module.self_attn, module.mlp
        has_norms = getattr(attention, "q_norm", None) is not None
        return _Layer(
            module,
            _fuse([attention.q_proj, attention.k_proj, attention.v_proj]),
            _fuse([mlp.gate_proj, mlp.up_proj]),
            (attention.q_norm.weight, attention.k_norm.weight) if has_norms else None,
            window_of(attention),
        )

    @torch.inference_mode()
    def __call__(self, tokens_N: Tensor, slots_N: Tensor, cache: Cache) -> Tensor:
        """Final-normed hidden states [N, D], as the model's own forward of one token a slot; the cache grows."""
        kernels = self._kernels
        lengths_N = cache.lengths[slots_N]
        residual_ND = self._inner.embed_tokens(tokens_N)
        cos_1NK, sin_1NK = self._inner.rotary_emb(residual_ND[None], lengths_N[None])
        cos_NK, sin_NK = cos_1NK[0].contiguous(), sin_1NK[0].contiguous()
        out_ND: Tensor | None = None
        for index, layer in enumerate(self._layers):
            module = layer.module
            held = cache.tokens[f"{index}.k"], cache.tokens[f"{index}.v"]
            x_ND, residual_ND = kernels.rms_norm(
                residual_ND, module.input_layernorm.weight, self._eps, out_ND
            )
            q_NHK = kernels.rope_store(
                F.linear(x_ND, *layer.qkv), cos_NK, sin_NK, layer.norms, self._eps, *held, slots_N, lengths_N,
                self._heads,
            )  # fmt: skip
            scale = module.self_attn.scaling
            out_NHK = kernels.decode_attention(q_NHK, *held, slots_N, lengths_N, scale, layer.window)
            out_ND = module.self_attn.o_proj(out_NHK.flatten(1))
            x_ND, residual_ND = kernels.rms_norm(
                residual_ND, module.post_attention_layernorm.weight, self._eps, out_ND
            )
            out_ND = module.mlp.down_proj(kernels.silu_mul(F.linear(x_ND, *layer.gate_up)))
        cache.lengths[slots_N] = lengths_N + 1
        return kernels.rms_norm(residual_ND, self._inner.norm.weight, self._eps, out_ND)[0]
