"""MXFP4 on a GPU: fake quantisation against eager torch, torch.compile and a plain copy. Bits are compared first.

python benchmarks/mxfp4.py --out benchmarks/results/mxfp4.h200.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from harness import Result, seconds

from k3rl.quant.mx import E2M1, E4M3, ElementFormat, _elements, _factor
from k3rl.quant.mx_triton import fake_quantise_cuda


def plain(x: torch.Tensor, element: ElementFormat) -> torch.Tensor:
    """The form of k3rl.quant.mx, without its dispatch."""
    elements, scale = _elements(x, element, "ceil")
    return (elements * _factor(scale)[..., None]).flatten(-2).to(x.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--elements", type=int, default=1 << 28)
    args = parser.parse_args()
    result = Result("mxfp4", "h200")
    torch.manual_seed(0)
    x = torch.randn(args.elements // 4096, 4096, device="cuda", dtype=torch.bfloat16)
    for element in (E2M1, E4M3):
        assert torch.equal(fake_quantise_cuda(x[:4096], element, "ceil"), plain(x[:4096], element))
    moved = 2 * x.numel() * x.element_size() / 1e9
    out = torch.empty_like(x)
    copy = moved / seconds(lambda: out.copy_(x))
    small = x[: x.shape[0] // 8]
    eager = moved / 8 / seconds(lambda: plain(small, E2M1))
    compiled_form = torch.compile(plain)
    compiled = moved / 8 / seconds(lambda: compiled_form(small, E2M1))
    result.row("plain copy, bfloat16", copy, "GB/s")
    for name, element in (("weights, MXFP4", E2M1), ("activations, MXFP8", E4M3)):
        ours = moved / seconds(lambda element=element: fake_quantise_cuda(x, element, "ceil"))
        result.row(f"fake quantisation of {name}", ours, "GB/s", "plain copy", copy)
        if element is E2M1:
            result.row(f"fake quantisation of {name}", ours, "GB/s", "eager torch", eager)
            result.row(f"fake quantisation of {name}", ours, "GB/s", "torch.compile", compiled)
    result.write(args.out)


if __name__ == "__main__":
    main()
