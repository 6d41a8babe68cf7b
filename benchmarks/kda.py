"""KDA on a GPU: first its numbers, then its speed; then a decode step of k3-mini as one CUDA graph.

    python benchmarks/kda.py --out benchmarks/results/kda.h200.json

Needs torch, pydantic, fla-core and einops, and this repository on PYTHONPATH. Numbers that leave their bound end the
program with code 1 before anything is timed. Peers, measured in the same run: this project's chunked form in plain
torch, and causal scaled-dot-product attention of the same heads and width. `--device cpu --quick` walks through the
program without the kernels.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.append(sys.path.pop(0))  # this folder has a rewards.py too
from harness import Result

from k3rl.models import Layout, ModelConfig, build_model
from k3rl.models.attention import packed_attention, padded_attention
from k3rl.models.config import preset
from k3rl.models.k3.attention import KDAttention
from k3rl.models.k3.kda_fla import CONFIGURATIONS
from k3rl.models.k3.kda_ops import kda
from k3rl.models.k3.model import K3Model
from k3rl.models.k3.moe import Experts

BOUND = -5.0
NAMES = ("q", "k", "v", "z", "b", "A_log", "dt_bias", "state")
result = Result("kda", "cuda" if torch.cuda.is_available() else "cpu")
row = result.row


def relative(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


# -- inputs


def layout_of(lengths: list[int], device: torch.device) -> Layout:
    return Layout(sum(lengths), torch.tensor([0, *lengths]).cumsum(0).to(device), device)


def drawn(
    lengths: list[int], heads: int, width: int, device: torch.device, seed: int = 0, shift: float = -2.0
) -> list[Tensor]:
    """Raw projections in bfloat16, decay parameters and first states in float32. ``shift`` moves the decays."""
    generator = torch.Generator(device).manual_seed(seed)
    T = sum(lengths)
    shapes = [(T, heads, width)] * 4 + [(T, heads)]
    half = [torch.randn(s, generator=generator, device=device, dtype=torch.bfloat16) for s in shapes]
    single = [
        torch.randn(heads, generator=generator, device=device) * 0.3,
        torch.randn(heads, width, generator=generator, device=device) * 0.3 + shift,
        torch.randn(len(lengths), heads, width, width, generator=generator, device=device) * 0.1,
    ]
    return half + single


def call(inputs: list[Tensor], layout: Layout, backend: str) -> tuple[Tensor, Tensor]:
    q, k, v, z, b, A_log, dt_bias, state = inputs
    return kda(q, k, v, z, b, A_log, dt_bias, BOUND, layout, state, backend)  # type: ignore[arg-type]


# -- numbers


def check_kda(device: torch.device, kernel: str, heads: int, widths: list[int]) -> list[str]:
    """The kernels against the chunked form on the same bfloat16 inputs: outputs, states and all gradients."""
    failed = []
    lengths = [1, 15, 63, 64, 65, 700, 1391]
    for width in widths:
        for shift, where in ((-2.0, "usual decays"), (40.0, "decays at the bound")):
            inputs = drawn(lengths, heads, width, device, seed=width, shift=shift)
            up = torch.randn(inputs[2].shape, device=device, dtype=torch.bfloat16)
            results = {}
            for backend in (kernel, "torch"):
                leaves = [x.clone().requires_grad_() for x in inputs]
                out, state = call(leaves, layout_of(lengths, device), backend)
                ((out * up).float().sum() + state.square().sum()).backward()
                results[backend] = [out, state, *(x.grad for x in leaves)]
            for name, a, b in zip(
                ("out", "last state", *(f"d{n}" for n in NAMES)),
                results[kernel],
                results["torch"],
                strict=True,
            ):
                error = relative(a, b)
                # At the bound the gate is flat: its gradients are rounding on both sides.
                flat = shift > 0 and name in ("dz", "dA_log", "ddt_bias")
                if not a.isfinite().all() or (not error <= 2e-2 and not flat):
                    failed.append(f"KDA width {width}, {where}: {name} differs by {error:.2e}")
            worst = max(
                relative(a, b) for a, b in zip(results[kernel][:2], results["torch"][:2], strict=True)
            )
            row(f"error/kda/width {width}/{where}", worst, "relative", "bound", 2e-2)
    return failed


def check_decode(device: torch.device, kernel: str, heads: int, width: int) -> list[str]:
    """Prefill cut at a random place and continued by single steps equals the whole."""
    length, cut = 300, 171
    inputs = drawn([length], heads, width, device, seed=5)
    with torch.no_grad():
        whole, last = call(inputs, layout_of([length], device), "torch")
        first = [x[:cut] for x in inputs[:5]] + inputs[5:]
        out, state = call(first, layout_of([cut], device), kernel)
        outs = [out]
        for t in range(cut, length):
            step = [x[t : t + 1] for x in inputs[:5]] + [*inputs[5:7], state]
            out, state = call(step, layout_of([1], device), kernel)
            outs.append(out)
    error = max(relative(torch.cat(outs), whole), relative(state, last))
    row("error/kda/prefill, then single steps", error, "relative", "bound", 2e-2)
    return [f"KDA by steps differs by {error:.2e}"] if not error <= 2e-2 else []


def check_experts(device: torch.device) -> list[str]:
    """Grouped products against expert by expert, with an expert that no token takes."""
    experts = Experts(preset("k3-mini"), torch.bfloat16, device)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in experts.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.05)
    z = torch.randn(3000, 256, generator=generator).to(device, torch.bfloat16)
    ids = torch.rand(3000, 31, generator=generator).topk(4, -1).indices.to(device)  # expert 31 is idle
    weights = torch.rand(3000, 4, generator=generator).to(device)
    grouped, found = experts._grouped, {}
    for name in ("grouped", "one by one"):
        if name == "one by one":
            experts._grouped = lambda z, ends, *w: experts._one_by_one(z, ends.tolist(), *w)  # type: ignore[method-assign]
        leaf = z.clone().requires_grad_()
        experts.zero_grad()
        out = experts(leaf, ids, weights)
        out.float().square().sum().backward()
        found[name] = [out, leaf.grad, *(p.grad.clone() for p in experts.parameters())]
    experts._grouped = grouped  # type: ignore[method-assign]
    error = max(relative(a, b) for a, b in zip(*found.values(), strict=True))
    idle = float(experts.w1.grad[31].abs().max())
    row("error/experts/grouped against one by one", error, "relative", "bound", 2e-2)
    bad = [f"grouped experts differ by {error:.2e}"] if not error < 2e-2 else []
    return bad + ([f"an idle expert has a gradient of {idle}"] if idle != 0 else [])


def check_attention(device: torch.device) -> list[str]:
    """Flash attention's varlen form against the padded one in float32, new tokens behind cached ones."""
    lengths, past = [1, 40, 300], [100, 0, 64]
    total = [a + b for a, b in zip(lengths, past, strict=True)]
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(sum(lengths), 8, 96, generator=generator).to(device, torch.bfloat16)
    k, v = (torch.randn(sum(total), 8, w, generator=generator).to(device, torch.bfloat16) for w in (96, 64))
    layout = layout_of(lengths, device)
    layout.past = torch.tensor(past).numpy()
    fast = packed_attention(q, k, v, layout, 0.1)
    slow = padded_attention(q.float(), k.float(), v.float(), layout, layout.past, 0.1, None)
    error = relative(fast, slow)
    row("error/attention/varlen with cached tokens", error, "relative", "bound", 2e-2)
    return [f"varlen attention differs by {error:.2e}"] if not error < 2e-2 else []


