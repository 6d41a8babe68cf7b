"""What a model is: `ModelConfig` names one in a job's config, `K3Config` describes the K3 family's text decoder.

Source: spec/05 §1 (the released `config.json`). Field names are the released ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from k3rl.config.base import Config
from k3rl.errors import UserError, nearest
from k3rl.models.presets import PRESETS, every_nth
from k3rl.quant.config import QatConfig


class ModelConfig(Config):
    """Which model a job trains or runs."""

    path: str = "k3-nano"
    """A preset (`k3-nano`, `k3-mini`: random initialisation), a checkpoint folder, `smollm2-135m-instruct`, or
    `@job` for the checkpoint of another job of the same pipeline."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights and activations. K3's routers, gates, decays and recurrent states stay float32."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass instead of keeping its activations."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Architecture fields to change, by their name in `config.json`; only for a model that is built, not loaded."""
    qat: QatConfig | None = None
    """Quantisation-aware training: weights (and activations, by choice) pass through MX formats wherever it runs."""


class LinearAttnConfig(Config):
    """KDA layers and which layers they are. Layer numbers are 1-based, as released."""

    num_heads: int = Field(gt=0)
    """Heads of KDA."""
    head_dim: int = Field(gt=0)
    """Width of keys and of values of a head."""
    short_conv_kernel_size: int = Field(default=4, ge=2)
    """Width of the causal depthwise convolution in front of q, k and v."""
    use_full_rank_gate: bool = True
    """The output gate is one full matrix; the only form the release has."""
    gate_lower_bound: float = Field(default=-5.0, ge=-5.0, lt=0.0)
    """Lowest log-decay of one step. -5 over tiles of 16 tokens keeps every factor inside bfloat16's range."""
    full_attn_layers: tuple[int, ...]
    """Layers with gated MLA."""
    kda_layers: tuple[int, ...]
    """Layers with KDA: all others."""


