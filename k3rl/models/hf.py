"""Any transformers causal LM as a `LanguageModel`, through a registered attention function.

transformers hands every attention layer's query, key and value to the function registered under a name. Ours does
packed causal attention for training and slot-cache attention for generation, so the model's own code stays as it is.
Legend: T tokens packed, H query heads, G key heads, K head width, S slots.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from k3rl.errors import UserError
from k3rl.models.attention import packed_attention, read_packed, write_tokens
from k3rl.models.base import LanguageModel
from k3rl.models.cache import Cache
from k3rl.models.packing import Layout

NAME = "k3rl_packed"
_LAYER_TYPES = {"full_attention", "sliding_attention"}


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    k3rl_layout: Layout | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, K], key and value [1, G, T, K], rotary already applied. Returns ([1, T, H, K], None)."""
    if k3rl_layout is None:
        raise RuntimeError(f"{type(module).__name__} does not pass its keyword arguments on to attention")
    if other.get("softcap") is not None or other.get("s_aux") is not None:
        raise UserError(f"{type(module).__name__}: attention with a soft cap or sinks is not supported")
    layout = k3rl_layout
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if layout.cache is not None:
        held_k = layout.cache.tokens[f"{module.layer_idx}.k"]
        held_v = layout.cache.tokens[f"{module.layer_idx}.v"]
        write_tokens(held_k, layout, k)
        write_tokens(held_v, layout, v)
        if layout.decode:
            return _decode(q, held_k, held_v, layout, scaling, sliding_window)[None], None
        if layout.past.any():
            k, v = read_packed(held_k, layout).to(k.dtype), read_packed(held_v, layout).to(v.dtype)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    return packed_attention(q, k, v, layout, scale, sliding_window)[None], None


def _decode(
    q_NHK: Tensor, held_k: Tensor, held_v: Tensor, layout: Layout, scaling: float | None, window: int | None
) -> Tensor:
    from k3rl.models.attention import read_decode

    k_NLGK, seen_NL = read_decode(held_k, layout)
    v_NLGK, _ = read_decode(held_v, layout)
    if window is not None:
        place = torch.arange(seen_NL.shape[1], device=seen_NL.device)
        seen_NL = seen_NL & (place > layout.past_N[:, None] - window)
    out = torch.nn.functional.scaled_dot_product_attention(
        q_NHK[:, :, None], k_NLGK.transpose(1, 2).to(q_NHK.dtype), v_NLGK.transpose(1, 2).to(q_NHK.dtype),
        attn_mask=seen_NL[:, None, None], scale=scaling, enable_gqa=True,
    )  # fmt: skip
    return out[:, :, 0]


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)


class HFModel(LanguageModel):
    """A transformers causal LM. Positions travel with the tokens; tied heads are one weight.

    Raises UserError for a model with layers other than attention (state-space, linear attention): those would mix
    the sequences of a packed batch.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf
        config = hf.config.get_text_config()
        types = set(getattr(config, "layer_types", None) or ["full_attention"])
        if not types <= _LAYER_TYPES:
            raise UserError(
                f"model of type '{config.model_type}' has layers of type {sorted(types - _LAYER_TYPES)}; "
                "only attention layers can be packed"
            )
        hf.set_attn_implementation(NAME)
        self.vocab_size = hf.get_output_embeddings().weight.shape[0]
        self.hidden_size = config.hidden_size
        self.max_context = config.max_position_embeddings
        self.kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.num_layers = config.num_hidden_layers

    def _forward(self, input_ids_T: Tensor, layout: Layout) -> Tensor:
        recompute = self.activation_checkpointing and self.training and torch.is_grad_enabled()
        if recompute != self.hf.is_gradient_checkpointing:
            if recompute:
                self.hf.gradient_checkpointing_enable({"use_reentrant": False})
            else:
                self.hf.gradient_checkpointing_disable()
        out = self.hf.base_model(
            input_ids=input_ids_T[None],
            position_ids=layout.positions_T[None],
            use_cache=False,
            k3rl_layout=layout,
        )
        return out.last_hidden_state[0]

    def head_weight(self) -> Tensor:
        return self.hf.get_output_embeddings().weight

    def logits(self, hidden_TD: Tensor) -> Tensor:
        return self.hf.get_output_embeddings()(hidden_TD).float()

    def make_cache(self, num_slots: int, max_tokens: int, device: torch.device | str | None = None) -> Cache:
        weight = self.head_weight()
        place = torch.device(device) if device is not None else weight.device
        shape = (num_slots, max_tokens, self.kv_heads, self.head_dim)
        tokens = {
            f"{layer}.{kind}": torch.zeros(shape, dtype=weight.dtype, device=place)
            for layer in range(self.num_layers)
            for kind in "kv"
        }
        return Cache(num_slots, max_tokens, tokens, {})

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        seen: set[int] = set()
        for name, tensor in self.hf.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:  # tied tensors are one parameter object
                seen.add(id(tensor))
                yield name, tensor.detach()

    def unfuse(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """A parameter by its module name, as checkpoint entries; see `K3Model.unfuse`."""
        yield name.removeprefix("hf."), tensor

    def config_dict(self) -> dict[str, object]:
        config = self.hf.config.to_diff_dict()
        config["architectures"] = [type(self.hf).__name__]
        config["dtype"] = str(self.hf.dtype).removeprefix("torch.")
        config.pop("_attn_implementation", None)
        return config


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """transformers' progress bars and notices off."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()
