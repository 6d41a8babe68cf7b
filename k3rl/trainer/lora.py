"""Low-rank adapters through peft, published as merged weights under the base model's names.

Merging happens on a copy, in float32: the frozen base is never merged and unmerged in place, so it never
drifts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from k3rl.config.trainer import LoraConfig
from k3rl.errors import UserError, nearest
from k3rl.models import LanguageModel
from k3rl.models.hf import HFModel

ADAPTER = "default"


def add_adapters(model: LanguageModel, config: LoraConfig, seed: int) -> None:
    """Freeze the model and put adapters on its linear modules, in place. The start changes no output.

    `UserError` for K3 models, without peft, or where a target names no module.
    """
    if not isinstance(model, HFModel):
        raise UserError("trainer.lora: adapters are for Hugging Face models; K3's layers train whole")
    try:
        import peft
    except ImportError:
        raise UserError("trainer.lora needs peft: pip install 'k3rl[lora]'") from None
    leaves = {n.rpartition(".")[2] for n, m in model.hf.named_modules() if isinstance(m, nn.Linear)}
    for target in config.target_modules:
        if target not in leaves:
            raise UserError(f"trainer.lora: no module is called '{target}'{nearest(target, leaves)}")
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=list(config.target_modules),
        lora_dropout=0.0,
        bias="none",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(settings, model.hf, adapter_name=ADAPTER)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


@torch.no_grad()
def merged_weights(model: HFModel) -> Iterator[tuple[str, Tensor]]:
    """The base model's names, each once, with adapters added: W + scaling * B A."""
    adapted = {
        name: m for name, m in model.hf.named_modules() if hasattr(m, "lora_A") and hasattr(m, "base_layer")
    }
    seen: set[int] = set()
    for name, tensor in model.hf.state_dict(keep_vars=True).items():
        if "lora_" in name or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        out_name = name.replace(".base_layer.", ".")
        owner = (
            adapted.get(name.removesuffix(".base_layer.weight"))
            if name.endswith(".base_layer.weight")
            else None
        )
        if owner is None:
            yield out_name, tensor.detach()
            continue
        a, b = owner.lora_A[ADAPTER].weight, owner.lora_B[ADAPTER].weight
        delta = (b.float() @ a.float()) * owner.scaling[ADAPTER]
        yield out_name, (tensor.detach().float() + delta).to(tensor.dtype)
