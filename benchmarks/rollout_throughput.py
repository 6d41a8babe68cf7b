"""Generated tokens per second: the native engine against `transformers`, same model, same prompts, one run.

    python benchmarks/rollout_throughput.py --out benchmarks/results/rollout_throughput.h200.json     # on a GPU
    python benchmarks/rollout_throughput.py --out benchmarks/results/rollout_throughput.cpu.json      # SmolLM2 on CPU

On a GPU: a Qwen3-0.6B shape with random weights, 128 tokens in and 128 out, no stop. On CPU: SmolLM2-135M-Instruct, 32
prompts of 16 to 48 tokens, responses as long-tailed as RL's are: log-normal, median 40, p99/p50 = 8, at most 320.
Peers: `generate`, and `generate_batch`, its continuous batching.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.append(sys.path.pop(0))  # this folder has a rewards.py too
from harness import Result
from qwen3_shape import QWEN3

from k3rl.models import ModelConfig, build_model, load_model
from k3rl.models.smollm2 import smollm2_folder
from rollout.engine import Generation, SamplingParams
from rollout.native import NativeEngine

TAIL = math.log(8) / 2.3263
"""Standard deviation of log length: p99 / p50 of a log-normal is exp(2.3263 sigma)."""
HBM_GBS = 4800.0
"""Memory bandwidth of an H200, GB/s."""


def native(model: torch.nn.Module, prompts: list[list[int]], lengths: list[int], rounds: int = 2) -> float:
    """Tokens per second of the last round: the first one compiles and captures."""
    context = max(len(p) + n for p, n in zip(prompts, lengths, strict=True)) + 8
    engine = NativeEngine(
        model, max_slots=len(prompts), max_context=context, eos_token_ids=(), max_batch_tokens=32_768
    )
    for _ in range(rounds):
        batch = [
            Generation(str(i), p, SamplingParams(max_tokens=n), i)
            for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))
        ]
        began = time.perf_counter()
        engine.submit(batch)
        while engine.pending():
            engine.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        took = time.perf_counter() - began
    assert all(len(g.token_ids) == n for g, n in zip(batch, lengths, strict=True))
    return sum(lengths) / took


def generate(hf: torch.nn.Module, prompts: list[list[int]], lengths: list[int], device: str) -> float:
    """`generate` with left padding; every row runs to the longest length, and only tokens that were asked for count."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    settings = {"do_sample": True, "top_k": 0, "min_new_tokens": max(lengths), "max_new_tokens": max(lengths)}
    began = time.perf_counter()
    with torch.no_grad():
        hf.generate(ids, attention_mask=mask, pad_token_id=0, **settings)
    if device == "cuda":
        torch.cuda.synchronize()
    return sum(lengths) / (time.perf_counter() - began)


def generate_batch(hf: torch.nn.Module, prompts: list[list[int]], lengths: list[int]) -> float | None:
    """transformers' own continuous batching, each request with its own length; None where it does not run."""
    from transformers import GenerationConfig

    settings = GenerationConfig(do_sample=True, top_k=0, eos_token_id=None, pad_token_id=0)
    hints = {"block": True, "timeout": 5}
    try:
        with hf.continuous_batching_context_manager(generation_config=settings, **hints) as manager:
            took = 0.0
            for _ in range(2):  # the first round compiles and captures
                began = time.perf_counter()
                for p, n in zip(prompts, lengths, strict=True):
                    manager.add_request(p, max_new_tokens=n)
                finished = written = 0
                while finished < len(prompts) and manager.is_running():
                    got = manager.get_result(timeout=1)
                    if got is not None and got.is_finished():
                        finished, written = finished + 1, written + len(got.generated_tokens)
                took = time.perf_counter() - began
    except Exception as error:  # a peer that cannot run here is said, and costs our own figure nothing
        print(f"generate_batch: {type(error).__name__}: {error}", flush=True)
        return None
    return sum(lengths) / took if written == sum(lengths) else None


def on_gpu(result: Result, batches: list[int], peer: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(QWEN3))
        model = build_model(ModelConfig(path=folder, dtype="bfloat16"), seed=0, device="cuda").requires_grad_(
            False
        )
    parameters = sum(p.numel() for p in model.parameters())
    if peer:
        from transformers import AutoConfig, AutoModelForCausalLM

        shape = AutoConfig.for_model(**QWEN3)
        plain = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).to("cuda").eval()
    rng = random.Random(0)
    for batch in batches:
        prompts = [[rng.randrange(1000, 150_000) for _ in range(128)] for _ in range(batch)]
        lengths = [128] * batch
        theirs = generate(plain, prompts, lengths, "cuda") if peer else None
        ours = native(model, prompts, lengths)
        result.row(f"128 in, 128 out, batch {batch}", ours, "tokens/s", "transformers generate", theirs)
        batched = generate_batch(plain, prompts, lengths) if peer else None
        result.row(
            f"128 in, 128 out, batch {batch}", ours, "tokens/s", "transformers generate_batch", batched
        )
        cache = 2 * 28 * 8 * 128 * 2 * 192 * batch  # keys and values of the average length
        bound = HBM_GBS * 1e9 / (2 * parameters + cache) * batch
        result.row(f"128 in, 128 out, batch {batch}", ours, "tokens/s", "bandwidth limit of decode", bound)


def on_cpu(result: Result, count: int) -> None:
    from transformers import AutoModelForCausalLM

    model = load_model(ModelConfig(path="smollm2-135m-instruct")).requires_grad_(False)
    plain = AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.float32).eval()
    rng = random.Random(0)
    prompts = [[rng.randrange(100, 40_000) for _ in range(rng.randint(16, 48))] for _ in range(count)]
    lengths = [min(320, max(4, round(rng.lognormvariate(math.log(40), TAIL)))) for _ in range(count)]
    theirs = generate(plain, prompts, lengths, "cpu")
    ours = native(model, prompts, lengths, rounds=1)
    name = f"SmolLM2-135M, {count} ragged prompts"
    result.row(name, ours, "tokens/s", "transformers generate", theirs)
    batched = generate_batch(plain, prompts, lengths)
    result.row(name, ours, "tokens/s", "transformers generate_batch", batched)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--batches", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--no-peer", action="store_true", help="skip transformers")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    result = Result("rollout_throughput", "h200" if cuda else "cpu")
    if cuda:
        on_gpu(result, args.batches, not args.no_peer)
    else:
        on_cpu(result, args.prompts)
    result.write(args.out)


if __name__ == "__main__":
    main()
