"""Weights of a teacher that rests in host memory while another one of its architecture is on the device.

``mxfp4`` packs routed experts (spec/04 §3): what travels to the device is a quarter of bfloat16's bytes, and is
unpacked there. Packing is refused where it would change the teacher.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from k3rl.errors import UserError
from k3rl.models import LanguageModel
from k3rl.quant.mx import BLOCK, E2M1, Rule, fake_quantise, quantise_mxfp4, unpack_mxfp4
from k3rl.quant.qat import quantised_weights

_EXPERT = re.compile(r"\.experts\.\d+\.w[123]\.weight$")


STACK_BYTES = 256 << 20
"""Packed weights of one shape are moved and unpacked together, up to so many bytes of codes at once."""


@dataclass(frozen=True, slots=True)
class Packed:
    """MXFP4 weights of one shape: codes [n, out, in/2], two to a byte, and a scale per 32 of them [n, out, in/32]."""

    names: tuple[str, ...]
    codes: Tensor
    scales: Tensor


class HostWeights:
    """All weights of one model in host memory, pinned where there is a GPU to copy them to."""

    def __init__(self, model: LanguageModel, name: str, packed: bool, pinned: bool = False) -> None:
        """Raises `UserError` where ``packed`` would change the model ``name``."""
        rule = next((quantiser.rule for _, _, quantiser in quantised_weights(model)), None)
        self.plain: dict[str, Tensor] = {}
        alike: dict[tuple[int, ...], list[tuple[str, Tensor, Tensor]]] = defaultdict(list)
        for key, tensor in model.named_weights():
            value = tensor.detach().cpu()
            if packed and _EXPERT.search(key) and value.shape[-1] % BLOCK == 0:
                alike[tuple(value.shape)].append((key, *_packed(value, key, name, rule)))
            else:
                self.plain[key] = value.clone()
        if packed and not alike:
            raise UserError(
                f"teacher_pool.storage: mxfp4 packs routed experts, and teacher '{name}' has none"
            )
        self.packed = [stack for some in alike.values() for stack in _stacks(some)]
        if pinned:
            self.plain = {key: t.pin_memory() for key, t in self.plain.items()}
            self.packed = [Packed(p.names, p.codes.pin_memory(), p.scales.pin_memory()) for p in self.packed]

    @property
    def nbytes(self) -> int:
        """What one swap moves to the device."""
        packed = sum(p.codes.nbytes + p.scales.nbytes for p in self.packed)
        return packed + sum(t.nbytes for t in self.plain.values())

    @torch.no_grad()
    def load_into(self, model: LanguageModel) -> None:
        """Every weight of a model of the same architecture, in place."""
        own = dict(model.named_weights())
        torch._foreach_copy_([own[n] for n in self.plain], list(self.plain.values()), non_blocking=True)
        for stack in self.packed:
            targets = [own[name] for name in stack.names]
            codes, scales = (t.to(targets[0].device, non_blocking=True) for t in (stack.codes, stack.scales))
            values = unpack_mxfp4(codes, scales, targets[0].dtype, name=stack.names[0])
            torch._foreach_copy_(targets, list(values.unbind()))


def _stacks(alike: list[tuple[str, Tensor, Tensor]]) -> Iterator[Packed]:
    count = max(1, STACK_BYTES // alike[0][1].nbytes)
    for start in range(0, len(alike), count):
        names, codes, scales = zip(*alike[start : start + count], strict=True)
        yield Packed(names, torch.stack(codes), torch.stack(scales))


def _packed(value: Tensor, key: str, name: str, rule: Rule | None) -> tuple[Tensor, Tensor]:
    """Codes and scales under which the model computes what it computed before. ``rule`` is that of its own fake
    quantisers; None: it has none."""
    codes, scales = quantise_mxfp4(value, rule or "ceil")
    back = unpack_mxfp4(codes, scales, value.dtype, name=key)
    if rule is not None:
        back, value = fake_quantise(back, E2M1, rule), fake_quantise(value, E2M1, rule)
    if not torch.equal(back, value):
        raise UserError(
            f"teacher_pool.storage: teacher '{name}' was not trained for mxfp4 (packing changes '{key}'): "
            "use as_loaded, or give its model `qat`"
        )
    return codes, scales


def architecture(model: LanguageModel) -> tuple[object, ...]:
    """What two models have in common whose weights can take each other's place."""
    quantised = tuple(name for name, _, _ in quantised_weights(model))
    return type(model), quantised, tuple((n, tuple(t.shape), t.dtype) for n, t in model.named_weights())
