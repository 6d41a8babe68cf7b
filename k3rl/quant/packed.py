"""Routed experts that are held packed: what an engine serves is what the trainer rounds to, in a quarter of the bytes.

The trainer publishes codes and scales (`packed_weights`), under the names that a checkpoint in this format has; an
engine's experts are `PackedExperts`. Values are those of the fake quantiser over the master weights, so log-probs agree
as without packing.

Legend: A assignments sorted by expert, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from k3rl.models.k3.moe import Experts
from k3rl.quant.config import EXPERTS, QatConfig
from k3rl.quant.mx import Rule, quantise_mxfp4, unpack_mxfp4
from k3rl.quant.qat import WeightQuantiser

EXPERT_WEIGHT = re.compile(r"\.experts\.\d+\.w[123]\.weight$")
FEW_ROWS = 16
"""Assignments per expert, on average, up to which reading codes beats unpacking them."""


def packs_experts(qat: QatConfig | None) -> bool:
    """Does this scheme quantise routed experts, so that they travel and rest packed?"""
    return qat is not None and EXPERTS in qat.targets


def expert_rule(model: nn.Module) -> Rule:
    """By which rule a model's routed experts are fake-quantised. Raises ValueError where they are not."""
    for module in model.modules():
        if isinstance(module, Experts) and isinstance(module.weight_transform, WeightQuantiser):
            return module.weight_transform.rule
    raise ValueError("the model's routed experts are not quantised: there is nothing to publish packed")


def packed_weights(
    weights: Iterable[tuple[str, Tensor]], rule: Rule = "ceil"
) -> Iterator[tuple[str, Tensor]]:
    """Named weights with each routed expert's matrix as ``weight_packed`` and ``weight_scale`` (spec/04 §2)."""
    for name, tensor in weights:
        if EXPERT_WEIGHT.search(name):
            codes, scale = quantise_mxfp4(tensor, rule)
            yield f"{name}_packed", codes
            yield f"{name}_scale", scale
        else:
            yield name, tensor


class PackedExperts(Experts):
    """`Experts` whose class and tensors `pack` exchanged: buffers w1_packed, w1_scale, and so on; no parameters."""

    value_dtype: torch.dtype
    w2_packed: Tensor
    w2_scale: Tensor
    read_codes: bool
    _kept: tuple[tuple[int, ...], tuple[Tensor, Tensor, Tensor]] | None

    def matrices(self) -> tuple[Tensor, Tensor, Tensor]:
        """w1, w2, w3 unpacked: anew each time with ``read_codes``, else kept, and renewed in place by other bytes."""
        held = [b for _, b in self.named_buffers(recurse=False)]
        versions = tuple(b._version for b in held if not b.is_inference())
        keep = not self.read_codes and len(versions) == len(held)
        if keep and self._kept is not None and self._kept[0] == versions:
            return self._kept[1]
        w1, w2, w3 = (
            unpack_mxfp4(getattr(self, f"{w}_packed"), getattr(self, f"{w}_scale"), self.value_dtype, name=w)
            for w in ("w1", "w2", "w3")
        )
        if not keep:
            return w1, w2, w3
        if self._kept is None:
            self._kept = versions, (w1, w2, w3)
        else:
            torch._foreach_copy_(list(self._kept[1]), [w1, w2, w3])
            self._kept = versions, self._kept[1]
        return self._kept[1]

    def weights_changed(self) -> None:
        if not self.read_codes:
            self.matrices()

    def products(self, z_AL: Tensor, ends_E: Tensor) -> Tensor:
        few = z_AL.shape[0] <= FEW_ROWS * ends_E.shape[0]
        if not (self.read_codes and few and z_AL.is_cuda and z_AL.dtype == torch.bfloat16):
            return super().products(z_AL, ends_E)
        from k3rl.quant.mx_grouped import grouped_linear_mxfp4, row_blocks

        ends_E = ends_E.int()
        blocks = row_blocks(ends_E, z_AL.shape[0])
        gate, up = (
            grouped_linear_mxfp4(
                z_AL, getattr(self, f"{w}_packed"), getattr(self, f"{w}_scale"), ends_E, blocks
            )
            for w in ("w1", "w3")
        )
        return grouped_linear_mxfp4(self._inner(gate, up), self.w2_packed, self.w2_scale, ends_E, blocks)


@torch.no_grad()
def pack(experts: Experts, read_codes: bool = False) -> None:
    """Exchange a fake-quantised module's matrices for their codes and scales. It does not train any more.

    ``read_codes``: hold nothing else, a quarter of bfloat16's bytes, and let decode steps on a GPU read the codes;
    else hold unpacked values beside them, which matrix products read faster (benchmarks/mxfp4.py).
    """
    quantiser = experts.weight_transform
    assert isinstance(quantiser, WeightQuantiser)
    dtype = experts.w1.dtype
    for name, weight in list(experts.named_parameters(recurse=False)):
        delattr(experts, name)
        for suffix, part in zip(("packed", "scale"), quantise_mxfp4(weight, quantiser.rule), strict=True):
            experts.register_buffer(f"{name}_{suffix}", part)
    experts.weight_transform = None
    experts.__class__ = PackedExperts
    for name, value in {"value_dtype": dtype, "read_codes": read_codes, "_kept": None}.items():
        setattr(experts, name, value)


def pack_experts(model: nn.Module, read_codes: bool = False) -> int:
    """`pack` every fake-quantised mixture of a model that only serves; returns how many there are."""
    found = [m for m in model.modules() if isinstance(m, Experts) and m.weight_transform is not None]
    for experts in found:
        pack(experts, read_codes)
    return len(found)
