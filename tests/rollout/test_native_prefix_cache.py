"""The prefix cache, on a K3 model: hits only where latents and a state exist at one boundary, and never stale."""

from __future__ import annotations

import random

import pytest

from k3rl.models.base import LanguageModel
from k3rl.models.config import ModelConfig
from k3rl.models.loading import build_model
from rollout.engine import Generation, SamplingParams
from rollout.native import NativeEngine

BLOCK = 16


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return build_model(ModelConfig(path="k3-nano", overrides={"vocab_size": 320}), seed=1)


def make(model: LanguageModel, **options: object) -> NativeEngine:
    settings = {"prefix_bytes": 1 << 26, "prefix_block": BLOCK, "prefix_interval": 64} | options
    return NativeEngine(model, 4, 512, **settings)


def ids(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(320) for _ in range(count)]


def say(engine: NativeEngine, context: list[int], tokens: int = 6, key: int = 1) -> tuple[Generation, int]:
    """Run one request; returns it and how many of its tokens came from the cache."""
    before = engine.prefix_hit_tokens
    g = Generation("g", context, SamplingParams(max_tokens=tokens), key=key)
    engine.submit([g])
    while engine.pending():
        engine.step()
    return g, engine.prefix_hit_tokens - before


def test_a_repeated_prompt_hits_at_the_last_block_before_its_end(model):
    engine = make(model)
    context = ids(100, 0)
    first, hit = say(engine, context)
    assert hit == 0
    again, hit = say(engine, context)
    assert hit == 96
    assert again.token_ids == first.token_ids
    assert again.logprobs == pytest.approx(first.logprobs, abs=2e-5)


def test_the_next_turn_hits_at_the_very_end_of_the_last(model):
    """Turn ends are kept wherever they fall, not only at block borders; the last sampled token was never fed."""
    engine = make(model)
    context, end = ids(37, 1), 0
    for turn in range(4):
        g, hit = say(engine, context, tokens=9, key=turn)
        plain, _ = say(NativeEngine(model, 1, 512, prefix_bytes=1 << 20), context, tokens=9, key=turn)
        assert g.token_ids == plain.token_ids
        assert g.logprobs == pytest.approx(plain.logprobs, abs=2e-5)
        assert hit == end
        end = len(context) + len(g.token_ids) - 1
        context = context + g.token_ids + ids(11, 10 + turn)


def test_longer_match_of_tokens_falls_back_to_the_last_checkpoint(model):
    """Two prompts share 150 tokens: latents match up to the block at 144, the state only where one was saved."""
    engine = make(model)
    shared = ids(150, 2)
    say(
        engine, shared + ids(100, 3)
    )  # checkpoints at 64, 128, 192 and 240, earlier ones superseded by the last
    _, hit = say(engine, shared + ids(90, 4))
    assert hit == 0, "no state at or below 144 was left"
    _, hit = say(engine, shared + ids(80, 5))
    assert hit == 128, "the second prompt branched off and left one there"


def test_without_running_states_every_block_is_a_boundary():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from k3rl.models.hf import HFModel

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.1,
    )  # fmt: skip
    engine = make(HFModel(LlamaForCausalLM(config)))
    shared = ids(150, 2)
    say(engine, shared + ids(100, 3))
    g, hit = say(engine, shared + ids(90, 4))
    assert hit == 144
    assert g.logprobs == pytest.approx(engine.score([g.context_ids + g.token_ids], [240])[0], abs=2e-5)


def test_nothing_made_by_other_weights_matches():
    served = build_model(ModelConfig(path="k3-nano", overrides={"vocab_size": 320}), seed=1)
    weights = {
        s: list(
            build_model(ModelConfig(path="k3-nano", overrides={"vocab_size": 320}), seed=s).named_weights()
        )
        for s in (1, 2)
    }
    for reuse_stale in (False, True):
        engine = make(served, reuse_stale=reuse_stale)
        engine.load_weights(weights[1], 0)
        context = ids(100, 6)
        say(engine, context)
        engine.load_weights(weights[2], 1)
        g, hit = say(engine, context)
        assert hit == 0
        assert g.logprobs == pytest.approx(engine.score([context + g.token_ids], [100])[0], abs=2e-5)
        _, hit = say(engine, context)
        assert hit == 96


def test_bytes_are_bounded_and_the_least_recently_used_go_first(model):
    engine = make(model, prefix_bytes=1 << 20)
    cache = engine._prefixes
    for seed in range(12):
        say(engine, ids(100, 100 + seed))
        say(engine, ids(100, 100))  # kept warm
        assert cache.nbytes <= cache.max_bytes
    _, hit = say(engine, ids(100, 100))
    assert hit == 96
    _, hit = say(engine, ids(100, 101))
    assert hit == 0, "long unused, evicted"
    held = sum(
        t.numel() * t.element_size()
        for node in walk(cache)
        for tensors in (
            node.entries,
            node.states or {},
            *(x for tail in node.tails.values() for x in (tail.entries, tail.states)),
        )
        for t in tensors.values()
    )
    assert held == cache.nbytes, "the books agree with what is held"


def walk(cache):
    stack = list(cache._roots.values())
    while stack:
        node = stack.pop()
        yield node
        stack += node.children.values()


def test_random_conversations_score_as_without_a_cache(model):
    """A hundred prompts that branch off one another anywhere, under a tight bound: only time may differ."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    engine = make(model, prefix_bytes=3 << 20, max_batch_tokens=50)
    plain = NativeEngine(model, 4, 512)
    known: list[list[int]] = [[]]
    hits = 0
    for i in range(60):
        base = rng.choice(known)
        context = base[: rng.randint(0, len(base))] + ids(rng.randint(1, 60), rng.randrange(1 << 30))
        context = context[:300]
        g, hit = say(engine, context, tokens=5, key=i)
        h = Generation("g", context, g.sampling, key=i)
        plain.submit([h])
        while plain.pending():
            plain.step()
        assert g.token_ids == h.token_ids
        assert g.logprobs == pytest.approx(h.logprobs, abs=3e-5)
        known.append(context + g.token_ids)
        hits += hit
    assert hits > 0
