"""K3 checkpoints in transformers: importing this module registers them with its Auto classes.

    import k3rl.models.auto
    model = AutoModelForCausalLM.from_pretrained(folder)      # also of a model that k3rl trained
    model.generate(**tokenizer("...", return_tensors="pt"))
    model.save_pretrained(other)                              # the released names and shapes again

Text only: vision tensors of a checkpoint are left out. Legend: B rows, L padded length, T tokens packed, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import MergeModulelist, WeightConverter, WeightRenaming
from transformers.modeling_outputs import CausalLMOutputWithPast

from k3rl.models.cache import Cache
from k3rl.models.config import K3Config, config_json, parse_k3_config
from k3rl.models.k3.layers import RMSNorm
from k3rl.models.k3.model import K3Model


class K3TextConfig(PretrainedConfig):
    """The decoder's fields, as `K3Config` names and checks them."""

    model_type = "kimi_linear"
    base_config_key = "text_config"


class KimiK3Config(PretrainedConfig):
    """`config.json` of a K3 checkpoint."""

    model_type = "kimi_k3"
    sub_configs = {"text_config": K3TextConfig}  # noqa: RUF012
    has_no_defaults_at_init = True

    def __init__(self, text_config: dict[str, Any] | K3TextConfig | None = None, **fields: Any) -> None:
        if text_config is None:
            raise ValueError("a K3 config needs a text_config; presets are in k3rl.models.presets")
        self.text_config = (
            text_config if isinstance(text_config, K3TextConfig) else K3TextConfig(**text_config)
        )
        super().__init__(**fields)

    def k3(self) -> K3Config:
        """Checked. Raises UserError for an unknown or contradictory field."""
        fields = {
            name: getattr(self.text_config, name)
            for name in K3Config.model_fields
            if hasattr(self.text_config, name)
        }
        return parse_k3_config(fields, self._name_or_path or "config")

    def to_diff_dict(self) -> dict[str, Any]:
        """What is written: the released layout and nothing of transformers' own defaults."""
        return config_json(self.k3(), str(self.dtype or torch.float32).removeprefix("torch."))


class KimiK3ForConditionalGeneration(PreTrainedModel, GenerationMixin):
    """A `K3Model` behind transformers' interface: padded rows in, padded logits out."""

    config_class = KimiK3Config
    base_model_prefix = "language_model"
    _keep_in_fp32_modules_strict = ["conv1d", "A_log", "dt_bias", "o_norm", "e_score_correction_bias"]  # noqa: RUF012
    _keys_to_ignore_on_load_unexpected = [r"vision_tower\.", r"mm_projector\."]  # noqa: RUF012
    _supports_sdpa = True

    def __init__(self, config: KimiK3Config) -> None:
        super().__init__(config)
        self.language_model = K3Model(config.k3(), torch.get_default_dtype(), torch.get_default_device())
        if not self.language_model.lm_head.weight.is_meta:
            self.language_model.reset_parameters(torch.initial_seed() % 2**63)
            for module in self.language_model.modules():
                module._is_hf_initialized = True
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Only for what a checkpoint lacks, which transformers reports; a new model is initialised as a whole."""
        for parameter in module.parameters(recurse=False):
            if getattr(parameter, "_is_hf_initialized", False):
                continue
            if parameter.ndim > 1:
                parameter.normal_(0.0, self.config.text_config.initializer_range)
            else:
                parameter.fill_(1.0 if isinstance(module, RMSNorm) else 0.0)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.language_model.lm_head

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        max_length: int | None = None,
        **other: Any,
    ) -> CausalLMOutputWithPast:
        """Float32 logits [B, L or logits_to_keep, V], and the mean cross-entropy where ``labels`` [B, L] are given.

        Padding, where ``attention_mask`` is 0, may be on either side: it never enters the model, and its logits are
        zero. A cache holds ``max_length`` tokens a row, by default the model's whole context at most 4096.
        """
        rows, length = input_ids.shape
        real_BL = torch.ones_like(input_ids, dtype=torch.bool)
        if attention_mask is not None:
            real_BL = attention_mask[:, -length:].bool()
        counts_B = real_BL.sum(-1)
        if bool((counts_B == 0).any()):
            raise ValueError("a row of the batch holds nothing but padding")
        if use_cache and past_key_values is None:
            limit = max_length or min(4096, self.language_model.max_context)
            past_key_values = self.language_model.make_cache(rows, max(limit, length))
        cu = F.pad(counts_B.cumsum(0), (1, 0))
        hidden_TD = self.language_model(input_ids[real_BL], cu, past_key_values)
        hidden_BLD = hidden_TD.new_zeros(rows, length, hidden_TD.shape[-1])
        hidden_BLD[real_BL] = hidden_TD
        logits = self.language_model.logits(hidden_BLD[:, -logits_to_keep:])
        loss = None
        if labels is not None:
            targets = labels[:, 1:].masked_fill(~real_BL[:, 1:], -100)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), ignore_index=-100)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        use_cache: bool | None = None,
        **other: Any,
    ) -> dict[str, Any]:
        """With a cache only the newest token is run; the cache is as long as this generation may become."""
        inputs: dict[str, Any] = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "use_cache": use_cache,
        }
        if past_key_values is not None:
            inputs |= {
                "input_ids": input_ids[:, -1:],
                "attention_mask": None,
                "past_key_values": past_key_values,
            }
        limit = self.generation_config.max_length if other.get("max_length") is None else other["max_length"]
        return inputs | {"max_length": limit, "logits_to_keep": 1}


register_checkpoint_conversion_mapping(
    "kimi_k3",
    [
        WeightRenaming(r"_res_norm\.", r"_res.norm."),
        WeightRenaming(r"_res_proj\.", r"_res.proj."),
        *(
            WeightConverter(f"experts.*.{w}.weight", f"experts.{w}", operations=[MergeModulelist(dim=0)])
            for w in ("w1", "w2", "w3")
        ),
    ],
    overwrite=True,
)
AutoConfig.register("kimi_k3", KimiK3Config, exist_ok=True)
AutoModelForCausalLM.register(KimiK3Config, KimiK3ForConditionalGeneration, exist_ok=True)
