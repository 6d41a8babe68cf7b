"""Microscaling number formats and quantisation-aware training."""

from k3rl.quant.mx import (
    E2M1,
    E4M3,
    ElementFormat,
    Rule,
    fake_quantise,
    pack_mxfp4,
    quantise_mxfp4,
    unpack_mxfp4,
)

__all__ = [
    "E2M1",
    "E4M3",
    "ElementFormat",
    "Rule",
    "fake_quantise",
    "pack_mxfp4",
    "quantise_mxfp4",
    "unpack_mxfp4",
]
