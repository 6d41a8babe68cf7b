"""MXFP4 on a GPU: fake quantisation against eager torch, torch.compile and a plain copy, bits compared first; then the
routed experts of a decode step, reading 4-bit codes, against bfloat16 weights and grouped matrix products.

    python benchmarks/mxfp4.py --out benchmarks/results/mxfp4.h200.json

Experts are of K3's shape (3,584 x 3,072, 16 a token), 256 of its 896. Steps are timed as CUDA graphs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from harness import Result, seconds

from k3rl.models.config import preset
from k3rl.models.k3.moe import Experts
from k3rl.quant.config import QatConfig
from k3rl.quant.mx import E2M1, E4M3, ElementFormat, _elements, _factor, unpack_mxfp4
from k3rl.quant.mx_triton import fake_quantise_cuda
from k3rl.quant.packed import PackedExperts, pack
from k3rl.quant.qat import WeightQuantiser


def plain(x: torch.Tensor, element: ElementFormat) -> torch.Tensor:
    """The form of k3rl.quant.mx, without its dispatch."""
    elements, scale = _elements(x, element, "ceil")
    return (elements * _factor(scale)[..., None]).flatten(-2).to(x.dtype)


def both_experts(count: int, device: str = "cuda") -> tuple[Experts, PackedExperts]:
    """The same random weights in bfloat16 and packed."""
    config = preset("k3-full", num_experts=count)
    plain = Experts(config, torch.bfloat16, torch.device(device)).requires_grad_(False)
    packed = Experts(preset("k3-full", num_experts=16), torch.bfloat16, torch.device(device))
    packed.weight_transform = WeightQuantiser(QatConfig())
    pack(packed, read_codes=True)
    packed.num_experts, packed.columns = plain.num_experts, plain.columns
    for name in ("w1", "w2", "w3"):
        weight = getattr(plain, name)
        out, inner = weight.shape[1:]
        codes = torch.randint(0, 256, (count, out, inner // 2), dtype=torch.uint8, device=device)
        scale = torch.randint(117, 121, (count, out, inner // 32), dtype=torch.uint8, device=device)
        setattr(packed, f"{name}_packed", codes)
        setattr(packed, f"{name}_scale", scale)
        for e in range(count):
            weight[e] = unpack_mxfp4(codes[e], scale[e])
    return plain, packed  # type: ignore[return-value]


def captured(function: Callable[[], torch.Tensor]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


@torch.no_grad()
def decode(result: Result, experts: int, batches: tuple[int, ...] = (1, 4, 16, 64)) -> None:
    plain, packed = both_experts(experts)
    generator = torch.Generator("cuda").manual_seed(0)
    for batch in batches:
        z = torch.randn(batch, plain.w1.shape[2], generator=generator, device="cuda").bfloat16()
        ids = torch.rand(batch, experts, generator=generator, device="cuda").topk(16, -1).indices
        weights = torch.rand(batch, 16, generator=generator, device="cuda")
        expected, found = (m(z, ids, weights).double() for m in (plain, packed))
        assert (found - expected).norm() < 1e-2 * expected.norm(), "the packed experts say something else"
        times = [seconds(captured(partial(m, z, ids, weights)).replay) for m in (packed, plain)]
        ours, theirs = (1e3 * t for t in times)
        result.row(f"decode, 4-bit experts, batch {batch}", ours, "ms", "bfloat16, grouped_mm", theirs)
        touched = ids.unique().numel() * 3 * plain.w1.shape[1] * plain.w1.shape[2]
        result.row(
            f"decode, 4-bit experts, batch {batch}: codes and scales", touched * 17 / 32 / ours / 1e6, "GB/s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--elements", type=int, default=1 << 28)
    parser.add_argument("--experts", type=int, default=256)
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
    del x, out, small
    torch.cuda.empty_cache()
    decode(result, args.experts)
    result.write(args.out)


if __name__ == "__main__":
    main()
