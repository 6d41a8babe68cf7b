"""``dq(q(x))`` in one pass over memory, on CUDA. The same numbers as `k3rl.quant.mx`, by arithmetic on the bits.

Numbers are bfloat16 or float32 with 8 exponent bits, so the scale's byte is the exponent of the block's largest
magnitude, minus that of the format, plus one where its mantissa lies beyond a border that the rule sets.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3rl.quant.mx import BLOCK, ElementFormat, Rule

BLOCKS_PER_PROGRAM = 64
NEVER = 1 << 24


def _border(element: ElementFormat, rule: Rule) -> int:
    """The scale grows by one where the largest magnitude's 23 mantissa bits are at least this."""
    if rule == "floor":
        return NEVER
    if rule == "even":
        return round((1 - 2.0 ** -(element.mantissa + 1)) * 2**23)
    return round((element.largest / 2.0**element.max_exponent - 1) * 2**23) + 1


@triton.jit
def _fake_quantise(
    x_pointer, out_pointer, count, border,
    EMAX: tl.constexpr, EMIN: tl.constexpr, MANTISSA: tl.constexpr, LARGEST: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = rows[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = rows[:, None] < count
    x = tl.load(x_pointer + at, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    # The largest of bits without signs: magnitudes keep their order, and NaN and infinity come last.
    bits = tl.max(wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    exponent = (bits >> 23) & 255
    grows = ((bits & 0x7FFFFF) >= border).to(tl.int32)
    byte = tl.minimum(tl.maximum(exponent - EMAX + grows, 0), 254)
    byte = tl.where(bits == 0, 127, byte)
    inverse = ((254 - byte) << 23).to(tl.float32, bitcast=True)
    # 2^-127 has no exponent of its own: it is half of 2^-126.
    scale = tl.where(byte == 0, 0x00400000, byte << 23).to(tl.float32, bitcast=True)
    scaled = tl.abs(wide) * inverse[:, None]
    own = (scaled.to(tl.int32, bitcast=True) >> 23) & 255
    own = tl.minimum(tl.maximum(own, 127 + EMIN), 127 + EMAX) - MANTISSA
    steps = scaled * ((254 - own) << 23).to(tl.float32, bitcast=True)
    nearest = (steps + 8388608.0) - 8388608.0  # beyond 2^23 floats are integers: this rounds half to even
    value = tl.minimum(nearest * (own << 23).to(tl.float32, bitcast=True), LARGEST) * scale[:, None]
    value = tl.where(wide.to(tl.int32, bitcast=True) < 0, -value, value)
    value = tl.where((exponent == 255)[:, None], float("nan"), value)
    tl.store(out_pointer + at, value.to(x.dtype), mask=inside)


def fake_quantise_cuda(x: Tensor, element: ElementFormat, rule: Rule) -> Tensor:
    """See `k3rl.quant.mx.fake_quantise`; bfloat16 or float32 [..., K], K a multiple of 32. No gradient."""
    x = x.contiguous()
    out = torch.empty_like(x)
    count = x.numel() // BLOCK
    if count == 0:
        return out
    _fake_quantise[(triton.cdiv(count, BLOCKS_PER_PROGRAM),)](
        x, out, count, _border(element, rule),
        EMAX=element.max_exponent, EMIN=element.min_exponent, MANTISSA=element.mantissa, LARGEST=element.largest,
        ROWS=BLOCKS_PER_PROGRAM, num_warps=4,
    )  # fmt: skip
    return out
