"""Weights of a teacher that rests in host memory while another one of its architecture is on the device.

``mxfp4`` packs routed experts (spec/04 §3): what travels to the device is a quarter of bfloat16's bytes, and is
unpacked there. Packing is refused where it would change the teacher.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from k3rl.errors import UserError
from k3rl.models import LanguageModel
from k3rl.quant.mx import BLOCK, E2M1, fake_quantise, quantise_mxfp4, unpack_mxfp4
from k3rl.quant.qat import quantised_weights

_EXPERT = re.compile(r"\.experts\.\d+\.w[123]\.weight$")


@dataclass(frozen=True, slots=True)
class Packed:
    """MXFP4: codes, two to a byte, and a scale per 32 of them."""

    codes: Tensor
    scales: Tensor


class HostWeights:
    """All weights of one model in host memory, pinned where there is a GPU to copy them to."""

    def __init__(self, model: LanguageModel, name: str, packed: bool, pinned: bool = False) -> None:
        """Raises `UserError` where ``packed`` would change the model ``name``."""
        trained_for_it = any(True for _ in quantised_weights(model))
        self.tensors: dict[str, Tensor | Packed] = {}
        for key, tensor in model.named_weights():
            value = tensor.detach().cpu()
            if packed and _EXPERT.search(key) and value.shape[-1] % BLOCK == 0:
                self.tensors[key] = _packed(value, key, name, trained_for_it)
            else:
                self.tensors[key] = value.clone()
        if packed and not any(isinstance(t, Packed) for t in self.tensors.values()):
            raise UserError(
                f"teacher_pool.storage: mxfp4 packs routed experts, and teacher '{name}' has none"
            )
        if pinned:
            self.tensors = {key: _pin(t) for key, t in self.tensors.items()}

    @property
    def nbytes(self) -> int:
        """What one swap moves to the device."""
        return sum(t.nbytes for t in self._parts())

    def _parts(self) -> Iterator[Tensor]:
        for tensor in self.tensors.values():
            yield from (tensor.codes, tensor.scales) if isinstance(tensor, Packed) else (tensor,)

    @torch.no_grad()
    def load_into(self, model: LanguageModel) -> None:
        """Every weight of a model of the same architecture, in place."""
        for key, target in model.named_weights():
            source = self.tensors[key]
            if isinstance(source, Packed):
                codes, scales = (
                    t.to(target.device, non_blocking=True) for t in (source.codes, source.scales)
                )
                target.copy_(unpack_mxfp4(codes, scales, target.dtype, name=key))
            else:
                target.copy_(source, non_blocking=True)


def _packed(value: Tensor, key: str, name: str, trained_for_it: bool) -> Packed:
    codes, scales = quantise_mxfp4(value)
    served = fake_quantise(value, E2M1, "ceil") if trained_for_it else value
    if not torch.equal(unpack_mxfp4(codes, scales, value.dtype, name=key), served):
        raise UserError(
            f"teacher_pool.storage: teacher '{name}' was not trained for mxfp4 (packing changes '{key}'): "
            "use as_loaded, or give its model `qat`"
        )
    return Packed(codes, scales)


def _pin(tensor: Tensor | Packed) -> Tensor | Packed:
    if isinstance(tensor, Packed):
        return Packed(tensor.codes.pin_memory(), tensor.scales.pin_memory())
    return tensor.pin_memory()


def architecture(model: LanguageModel) -> tuple[object, ...]:
    """What two models have in common whose weights can take each other's place."""
    quantised = tuple(name for name, _, _ in quantised_weights(model))
    return type(model), quantised, tuple((n, tuple(t.shape), t.dtype) for n, t in model.named_weights())
