"""How far engines are from the trainer, token by token, on the same weights: native and vLLM, float32 and bfloat16.

    python benchmarks/logprob_diff.py --out benchmarks/results/logprob_diff.cpu.json

SmolLM2-135M samples at temperature 1; the trainer's packed forward scores the same tokens in float32. vLLM runs in this
process (its CPU build will do). The native engine's bound, 1e-5 over 10,000 tokens, is a test
(tests/rollout/test_native_engine.py); this reports what is not bounded.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from pathlib import Path

SETTINGS = {
    "TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip
for name, value in SETTINGS.items():
    os.environ.setdefault(name, value)

import torch  # noqa: E402

sys.path.append(sys.path.pop(0))
from harness import Result  # noqa: E402

from k3rl.models import ModelConfig, load_model  # noqa: E402
from k3rl.models.smollm2 import smollm2_folder  # noqa: E402
from rollout.engine import Engine, Generation, SamplingParams  # noqa: E402
from rollout.native import NativeEngine  # noqa: E402
from rollout.vllm import VLLMEngine  # noqa: E402


def sample(engine: Engine, requests: int, tokens: int) -> list[Generation]:
    """Mixed lengths: 1 to 200 tokens of context, up to ``tokens`` sampled."""
    rng = random.Random(0)
    made = [
        Generation(
            str(i),
            [rng.randrange(3, 40_000) for _ in range(rng.randint(1, 200))],
            SamplingParams(rng.randint(tokens // 4, tokens), ignore_eos=True),
            key=i,
        )
        for i in range(requests)
    ]
    engine.submit(made)
    while engine.pending():
        engine.step()
    return made


@torch.no_grad()
def differences(trainer: torch.nn.Module, generations: list[Generation]) -> torch.Tensor:
    """Engine minus trainer [tokens], nats."""
    out = []
    for g in generations:
        ids = torch.tensor(g.context_ids + g.token_ids)
        cu = torch.tensor([0, len(ids)], dtype=torch.int32)
        table = trainer.logits(trainer(ids, cu)).double().log_softmax(-1)
        span = torch.arange(len(g.context_ids), len(ids))
        out.append(torch.tensor(g.logprobs, dtype=torch.float64) - table[span - 1, ids[span]])
    return torch.cat(out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    folder = smollm2_folder()
    trainer = load_model(ModelConfig(path=str(folder), dtype="float32")).eval().requires_grad_(False)
    result = Result("logprob_diff", "cpu")
    vllm = {"enforce_eager": True, "kv_cache_memory_bytes": 512 << 20}
    for dtype in ("float32", "bfloat16"):
        served = load_model(ModelConfig(path=str(folder), dtype=dtype)).eval().requires_grad_(False)
        engines = {
            "native": lambda served=served: NativeEngine(served, 16, 512),
            "vllm": lambda dtype=dtype: VLLMEngine(folder, 16, 512, dtype=dtype, engine_args=dict(vllm)),
        }
        for name, make in engines.items():
            found = differences(trainer, sample(make(), args.requests, args.tokens)).abs()
            for what, value in (("max", found.max()), ("mean", found.mean()), ("p99", found.quantile(0.99))):
                result.row(f"{name}, {dtype}: {what} over {len(found):,} tokens", float(value), "nats")
    result.write(args.out)


if __name__ == "__main__":
    main()
