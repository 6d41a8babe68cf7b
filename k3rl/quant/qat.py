"""Quantisation-aware training: fake quantisers in front of chosen matrices, over full-precision master weights.

Trainer, engine, teachers and evaluation load their models in one place (`k3rl.models.load_model`), which calls
`prepare`; so they hold the same values to the bit. Names, shapes and the optimiser's view of parameters stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from k3rl.errors import UserError
from k3rl.quant.config import EXPERTS, QatConfig
from k3rl.quant.mx import BLOCK, E2M1, E4M3, fake_quantise

READ_ELSEWHERE = ("lm_head", "*.lm_head", "*.kv_b_proj", "*_res.proj")
"""Linear modules whose matrix is also read outside their forward pass, where no quantiser stands in front of it: by
log-probs in chunks, by MLA's decode from latents, by attention residuals."""


class WeightQuantiser:
    """Weights [..., out, in] to their MXFP4 values. Without gradients, a result is kept until the weight changes, and
    then renewed in its place, where a CUDA graph may be reading it."""

    def __init__(self, config: QatConfig) -> None:
        self.rule = config.rule
        self._kept: dict[int, tuple[int, Tensor]] = {}

    def __call__(self, weight: Tensor) -> Tensor:
        if torch.is_grad_enabled() and weight.requires_grad:
            self._kept.clear()
            return fake_quantise(weight, E2M1, self.rule)
        if weight.is_inference() or isinstance(weight, DTensor):
            return fake_quantise(weight, E2M1, self.rule)
        version, kept = self._kept.get(weight.data_ptr(), (-1, weight))
        if version != weight._version:
            values = fake_quantise(weight.detach(), E2M1, self.rule)
            kept = values if version < 0 else kept.copy_(values)
            self._kept[weight.data_ptr()] = (weight._version, kept)
        return kept


def quantise_activations(x: Tensor) -> Tensor:
    """Activations [..., K] to their MXFP8 values (E4M3, scales by the rule under which nothing saturates)."""
    return fake_quantise(x, E4M3, "ceil")


class QatLinear(nn.Linear):
    """A linear module whose class was exchanged: its parameters and their names are untouched."""

    quantiser: WeightQuantiser
    quantise_inputs: bool

    def forward(self, x: Tensor) -> Tensor:
        x = quantise_activations(x) if self.quantise_inputs else x
        return F.linear(x, self.quantiser(self.weight), self.bias)

    def weights_changed(self) -> None:
        """See `LanguageModel.load_named_weights`."""
        self.quantiser(self.weight)


def prepare(model: nn.Module, config: QatConfig) -> list[str]:
    """Put fake quantisers into the model; returns the names of the modules they are in.

    Raises `UserError` where a target matches nothing, a matrix whose inputs do not fill blocks of 32, or one that is
    also read where it would not be rounded.
    """
    prepared: list[str] = []
    for target in config.targets:
        found = [(n, m) for n, m in model.named_modules() if _matches(n, m, target)]
        if not found:
            raise UserError(f"model.qat.targets: '{target}' matches no {_kind(target)} of the model")
        for name, module in found:
            if any(fnmatchcase(name, pattern) for pattern in READ_ELSEWHERE):
                raise UserError(
                    f"model.qat.targets: '{target}' matches {name}, whose matrix is also read outside its linear map "
                    "and stays in full precision: choose a narrower pattern"
                )
            _put(name, module, config)
            prepared.append(name)
    return prepared


def _kind(target: str) -> str:
    return "mixture of experts" if target == EXPERTS else "linear module"


def _matches(name: str, module: nn.Module, target: str) -> bool:
    if target == EXPERTS:
        return hasattr(module, "weight_transform")
    return isinstance(module, nn.Linear) and fnmatchcase(name, target)


def _put(name: str, module: nn.Module, config: QatConfig) -> None:
    for parameter, weight in module.named_parameters(recurse=False):
        if weight.dim() >= 2 and weight.shape[-1] % BLOCK:
            raise UserError(
                f"model.qat: {name}.{parameter} has {weight.shape[-1]} inputs, MXFP4 needs a multiple of {BLOCK}"
            )
    quantiser = WeightQuantiser(config)
    both = config.activations == "mxfp8"
    facts: dict[str, Any] = {
        "weight_transform": quantiser,
        "activation_transform": quantise_activations if both else None,
    }
    if isinstance(module, nn.Linear):
        module.__class__ = QatLinear
        facts = {"quantiser": quantiser, "quantise_inputs": both}
    for attribute, value in facts.items():
        setattr(module, attribute, value)


def quantised_weights(model: nn.Module) -> Iterator[tuple[str, Tensor, WeightQuantiser]]:
    """Name, this rank's part, and quantiser of every weight that is quantised."""
    for name, module in model.named_modules():
        quantiser = getattr(module, "quantiser", None) or getattr(module, "weight_transform", None)
        if not isinstance(quantiser, WeightQuantiser):
            continue
        for parameter, weight in module.named_parameters(recurse=False):
            if weight.dim() >= 2:
                local = weight.to_local() if isinstance(weight, DTensor) else weight
                yield f"{name}.{parameter}", local.detach(), quantiser


@torch.no_grad()
def statistics(model: nn.Module) -> dict[str, tuple[float, float]]:
    """By metric, a sum and the weight to divide it by: ``qat/relative_error`` (of weights, in squares),
    ``qat/saturated_share`` (of elements) and ``qat/zero_share`` (of elements that became 0)."""
    error = square = saturated = zeros = count = 0.0
    for _, weight, quantiser in quantised_weights(model):
        values, rounded = weight.float(), fake_quantise(weight, E2M1, quantiser.rule).float()
        blocks = rounded.unflatten(-1, (-1, BLOCK)).abs()
        largest = blocks.amax(-1, keepdim=True).expand_as(blocks).flatten(-2)
        error += float((rounded - values).square().sum())
        square += float(values.square().sum())
        saturated += float(((values.abs() > largest * 1.25) & (rounded.abs() == largest)).sum())
        zeros += float(((rounded == 0) & (values != 0)).sum())
        count += values.numel()
    if not count:
        return {}
    return {
        "qat/relative_error": (error, square),
        "qat/saturated_share": (saturated, count),
        "qat/zero_share": (zeros, count),
    }