class K3Config(Config):
    """K3's text decoder (released `text_config`). Widths are in elements."""

    vocab_size: int = Field(gt=0)
    """Rows of the embedding and the head."""
    hidden_size: int = Field(gt=0)
    """Width of the residual stream."""
    num_hidden_layers: int = Field(gt=0)
    """Decoder layers."""
    num_attention_heads: int = Field(gt=0)
    """Heads of MLA."""
    num_key_value_heads: int = Field(gt=0)
    """Equals `num_attention_heads`: MLA's heads all have their own keys."""
    intermediate_size: int = Field(gt=0)
    """Width of the first, dense layers' MLP."""
    hidden_act: Literal["situ"] = "situ"
    """SiTU-GLU, everywhere."""
    activation_situ_beta: float = Field(default=4.0, gt=0)
    """Cap of SiTU's gate branch."""
    activation_situ_linear_beta: float = Field(default=25.0, gt=0)
    """Cap of SiTU's linear branch."""
    rms_norm_eps: float = Field(default=1e-5, gt=0)
    """Epsilon of all norms except MLA's two low-rank ones (1e-6)."""
    initializer_range: float = Field(default=0.02, gt=0)
    """Standard deviation of initial matrices."""
    max_position_embeddings: int = Field(default=1048576, gt=0)
    """Longest sequence, tokens. There are no position embeddings: order is KDA's to know."""
    first_k_dense_replace: int = Field(default=1, ge=0)
    """So many first layers have a dense MLP."""
    moe_layer_freq: Literal[1] = 1
    """Every later layer is a mixture of experts."""
    q_lora_rank: int = Field(gt=0)
    """Width of MLA's query bottleneck."""
    kv_lora_rank: int = Field(gt=0)
    """Width of MLA's cached latent."""
    qk_nope_head_dim: int = Field(gt=0)
    """Per-head width of query and key."""
    qk_rope_head_dim: int = Field(gt=0)
    """Width of the key part that all heads share; no rotary is applied to it."""
    v_head_dim: int = Field(gt=0)
    """Per-head width of values."""
    mla_use_nope: Literal[True] = True
    """No rotary embedding."""
    mla_use_output_gate: Literal[True] = True
    """Sigmoid gate on the attention's output."""
    num_experts: int = Field(gt=0)
    """Routed experts a layer."""
    num_experts_per_token: int = Field(gt=0)
    """Routed experts a token uses."""
    num_shared_experts: int = Field(ge=1)
    """Experts every token uses, fused into one of this many times the width."""
    moe_intermediate_size: int = Field(gt=0)
    """Inner width of an expert."""
    routed_expert_hidden_size: int = Field(gt=0)
    """Width of the latent in which routed experts work."""
    latent_moe_use_norm: Literal[True] = True
    """RMSNorm between the experts' sum and the up-projection."""
    moe_renormalize: bool = True
    """Weights of a token's experts sum to `routed_scaling_factor`."""
    moe_router_activation_func: Literal["sigmoid"] = "sigmoid"
    """Scores of experts are independent sigmoids."""
    routed_scaling_factor: float = 1.0
    """Factor on the experts' weights."""
    use_grouped_topk: bool = True
    """Released flag; with one group it is plain top-k."""
    num_expert_group: Literal[1] = 1
    """Groups of experts in routing."""
    topk_group: Literal[1] = 1
    """Groups a token may use."""
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    """Top-k of score plus bias; the bias only selects."""
    attn_res_block_size: int = Field(gt=0)
    """Layers a block of attention residuals spans."""
    num_nextn_predict_layers: int = Field(default=0, ge=0, le=1)
    """Multi-token-prediction layers; the release has none."""
    linear_attn_config: LinearAttnConfig
    """KDA."""
    tie_word_embeddings: Literal[False] = False
    """Embedding and head are two matrices."""
    bos_token_id: int = 163584
    """Begin of sequence."""
    eos_token_id: int = 163586
    """End of a message."""
    pad_token_id: int = 163839
    """Never enters the model: batches are packed."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        linear = self.linear_attn_config
        full, kda = set(linear.full_attn_layers), set(linear.kda_layers)
        everything = set(range(1, self.num_hidden_layers + 1))
        if full & kda:
            raise ValueError(
                f"linear_attn_config: layers {sorted(full & kda)} are both in full_attn_layers and kda_layers"
            )
        if full | kda != everything:
            raise ValueError(
                f"linear_attn_config: full_attn_layers and kda_layers must cover layers 1 to {self.num_hidden_layers} "
                f"exactly; {sorted((full | kda) ^ everything)[:8]} do not fit"
            )
        if self.num_key_value_heads != self.num_attention_heads:
            raise ValueError("num_key_value_heads must equal num_attention_heads in MLA")
        if self.num_experts_per_token > self.num_experts:
            raise ValueError(
                f"num_experts_per_token {self.num_experts_per_token} exceeds num_experts {self.num_experts}"
            )
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if not 0 <= getattr(self, name) < self.vocab_size:
                raise ValueError(f"{name} {getattr(self, name)} lies outside vocab_size {self.vocab_size}")
        return self

    def is_kda(self, layer: int) -> bool:
        """Does this layer (0-based) have KDA?"""
        return layer + 1 in self.linear_attn_config.kda_layers

    def is_moe(self, layer: int) -> bool:
        """Does this layer (0-based) have experts?"""
        return layer >= self.first_k_dense_replace

    @property
    def moe_layers(self) -> list[int]:
        return [i for i in range(self.num_hidden_layers) if self.is_moe(i)]


def preset(name: str, **overrides: Any) -> K3Config:
    """A preset with some fields changed. Where `num_hidden_layers` changes, `linear_attn_config` follows unless given.

    Raises UserError for an unknown preset or field, or a contradiction.
    """
    if name not in PRESETS:
        raise UserError(f"model: no preset '{name}'{nearest(name, PRESETS)}")
    fields = {**PRESETS[name], **overrides}
    layers = fields["num_hidden_layers"]
    if "num_hidden_layers" in overrides and "linear_attn_config" not in overrides:
        fields["linear_attn_config"] = {
            **PRESETS[name]["linear_attn_config"],
            **every_nth(layers, 4, (layers,)),
        }
    return parse_k3_config(fields, f"model '{name}'")


# Fields that a released or transformers-written config.json carries for other software.
_FOREIGN = {
    "architectures", "model_type", "auto_map", "dtype", "torch_dtype", "transformers_version", "quantization_config",
    "use_cache", "return_dict", "output_hidden_states", "_name_or_path", "_attn_implementation", "id2label", "label2id",
    "chunk_size_feed_forward", "is_encoder_decoder", "problem_type", "output_attentions", "is_decoder",
    "cross_attention_hidden_size", "add_cross_attention", "tie_encoder_decoder",
}  # fmt: skip
_TOP_ONLY = {
    "vision_config", "text_config", "media_placeholder_token_id", "image_placeholder", "ignore_index", "k3rl",
}  # fmt: skip


def parse_k3_config(raw: dict[str, Any], where: str) -> K3Config:
    """Read a `text_config`, or a whole `config.json` that has one. Unknown and contradictory fields are UserErrors."""
    if "text_config" in raw:
        top = {k: v for k, v in raw.items() if k not in _FOREIGN | _TOP_ONLY}
        _reject_unknown(top, where)
        inner = {**top, **raw["text_config"]}
        for key, value in top.items():
            if key in raw["text_config"] and raw["text_config"][key] != value:
                raise UserError(
                    f"{where}: '{key}' is {value} at the top and {raw['text_config'][key]} in text_config"
                )
        raw = inner
    fields = {k: v for k, v in raw.items() if k not in _FOREIGN}
    _reject_unknown(fields, where)
    try:
        return K3Config.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(p) for p in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise UserError(f"{where}: {f'{key}: ' if key else ''}{message}") from None


def _reject_unknown(fields: dict[str, Any], where: str) -> None:
    linear = fields.get("linear_attn_config")
    for prefix, given, model in (("", fields, K3Config), ("linear_attn_config.", linear, LinearAttnConfig)):
        for key in given if isinstance(given, dict) else ():
            if key not in model.model_fields:
                raise UserError(f"{where}: unknown field '{prefix}{key}'{nearest(key, model.model_fields)}")


def config_json(config: K3Config, dtype: str) -> dict[str, Any]:
    """The released layout of `config.json`: the decoder under `text_config`, token ids also at the top."""
    text = json.loads(config.model_dump_json())
    ids = {k: text[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")}
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": dtype,
        **ids,
        "text_config": {
            "architectures": ["KimiLinearForCausalLM"],
            "model_type": "kimi_linear",
            "dtype": dtype,
            **text,
        },
    }


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; UserError where it is missing or is none."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object")
    return value
