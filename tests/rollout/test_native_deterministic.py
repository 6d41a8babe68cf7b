"""Deterministic mode: not close, equal. Every comparison here is `==` on floats."""

from __future__ import annotations

import random

import pytest
import torch

from k3rl.models.base import LanguageModel
from k3rl.models.config import ModelConfig
from k3rl.models.hf import HFModel
from k3rl.models.loading import build_model
from rollout.engine import Generation, SamplingParams
from rollout.native import NativeEngine


def make(family: str) -> LanguageModel:
    if family == "k3":
        return build_model(ModelConfig(path="k3-nano", overrides={"vocab_size": 320}), seed=1)
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.1,
    )  # fmt: skip
    return HFModel(LlamaForCausalLM(config))


@pytest.fixture(scope="module", params=["k3", "llama"])
def model(request: pytest.FixtureRequest) -> LanguageModel:
    return make(request.param)


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    return random.Random(seed)


def requests(rng: random.Random, count: int, **sampling: object) -> list[Generation]:
    return [
        Generation(
            f"g{i}",
            [rng.randrange(320) for _ in range(rng.randint(1, 30))],
            SamplingParams(**{"max_tokens": rng.randint(5, 25)} | sampling),
            key=rng.randrange(1 << 62),
        )
        for i in range(count)
    ]


def fresh(generations: list[Generation]) -> list[Generation]:
    return [Generation(g.id, list(g.context_ids), g.sampling, g.key) for g in generations]


def run(engine: NativeEngine, generations: list[Generation]) -> None:
    engine.submit(generations)
    while engine.pending():
        engine.step()


def test_scoring_returns_the_very_bits_that_sampling_recorded(model, rng):
    """`rollout/logprob_diff` is exactly 0, over ragged lengths, whoever shared the batch."""
    generations = requests(rng, 30)
    engine = NativeEngine(model, 7, 128, deterministic=True)
    run(engine, generations)
    scores = engine.score(
        [g.context_ids + g.token_ids for g in generations], [len(g.context_ids) for g in generations]
    )
    assert scores == [g.logprobs for g in generations]


def test_neither_slots_nor_company_change_a_bit(model, rng):
    generations = requests(rng, 12)
    run(NativeEngine(model, 12, 128, deterministic=True), generations)
    for slots in (1, 5):
        again = fresh(generations)
        rng.shuffle(again)
        run(NativeEngine(model, slots, 128, deterministic=True), again)
        by_id = {g.id: g for g in again}
        assert all(by_id[g.id].token_ids == g.token_ids for g in generations)
        assert all(by_id[g.id].logprobs == g.logprobs for g in generations)


@pytest.mark.parametrize("keep_cache", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_pause_at_any_token_is_invisible(model, rng, keep_cache, temperature):
    """Both kinds of resumption (spec/10 row 82); the pause also changes slots and company."""
    (whole,) = requests(rng, 1, max_tokens=12, temperature=temperature)
    run(NativeEngine(model, 3, 128, deterministic=True), [whole])
    for cut in range(12):
        engine = NativeEngine(model, 3, 128, deterministic=True, keep_cache=keep_cache)
        g = fresh([whole])[0]
        engine.submit([g])
        while len(g.token_ids) < cut:
            engine.step()
        engine.pause()
        others = requests(rng, 2, max_tokens=3)
        for other in others:
            other.id += "-other"
        run(engine, [*others, g])
        assert g.token_ids == whole.token_ids
        assert g.logprobs == whole.logprobs


def test_groups_and_prefixes_share_states_without_a_trace(model, rng):
    context = [rng.randrange(320) for _ in range(40)]
    group = [Generation(f"g{i}", context, SamplingParams(max_tokens=10), key=i) for i in range(3)]
    shared = NativeEngine(model, 4, 128, deterministic=True, prefix_bytes=1 << 24, prefix_block=16)
    run(shared, group)
    again = fresh(group)
    run(shared, again)
    assert shared.prefix_hit_tokens == 32
    alone = fresh(group)
    for g in alone:
        run(NativeEngine(model, 1, 128, deterministic=True), [g])
    for a, b, c in zip(group, again, alone, strict=True):
        assert a.token_ids == b.token_ids == c.token_ids
        assert a.logprobs == b.logprobs == c.logprobs


def test_the_mode_is_needed(model, rng):
    """Without it the same comparison fails somewhere: this suite can tell."""
    generations = requests(rng, 30)
    engine = NativeEngine(model, 7, 128)
    run(engine, generations)
    scores = engine.score(
        [g.context_ids + g.token_ids for g in generations], [len(g.context_ids) for g in generations]
    )
    assert scores != [g.logprobs for g in generations]
