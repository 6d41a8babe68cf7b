"""Microscaling formats: blocks of 32 elements along the last (reduction) dimension share one power-of-two scale.

    value = element * 2^(scale - 127)        elements E2M1 (weights) or E4M3 (activations), scale E8M0, one byte

Source: spec/04 §3-5. Defined here where the formats leave a choice: a block of zeros has scale byte 127; a block with a
NaN or an infinity has scale byte 255, and all its values are NaN; elements beyond the largest saturate. Everything is
exact in float32, so trainer, engine and exporter, which all come here, hold the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from k3rl.errors import UserError

BLOCK = 32
BIAS, NAN_SCALE = 127, 255
Rule = Literal["ceil", "floor", "even"]
"""How a block's scale follows from its largest magnitude: the smallest scale under which nothing saturates, OCP's rule,
or OCP's after rounding the largest magnitude to the element's mantissa."""


@dataclass(frozen=True, slots=True)
class ElementFormat:
    """A small float without infinities: 1 sign bit, ``mantissa`` explicit mantissa bits."""

    mantissa: int
    """Mantissa bits."""
    min_exponent: int
    """Exponent of the smallest normal number; below it steps stay the same."""
    max_exponent: int
    """Exponent of the largest number."""
    largest: float
    """Largest number."""


E2M1 = ElementFormat(mantissa=1, min_exponent=0, max_exponent=2, largest=6.0)
E4M3 = ElementFormat(mantissa=3, min_exponent=-6, max_exponent=8, largest=448.0)
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""E2M1 by the low three bits of its code; the fourth is the sign."""


def scales(blocks_NB: Tensor, element: ElementFormat, rule: Rule) -> Tensor:
    """Scale bytes [N] of float32 blocks [N, 32]."""
    amax = blocks_NB.abs().amax(-1)
    fraction, exponent = torch.frexp(amax)  # amax = fraction * 2^exponent, fraction in [0.5, 1)
    floor = exponent - 1 - element.max_exponent
    if rule == "floor":
        k = floor
    elif rule == "even":
        k = floor + (2 * fraction >= 2 - 2.0 ** -(element.mantissa + 1)).int()
    else:  # ceil(log2(amax / largest)), without the rounding of a division
        k = floor + (2 * fraction > element.largest / 2.0**element.max_exponent).int()
    byte = torch.where(amax == 0, BIAS, (k + BIAS).clamp(0, NAN_SCALE - 1))
    return torch.where(amax.isfinite(), byte, NAN_SCALE).to(torch.uint8)


def round_to(scaled: Tensor, element: ElementFormat) -> Tensor:
    """The nearest numbers of the format, ties to even, saturating. float32."""
    _, exponent = torch.frexp(scaled)
    step_exponent = (exponent - 1).clamp(element.min_exponent, element.max_exponent) - element.mantissa
    step = torch.ldexp(torch.ones_like(scaled), step_exponent)
    return ((scaled / step).round() * step).clamp(-element.largest, element.largest)


def _factor(scale: Tensor) -> Tensor:
    """2^(scale - 127) as float32; NaN where the byte says so."""
    factor = torch.exp2(scale.float() - BIAS)
    return torch.where(scale == NAN_SCALE, torch.nan, factor)


def _blocks(x: Tensor) -> Tensor:
    if x.shape[-1] % BLOCK:
        raise ValueError(f"the last dimension of {tuple(x.shape)} is no multiple of {BLOCK}")
    return x.float().unflatten(-1, (-1, BLOCK))


def _elements(x: Tensor, element: ElementFormat, rule: Rule) -> tuple[Tensor, Tensor]:
    """Elements [..., K/32, 32] as float32 and scale bytes [..., K/32]."""
    blocks = _blocks(x)
    scale = scales(blocks, element, rule)
    # In two factors: 2^127, the reciprocal of the smallest scale, times a subnormal is exact, 2^128 would overflow.
    scaled = torch.ldexp(blocks, (BIAS - scale.int())[..., None])
    return round_to(scaled.nan_to_num(0.0, 0.0, 0.0), element), scale


class _StraightThrough(torch.autograd.Function):
    """Forward the quantised value, backward the gradient unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, element: ElementFormat, rule: Rule) -> Tensor:
        if x.is_cuda and x.dtype in (torch.bfloat16, torch.float32) and x.shape[-1] % BLOCK == 0:
            from k3rl.quant.mx_triton import fake_quantise_cuda

            return fake_quantise_cuda(x, element, rule)
        elements, scale = _elements(x, element, rule)
        return (elements * _factor(scale)[..., None]).flatten(-2).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


def fake_quantise(x: Tensor, element: ElementFormat = E2M1, rule: Rule = "ceil") -> Tensor:
    """``dq(q(x))`` of [..., K], K a multiple of 32, in x's type (exact in bfloat16 and float32). The gradient passes
    straight through."""
    return _StraightThrough.apply(x, element, rule)


def quantise_mxfp4(weight: Tensor, rule: Rule = "ceil") -> tuple[Tensor, Tensor]:
    """Weight [..., out, in] to packed bytes [..., out, in/2] and scale bytes [..., out, in/32], both uint8.

    A block whose largest element is 3 is stored doubled under half the scale: the same values, and the bytes that they
    quantise to again, so that a checkpoint that is loaded and written once more keeps its bytes.
    """
    elements, scale = _elements(weight, E2M1, rule)
    doubled = (elements.abs().amax(-1) == 3) & (scale > 0) & (scale < NAN_SCALE)
    elements = torch.where(doubled[..., None], 2 * elements, elements)
    scale = scale - doubled.to(torch.uint8)
    codes = torch.bucketize(elements.abs().flatten(-2), elements.new_tensor(VALUES)).to(torch.uint8)
    signs = torch.signbit(elements).flatten(-2).to(torch.uint8)
    return pack_mxfp4(codes | signs << 3), scale


def pack_mxfp4(codes: Tensor) -> Tensor:
    """Codes 0 to 15 [..., K] to bytes [..., K/2]: the even column is the low nibble."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_mxfp4(
    packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16, name: str = "tensor"
) -> Tensor:
    """The reverse of `quantise_mxfp4`, exactly. Raises `UserError` where the two are no pair."""
    if (
        packed.dtype != torch.uint8
        or scale.dtype != torch.uint8
        or packed.shape[-1] != scale.shape[-1] * BLOCK // 2
    ):
        raise UserError(
            f"{name}: packed {tuple(packed.shape)} {packed.dtype} and scale {tuple(scale.shape)} {scale.dtype} "
            "are not an MXFP4 pair"
        )
    table = torch.tensor([*VALUES, *(-v for v in VALUES)], device=packed.device)
    nibbles = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    elements = table[nibbles.long()].unflatten(-1, (-1, BLOCK))
    return (elements * _factor(scale)[..., None]).flatten(-2).to(dtype)
