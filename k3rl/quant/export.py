"""Checkpoints in the format K3 was released in: experts packed as MXFP4, the rest in bfloat16. Source: spec/04 §2-3."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from k3rl.errors import UserError
from k3rl.quant.config import EXPERTS
from k3rl.quant.mx import BLOCK, Rule, quantise_mxfp4, unpack_mxfp4

IGNORED_BY_K3 = (
    "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*",
    "re:.*vision_tower.*", "re:.*mm_projector.*",
)  # fmt: skip
"""As released. The list is not complete (it lacks the latent projections): readers go by the names on disk."""


def in_bfloat16(
    tensors: Iterable[tuple[str, Tensor]], keep: Container[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Floating-point tensors in bfloat16, except those in ``keep``: the few that a model holds in float32."""
    for name, tensor in tensors:
        stays = name in keep or not tensor.is_floating_point()
        yield name, tensor if stays else tensor.to(torch.bfloat16)


def is_target(base: str, targets: Iterable[str]) -> bool:
    """Does one of `QatConfig.targets` mean the module that a checkpoint calls ``base``?"""
    return any(
        re.search(r"\.experts\.\d+\.w[123]$", base) is not None
        if target == EXPERTS
        else fnmatchcase(base, target)
        for target in targets
    )


class Packer:
    """Packs the weights that are targets. After ``packed`` is exhausted, ``errors`` has each layer's relative error
    (root of summed squares) and ``left`` the matrices that were not packed."""

    def __init__(self, targets: Sequence[str] = (EXPERTS,), rule: Rule = "ceil") -> None:
        self.targets, self.rule = tuple(targets), rule
        self.left: list[str] = []
        self._squares: dict[str, tuple[float, float]] = {}

    @property
    def errors(self) -> dict[str, float]:
        return {
            layer: (error / square) ** 0.5 if square else 0.0
            for layer, (error, square) in self._squares.items()
        }

    def packed(
        self, tensors: Iterable[tuple[str, Tensor]], keep: Container[str] = ()
    ) -> Iterator[tuple[str, Tensor]]:
        """Raises `UserError` where a target's inputs do not fill blocks of 32, or nothing is a target."""
        count = 0
        for name, tensor in tensors:
            base, _, kind = name.rpartition(".")
            if kind != "weight" or tensor.dim() != 2 or not is_target(base, self.targets):
                if kind == "weight" and tensor.dim() == 2:
                    self.left.append(base)
                yield from in_bfloat16([(name, tensor)], keep)
                continue
            if tensor.shape[1] % BLOCK:
                raise UserError(f"{name} has {tensor.shape[1]} inputs, MXFP4 needs a multiple of {BLOCK}")
            packed, scale = quantise_mxfp4(tensor, self.rule)
            self._count(base, tensor, packed, scale)
            count += 1
            yield f"{base}.weight_packed", packed
            yield f"{base}.weight_scale", scale
        if not count:
            raise UserError(f"no weight matches {list(self.targets)}: there is nothing to pack")

    def _count(self, base: str, tensor: Tensor, packed: Tensor, scale: Tensor) -> None:
        values = tensor.float()
        error = (unpack_mxfp4(packed, scale, torch.float32) - values).square().sum().item()
        layer = re.sub(r"\.experts\.\d+\.", ".experts.", base)
        before = self._squares.get(layer, (0.0, 0.0))
        self._squares[layer] = before[0] + error, before[1] + values.square().sum().item()

    def declaration(self) -> dict[str, Any]:
        """``quantization_config`` of config.json, as compressed-tensors reads it."""
        ignored = list(IGNORED_BY_K3) if self.targets == (EXPERTS,) else self.left
        weights = {
            "num_bits": 4, "type": "float", "strategy": "group", "group_size": BLOCK, "symmetric": True,
            "dynamic": False, "actorder": None, "observer": "minmax", "scale_dtype": "torch.uint8", "zp_dtype": None,
            "block_structure": None,
        }  # fmt: skip
        group = {
            "targets": ["Linear"],
            "format": "mxfp4-pack-quantized",
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
            "config_groups": {"group_0": group},
            "ignore": ignored,
        }