# -- speed


def timed(function: Callable[[], Any], device: torch.device, budget_s: float = 1.5) -> float:
    """Median milliseconds of at most 20 calls in about ``budget_s``, after two that compile and tune."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def once() -> float:
        wait()
        start = time.perf_counter()
        function()
        wait()
        return (time.perf_counter() - start) * 1e3

    once()
    calls = max(1, min(20, int(budget_s * 1e3 / max(once(), 1e-3))))
    return sorted(once() for _ in range(calls))[calls // 2]


def measured(function: Callable[[], Any], device: torch.device) -> tuple[float | None, float | None]:
    """(ms, peak GiB) or (None, None) where memory does not suffice."""
    gc.collect()
    if device.type != "cuda":
        return timed(function, device, 0.2), None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    try:
        ms = timed(function, device)
    except torch.OutOfMemoryError:
        return None, None
    return ms, (torch.cuda.max_memory_allocated() - base) / 2**30


def forms(
    T: int, heads: int, width: int, device: torch.device, kernel: str
) -> dict[str, tuple[Callable, list]]:
    """Name -> (function of leaves, leaves): the kernels, the chunked form, and attention over one sequence."""
    inputs = drawn([T], heads, width, device)[:7]
    leaves = [x.requires_grad_() for x in inputs]
    layout = layout_of([T], device)
    q, k, v = (torch.randn(1, heads, T, width, device=device, dtype=torch.bfloat16) for _ in range(3))
    dense = [x.requires_grad_() for x in (q, k, v)]
    out: dict[str, tuple[Callable, list]] = {
        "chunked torch": (lambda: call([*leaves, None], layout, "torch")[0], leaves),  # type: ignore[list-item]
        "sdpa": (lambda: F.scaled_dot_product_attention(*dense, is_causal=True), dense),
    }
    if kernel != "torch":
        out["fla"] = (lambda: call([*leaves, None], layout, kernel)[0], leaves)  # type: ignore[list-item]
    return out


def speed(device: torch.device, kernel: str, T: int, heads: int, width: int) -> None:
    found: dict[str, dict[str, tuple[float | None, float | None]]] = {}
    for name, (function, leaves) in forms(T, heads, width, device, kernel).items():

        def forward(function=function) -> None:
            with torch.no_grad():
                function()

        def both(function=function, leaves=leaves) -> None:
            out = function()
            torch.autograd.grad(out, leaves, torch.ones_like(out))

        found[name] = {"forward": measured(forward, device), "forward+backward": measured(both, device)}
    main = "fla" if "fla" in found else "chunked torch"
    for phase in ("forward", "forward+backward"):
        ms, peak = found[main][phase]
        if ms is None:
            continue
        for peer in found:
            if peer != main:
                row(f"time/{main}/{phase}/{T} tokens", ms, "ms", peer, found[peer][phase][0])
        row(f"speed/{main}/{phase}/{T} tokens", T / ms * 1e3, "tokens/s")
        if peak is not None:
            peer_peak = found["chunked torch"][phase][1]
            row(f"memory/{main}/{phase}/{T} tokens", peak, "GiB", "chunked torch", peer_peak)


def decode_kernel(device: torch.device, kernel: str, heads: int, width: int) -> None:
    """One token of N sequences, kernels against plain torch."""
    for N in (1, 64, 256):
        inputs = drawn([1] * N, heads, width, device)
        layout = layout_of([1] * N, device)
        with torch.no_grad():
            plain, ms = (
                timed(lambda b=b, x=inputs, on=layout: call(x, on, b), device, 0.3) for b in ("torch", kernel)
            )
        row(f"time/decode kernel/{N} sequences", ms, "ms", "torch", plain)


# -- k3-mini


def backend_of(model: K3Model, backend: str) -> None:
    for module in model.modules():
        if isinstance(module, KDAttention):
            module.backend = backend  # type: ignore[assignment]


def mini(device: torch.device, quick: bool) -> K3Model:
    size = ModelConfig(path="k3-nano" if quick else "k3-mini")
    model = build_model(size, 0, device, torch.bfloat16)
    assert isinstance(model, K3Model)
    return model


def train_step(model: K3Model, device: torch.device, kernel: str, tokens: int) -> list[str]:
    """Forward and backward of the whole model with both forms of KDA: same loss, and how fast."""
    model.train()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.vocab_size, (tokens,), generator=generator).to(device)
    cu = torch.arange(0, tokens + 1, tokens // 4, device=device)
    losses: dict[str, float] = {}
    times: dict[str, float] = {}

    def run() -> Tensor:
        model.zero_grad()
        loss = (
            model(ids, cu).float().square().mean()
            + model.logits(model(ids[:64], cu[:1].new_tensor([0, 64]))).logsumexp(-1).mean()
        )
        loss.backward()
        return loss

    for backend in dict.fromkeys(("torch", kernel)):
        backend_of(model, backend)
        losses[backend] = float(run().detach())
        times[backend] = timed(run, device)
    error = abs(losses[kernel] / losses["torch"] - 1)
    row(f"time/{tokens} tokens forward+backward", times[kernel], "ms", "chunked torch", times["torch"])
    row("error/loss of the whole model", error, "relative", "bound", 1e-2)
    model.eval()
    return [f"the model's loss differs by {error:.2e}"] if not error < 1e-2 else []


def decode_graph(model: K3Model, device: torch.device, sequences: int, prompt: int = 512) -> list[str]:
    """Greedy steps of N sequences: eager, then captured once and replayed; both must write the same tokens."""
    cache = model.make_cache(sequences, 1024)
    ids = torch.randint(0, model.vocab_size, (sequences * prompt,), device=device)
    ends = torch.arange(sequences + 1, device=device) * prompt
    token, cu = (
        torch.zeros(sequences, dtype=torch.int64, device=device),
        torch.arange(sequences + 1, device=device),
    )

    def step() -> None:
        token.copy_(model.logits(model(token, cu, cache)).argmax(-1))

    def start() -> None:
        cache.reset()
        token.copy_(model.logits(model(ids, ends, cache)[ends[1:] - 1]).argmax(-1))

    def run(one: Callable[[], Any], steps: int = 24) -> tuple[list[list[int]], float]:
        start()
        written = []
        for _ in range(steps):
            one()
            written.append(token.tolist())
        start()
        return written, timed(one, device, 0.5)

    with torch.no_grad():
        eager, eager_ms = run(step)
        if device.type != "cuda":
            row(f"time/decode step/{sequences} sequences", eager_ms, "ms")
            return []
        start()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        replayed, graph_ms = run(graph.replay)
    row(f"time/decode step as a graph/{sequences} sequences", graph_ms, "ms", "eager", eager_ms)
    row(f"speed/decode/{sequences} sequences", sequences / graph_ms * 1e3, "tokens/s")
    return [] if replayed == eager else [f"the captured step of {sequences} sequences writes other tokens"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument(
        "--check-widths", type=int, nargs="*", default=[128], help="each takes fla about a minute of tuning"
    )
    parser.add_argument("--lengths", type=int, nargs="*", default=[1 << n for n in range(12, 18)])
    parser.add_argument("--quick", action="store_true", help="short sequences and k3-nano")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tune", type=int, default=0, help="configurations fla may try per kernel (0: all)")
    args = parser.parse_args()
    device = torch.device(args.device)
    os.environ[CONFIGURATIONS] = str(args.tune)
    torch.manual_seed(0)
    kernel = "fla" if device.type == "cuda" else "torch"

    failed = check_kda(device, kernel, args.heads, args.check_widths)
    failed += check_decode(device, kernel, args.heads, args.width)
    failed += check_experts(device) + check_attention(device)
    for line in failed:
        print("WRONG:", line, flush=True)
    if not failed:
        decode_kernel(device, kernel, args.heads, args.width)
        model = mini(device, args.quick)
        failed += train_step(model, device, kernel, 1024 if args.quick else 16384)
        for sequences in (1, 8) if args.quick else (1, 16, 64):
            failed += decode_graph(model, device, sequences, 64 if args.quick else 512)
        for tokens in [256, 1024] if args.quick else args.lengths:
            result.write(args.out)
            speed(device, kernel, tokens, args.heads, args.width)
    result.write(args.out)
    for line in failed:
        print("WRONG:", line)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
