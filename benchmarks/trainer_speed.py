"""An RL step on one GPU: a Qwen3-0.6B shape with random weights, packed long sequences. Numbers are tokens per second
and the share of the card's matrix throughput that the model's arithmetic needs (MFU).

    python benchmarks/trainer_speed.py --out benchmarks/results/trainer_speed.h200.json

Published for comparison, on one H100: prime-rl, 11.9k tokens/s and 11% MFU at 16k context, 10.2k tokens/s at 64k.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from harness import Result
from qwen3_shape import QWEN3

from k3rl.config.trainer import AdamWConfig, TrainerConfig
from k3rl.models import ModelConfig, build_model, save_model
from k3rl.trainer import TrainerWorker
from k3rl.types import Author, Channel, Reward, Segment, Status, Trajectory

PEAK_TFLOPS = 989.0
"""Dense bfloat16 of an H100 or H200, TFLOP/s."""
LONGEST_KEPT = 16_384
"""Up to this context activations are kept; beyond it they are computed again in the backward pass."""
PUBLISHED = {16_384: 11_900.0, 65_536: 10_200.0}


def flops_per_token(parameters: int, context: int) -> float:
    """Forward and backward: 6 per weight, and causal attention over half of the context on average."""
    attention = (
        12 * QWEN3["num_hidden_layers"] * QWEN3["num_attention_heads"] * QWEN3["head_dim"] * context / 2
    )
    return 6 * parameters + attention


def trajectories(count: int, context: int, seed: int) -> list[Trajectory]:
    """Random tokens, a short prompt, everything else sampled, advantages of both signs."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i in range(count):
        ids = torch.randint(1000, 150_000, (context,), generator=generator).tolist()
        t = Trajectory(f"p{i}", i, 0, "general", None, ids[:256])
        sampled = ids[256:]
        t.segments = [Segment(Author.MODEL, Channel.RESPONSE, sampled, [-12.0] * len(sampled), 0)]
        t.status, t.reward, t.advantage = Status.COMPLETE, Reward(float(i % 2)), 1.0 - 2.0 * (i % 2)
        made.append(t)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--contexts", type=int, nargs="*", default=[16_384, 65_536])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=131_072, help="of a step")
    parser.add_argument("--layers", type=int, default=QWEN3["num_hidden_layers"])
    args = parser.parse_args()
    result = Result("trainer_speed", "h200")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**QWEN3, "num_hidden_layers": args.layers}))
        shape = ModelConfig(path=folder, dtype="bfloat16")
        model = build_model(shape, seed=0, device=device)
        save_model(model, Path(folder) / "model")
        parameters = sum(p.numel() for p in model.parameters())
        del model
        for context in args.contexts:
            measure(result, Path(folder) / "model", context, parameters, args, device)
    result.write(args.out)


def measure(
    result: Result, model: Path, context: int, parameters: int, args: argparse.Namespace, device: str
) -> None:
    config = TrainerConfig(optimizer=AdamWConfig(lr=1e-6), micro_batch_tokens=max(context, 32_768))
    recompute = context > LONGEST_KEPT
    shape = ModelConfig(path=str(model), dtype="bfloat16", activation_checkpointing=recompute)
    worker = TrainerWorker(shape, config, device=device)
    batch = trajectories(max(2, args.tokens // context), context, seed=context)
    speeds = []
    for _ in range(args.steps):
        metrics = worker.step(batch)
        speeds.append(metrics["train/tokens_per_s"])
    speed = sorted(speeds[1:])[len(speeds[1:]) // 2]
    label = f"RL step at {context // 1024}k context"
    result.row(label, speed, "tokens/s", "prime-rl on one H100, published", PUBLISHED.get(context))
    result.row(f"{label}, MFU", speed * flops_per_token(parameters, context) / PEAK_TFLOPS / 1e12, "of peak")
    result.row(f"{label}, peak memory", metrics["train/peak_memory_bytes"] / 2**30, "GiB")
    del worker
    if device == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
