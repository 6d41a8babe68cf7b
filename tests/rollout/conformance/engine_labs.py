"""Three engines behind one `Lab`: what a conformance test may use.

A lab's reference is computed without the engine's code: a transformers model with its own attention, or, for
K3, a forward over the whole sequence without a cache.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from k3rl.models.config import ModelConfig
from k3rl.models.loading import build_model, load_model
from rollout.engine import Engine, Generation, SamplingParams

VOCAB, EOS, MAX_CONTEXT, SLOTS = 320, 3, 160, 8


def decode(ids: list[int]) -> str:
    """Ids as text in which characters and words cross the borders of tokens: one byte of UTF-8 for a
    token."""
    return bytes((i % 26) + 97 if i < 256 else (0xC3, 0xA9)[i % 2] for i in ids).decode(
        "utf-8", errors="replace"
    )


@dataclass
class Lab:
    """``weights`` are two full sets; the engine holds ``a`` as version 0 whenever a test starts."""

    name: str
    engine: Engine
    weights: dict[str, list[tuple[str, torch.Tensor]]]
    logits: Callable[[list[int], str], torch.Tensor]  # (ids, "a" or "b") -> float32 [T, V]
    generate: Callable[[list[int], int], list[int]]  # greedy continuation by the reference
    tolerance: float
    exact_stream: bool  # a response cut and resumed draws what it would have drawn in one go
    rng: random.Random = field(default_factory=lambda: random.Random(random.randrange(1 << 30)))
    count: int = 0

    def request(
        self, context: list[int] | int = 12, key: int | None = None, **sampling: object
    ) -> Generation:
        """A generation with a fresh id; a number asks for so many random context tokens."""
        if isinstance(context, int):
            context = [self.rng.randrange(4, VOCAB) for _ in range(context)]
        self.count += 1
        params = SamplingParams(**{"max_tokens": 16, "ignore_eos": True} | sampling)
        key = self.rng.randrange(1 << 62) if key is None else key
        return Generation(f"{self.name}-{self.count}", context, params, key)

    def run(self, *generations: Generation) -> None:
        """Submit and step until all are done."""
        self.engine.submit(generations)
        finished = self.drain()
        assert sorted(g.id for g in finished) == sorted(g.id for g in generations)

    def drain(self) -> list[Generation]:
        out = []
        for _ in range(10_000):
            if not self.engine.pending():
                return out
            out += self.engine.step()
        raise AssertionError("the engine never finished")

    def logprobs(self, generation: Generation, weights: str = "a") -> list[float]:
        """The reference's log-probs of the response, at temperature 1."""
        ids, start = generation.context_ids + generation.token_ids, len(generation.context_ids)
        table = self.logits(ids, weights).log_softmax(-1)
        return [table[i - 1, ids[i]].item() for i in range(start, len(ids))]


def k3_lab() -> Lab:
    from rollout.native import NativeEngine

    overrides = {"vocab_size": VOCAB, "max_position_embeddings": MAX_CONTEXT}
    models = {
        n: build_model(ModelConfig(path="k3-nano", overrides=overrides), seed=s)
        for n, s in (("a", 1), ("b", 2))
    }
    served = build_model(ModelConfig(path="k3-nano", overrides=overrides), seed=1)

    @torch.no_grad()
    def logits(ids: list[int], weights: str) -> torch.Tensor:
        model = models[weights]
        return model.logits(model(torch.tensor(ids), torch.tensor([0, len(ids)])))

    def generate(ids: list[int], count: int) -> list[int]:
        out = list(ids)
        for _ in range(count):
            out.append(int(logits(out, "a")[-1].argmax()))
        return out[len(ids) :]

    engine = NativeEngine(served, SLOTS, MAX_CONTEXT, [EOS], decode=decode, max_batch_tokens=64)
    weights = {n: list(m.named_weights()) for n, m in models.items()}
    return Lab("native-k3", engine, weights, logits, generate, 2e-5, exact_stream=True)


def _qwen_lab(name: str, engine: Engine, folder: Path, tolerance: float, exact_stream: bool) -> Lab:
    from transformers import AutoModelForCausalLM

    models = {"a": AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()}
    models["b"] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.manual_seed(6)
        for parameter in models["b"].parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))

    @torch.no_grad()
    def logits(ids: list[int], weights: str) -> torch.Tensor:
        return models[weights](torch.tensor([ids])).logits[0]

    @torch.no_grad()
    def generate(ids: list[int], count: int) -> list[int]:
        out = models["a"].generate(
            torch.tensor([ids]),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
        )
        return out[0, len(ids) :].tolist()

    weights = {n: [(k, v.detach()) for k, v in m.state_dict().items()] for n, m in models.items()}
    return Lab(name, engine, weights, logits, generate, tolerance, exact_stream)


def native_qwen_lab(folder: Path) -> Lab:
    from rollout.native import NativeEngine

    model = load_model(ModelConfig(path=str(folder)))
    engine = NativeEngine(model, SLOTS, MAX_CONTEXT, [EOS], decode=decode, max_batch_tokens=64)
    return _qwen_lab("native-hf", engine, folder, 2e-5, exact_stream=True)


def vllm_lab(folder: Path) -> Lab:
    settings = {
        "TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }  # fmt: skip
    for key, value in settings.items():
        os.environ.setdefault(key, value)
    pytest.importorskip("vllm")
    from rollout.vllm import VLLMEngine

    engine = VLLMEngine(
        folder, SLOTS, MAX_CONTEXT, [EOS], decode=decode, dtype="float32",
        engine_args={"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20, "max_num_batched_tokens": 256},
    )  # fmt: skip
    return _qwen_lab("vllm", engine, folder, 2e-4, exact_stream=False)
