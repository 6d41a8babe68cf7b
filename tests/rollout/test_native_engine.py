"""What only the native engine promises. The contract itself is the conformance suite's."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from k3rl.models.base import LanguageModel
from k3rl.models.config import ModelConfig
from k3rl.models.hf import HFModel
from k3rl.models.loading import build_model
from k3rl.types import StopReason
from rollout.engine import Generation, SamplingParams
from rollout.native import NativeEngine
from rollout.native.stops import StopStrings
from rollout.native.throttle import Throttle


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return build_model(ModelConfig(path="k3-nano", overrides={"vocab_size": 320}), seed=1)


@pytest.fixture(scope="module")
def llama() -> LanguageModel:
    """Attention and nothing else: no router whose ties could fall either way."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.1, tie_word_embeddings=True,
    )  # fmt: skip
    return HFModel(LlamaForCausalLM(config))


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    return random.Random(seed)


def requests(
    rng: random.Random, count: int, lengths: tuple[int, int], tokens: tuple[int, int]
) -> list[Generation]:
    return [
        Generation(
            f"g{i}",
            [rng.randrange(320) for _ in range(rng.randint(*lengths))],
            SamplingParams(max_tokens=rng.randint(*tokens)),
            key=rng.randrange(1 << 62),
        )
        for i in range(count)
    ]


def fresh(generations: list[Generation]) -> list[Generation]:
    """The same requests with nothing generated."""
    return [Generation(g.id, list(g.context_ids), g.sampling, g.key, g.offset, g.group) for g in generations]


def run(engine: NativeEngine, generations: list[Generation]) -> None:
    engine.submit(generations)
    while engine.pending():
        engine.step()


def test_one_prefill_serves_a_group(model, rng):
    context = [rng.randrange(320) for _ in range(50)]
    group = [Generation(f"g{i}", context, SamplingParams(max_tokens=8), key=i, group="x") for i in range(6)]
    engine = NativeEngine(model, 8, 256)
    run(engine, group)
    assert engine.stats().prefilled_tokens == 50
    alone = fresh(group)
    for g in alone:
        run(engine, [g])
    assert [g.token_ids for g in alone] == [g.token_ids for g in group]


def test_a_twin_survives_its_leader(model, rng):
    """The leader leaves in the middle of the prefill that its twins wait for."""
    context = [rng.randrange(320) for _ in range(90)]
    group = [Generation(f"g{i}", context, SamplingParams(max_tokens=5), key=i) for i in range(3)]
    engine = NativeEngine(model, 4, 256, max_batch_tokens=40)
    engine.submit(group)
    engine.step()
    engine.abort(["g0"])
    while engine.pending():
        engine.step()
    assert [len(g.token_ids) for g in group] == [0, 5, 5]
    alone = fresh(group)
    run(NativeEngine(model, 1, 256), alone[1:])
    assert alone[1].token_ids == group[1].token_ids


def test_long_prompts_are_prefilled_in_chunks_while_others_decode(model, rng):
    short, long = requests(rng, 1, (5, 5), (30, 30)), requests(rng, 1, (200, 200), (5, 5))
    long[0].id = "long"
    engine = NativeEngine(model, 4, 512, max_batch_tokens=21)
    engine.submit(short)
    engine.step()
    engine.submit(long)
    progress = []
    while not long[0].token_ids:
        engine.step()
        progress.append(len(short[0].token_ids))
    assert progress == list(range(2, 2 + len(progress))), "one token a step, prefill or not"
    assert len(progress) == 10, "200 tokens, 20 a step beside one that decodes"


def test_results_do_not_depend_on_slots_chunks_or_company(model, rng):
    generations = requests(rng, 24, (1, 60), (1, 30))
    run(NativeEngine(model, 24, 256), generations)
    for slots, batch in ((1, 16), (5, 7), (9, 400)):
        again = fresh(generations)
        rng.shuffle(again)
        run(NativeEngine(model, slots, 256, max_batch_tokens=batch), again)
        by_id = {g.id: g for g in again}
        for g in generations:
            assert by_id[g.id].token_ids == g.token_ids
            assert by_id[g.id].logprobs == pytest.approx(g.logprobs, abs=2e-5)


def test_kv_budget_bounds_what_is_allocated_and_preempts_the_youngest(model, rng):
    """Contexts outgrow the first width: slots halve, the youngest give way, results are the same."""
    generations = requests(rng, 8, (20, 200), (250, 300))
    engine = NativeEngine(model, 8, 1024, kv_budget_tokens=8 * 256)
    engine.submit(generations)
    per_token = None
    order = []
    while engine.pending():
        order += [g.id for g in engine.step()]
        cache = engine._runner.cache
        assert cache.num_slots * cache.max_tokens <= 8 * 256
        assert 0 <= engine.stats().kv_used_fraction <= 1
        if per_token is None:
            per_token = cache.max_tokens
    assert engine._runner.cache.max_tokens == 512, "the widest that was needed"
    assert per_token == 256
    assert engine.stats().prefilled_tokens > sum(len(g.context_ids) for g in generations), (
        "some were recomputed"
    )
    assert order.index("g0") < 4, "the oldest never gave way"
    free = fresh(generations)
    run(NativeEngine(model, 8, 1024), free)
    assert [g.token_ids for g in free] == [g.token_ids for g in generations]


def test_a_budget_below_one_sequence_is_refused(model):
    with pytest.raises(ValueError, match="cannot hold one sequence"):
        NativeEngine(model, 8, 512, kv_budget_tokens=500)


def test_throttle_follows_its_three_signals():
    throttle = Throttle(64)
    assert throttle.limit(active=64, queued=100, utilisation=0.5) == 64
    limits = [throttle.limit(active, 100, 0.99) for active in (64, 58, 52)]
    assert limits == [58, 53, 47], "a tenth at a time while the cache is tight"
    assert throttle.limit(47, 100, 0.85) == 47, "between the marks it rests"
    assert throttle.limit(47, 0, 0.5) == 47, "nobody waits: no reason to grow"
    assert throttle.limit(20, 100, 0.5) == 47, "the limit does not bind: no reason to grow"
    assert throttle.limit(47, 100, 0.5) == 52
    throttle.preempted(10)
    assert throttle.limit(10, 100, 0.85) == 10
    for _ in range(50):
        throttle.limit(1, 0, 1.0)
    assert throttle.limit(1, 0, 1.0) == 1, "never below one"


@pytest.mark.parametrize("keep_cache", [False, True])
def test_paused_sequences_resume_from_their_cache_where_asked(model, rng, keep_cache):
    generations = requests(rng, 5, (30, 60), (20, 30))
    whole = fresh(generations)
    run(NativeEngine(model, 8, 256), whole)
    engine = NativeEngine(model, 8, 256, keep_cache=keep_cache)
    engine.submit(generations)
    for _ in range(6):
        engine.step()
    prefilled = engine.stats().prefilled_tokens
    paused = engine.pause()
    assert engine._runner.cache is None, "nothing of the cache stays on the device"
    run(engine, paused)
    assert [g.token_ids for g in generations] == [g.token_ids for g in whole]
    recomputed = engine.stats().prefilled_tokens - prefilled
    assert recomputed == 0 if keep_cache else recomputed > sum(len(g.context_ids) for g in generations)


@pytest.mark.parametrize("reuse_stale", [False, True])
def test_a_kept_cache_outlives_a_weight_update_only_where_asked(model, rng, reuse_stale):
    served = build_model(ModelConfig(path="k3-nano", overrides={"vocab_size": 320}), seed=1)
    other = build_model(ModelConfig(path="k3-nano", overrides={"vocab_size": 320}), seed=2)
    engine = NativeEngine(served, 4, 256, keep_cache=True, reuse_stale=reuse_stale)
    (g,) = requests(rng, 1, (40, 40), (20, 20))
    engine.submit([g])
    for _ in range(10):
        engine.step()
    engine.pause()
    engine.load_weights(other.named_weights(), 1)
    run(engine, [g])
    fresh_score = engine.score([g.context_ids + g.token_ids], [50])[0]
    difference = max(abs(a - b) for a, b in zip(fresh_score, g.logprobs[10:], strict=True))
    assert (difference > 1e-2) if reuse_stale else (difference < 2e-5)


def test_running_sequences_keep_their_cache_through_an_update_where_asked(model, rng):
    served = build_model(ModelConfig(path="k3-nano", overrides={"vocab_size": 320}), seed=1)
    engine = NativeEngine(served, 4, 256, reuse_stale=True)
    (g,) = requests(rng, 1, (40, 40), (20, 20))
    engine.submit([g])
    for _ in range(5):
        engine.step()
    prefilled = engine.stats().prefilled_tokens
    engine.load_weights(list(model.named_weights()), 1)
    while engine.pending():
        engine.step()
    assert engine.stats().prefilled_tokens == prefilled
    assert g.versions == [0] * 5 + [1] * 15


def test_sleep_frees_memory(rng):
    """Level 1 frees the cache; level 2 the weights too: their storage is gone."""
    served = build_model(ModelConfig(path="k3-nano", overrides={"vocab_size": 320}), seed=1)
    weights = [(n, t.clone()) for n, t in served.named_weights()]
    engine = NativeEngine(served, 8, 256)

    def weight_bytes() -> int:
        return sum(t.untyped_storage().nbytes() for t in [*served.parameters(), *served.buffers()])

    (g,) = requests(rng, 1, (10, 10), (8, 8))
    run(engine, [g])
    full = weight_bytes()
    engine.sleep(1)
    assert engine._runner.cache is None
    assert weight_bytes() == full
    engine.wake()
    engine.sleep(2)
    assert weight_bytes() < 0.02 * full
    engine.wake()
    assert all(torch.isnan(t).all() for _, t in served.named_weights() if t.is_floating_point())
    engine.load_weights(weights, 0)
    (again,) = fresh([g])
    run(engine, [again])
    assert again.token_ids == g.token_ids


def test_not_a_number_fails_its_sequence_visibly(rng):
    served = build_model(ModelConfig(path="k3-nano", overrides={"vocab_size": 320}), seed=1)
    engine = NativeEngine(served, 4, 256)
    poisoned = [
        (n, torch.full_like(t, torch.nan) if n.endswith("norm.weight") else t)
        for n, t in served.named_weights()
    ]
    engine.load_weights([(n, t.clone()) for n, t in poisoned], 1)
    (g,) = requests(rng, 1, (10, 10), (8, 8))
    run(engine, [g])
    assert g.stop_reason is StopReason.ERROR
    assert "not a number" in g.error
    assert g.token_ids == []


def test_stop_strings_read_characters_that_tokens_split():
    """Against searching the whole decoded text after every token; three-byte characters, invalid bytes included."""
    rng = random.Random(0)

    def decode(ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    for _ in range(300):
        text = "".join(rng.choice(["a", "b", "é", "中", "€"]) for _ in range(12)).encode()
        if rng.random() < 0.3:
            text = text[:5] + b"\xff" + text[5:]
        ids = list(text)
        stop = "".join(rng.choice(["a", "b", "é", "中"]) for _ in range(rng.randint(1, 3)))
        matcher = StopStrings((stop,), decode)
        found = next((i for i in range(1, len(ids) + 1) if matcher.hit(ids[:i])), None)
        expected = next((i for i in range(1, len(ids) + 1) if stop in decode(ids[:i])), None)
        assert found == expected, (ids, stop)


def packed_logprobs(model: LanguageModel, part: list[Generation], replay: bool) -> list[torch.Tensor]:
    """Of each response, by one packed forward without a cache, as training computes them; in float64."""
    lengths = torch.tensor([0] + [len(g.context_ids) + len(g.token_ids) for g in part])
    cu = lengths.cumsum(0)
    ids = torch.tensor([t for g in part for t in g.context_ids + g.token_ids])
    with torch.no_grad():
        if replay:  # the newest token was never fed to the engine: it may take any experts
            rows = [np.concatenate([g.routing, g.routing[-1:]]) for g in part]
            with model.replay_routing(torch.from_numpy(np.concatenate(rows))):
                table = model.logits(model(ids, cu))
        else:
            table = model.logits(model(ids, cu))
    table = table.double().log_softmax(-1)
    out = []
    for start, g in zip(cu.tolist(), part):
        first = start + len(g.context_ids)
        span = torch.arange(first, first + len(g.token_ids))
        out.append(table[span - 1, ids[span]])
    return out


@pytest.mark.parametrize("family", ["attention", "k3"])
def test_logprobs_equal_a_packed_forward_over_ten_thousand_tokens(model, llama, family):
    """Same weights, float32, 2 to 500 tokens long: engine against the packed forward that training uses.

    K3's experts are replayed. Otherwise one near-tie of a router in some 30,000 falls the other way, which moves
    that token's log-prob by tenths.
    """
    served, rng = model if family == "k3" else llama, random.Random(4)
    generations = requests(rng, 70, (1, 250), (40, 250))
    engine = NativeEngine(served, 35, 512, max_batch_tokens=256, record_routing=family == "k3")
    run(engine, generations)
    differences = []
    for at in range(0, len(generations), 10):
        part = generations[at : at + 10]
        for g, expected in zip(part, packed_logprobs(served, part, replay=family == "k3"), strict=True):
            differences.append((expected - torch.tensor(g.logprobs, dtype=torch.float64)).abs())
    all_differences = torch.cat(differences)
    print(
        f"{len(all_differences)} tokens: max {all_differences.max():.2e}, mean {all_differences.mean():.2e}"
    )
    assert len(all_differences) > 9_000
    assert all_differences.max() < 1e-5


def test_recorded_routing_covers_every_token_through_pauses_and_groups(model, rng):
    context = [rng.randrange(320) for _ in range(40)]
    group = [Generation(f"g{i}", context, SamplingParams(max_tokens=20), key=i) for i in range(3)]
    engine = NativeEngine(model, 4, 256, max_batch_tokens=16, record_routing=True)
    engine.submit(group)
    for _ in range(10):
        engine.step()
    run(engine, engine.pause())
    for g in group:
        assert g.routing.shape == (59, 3, 2)
        assert g.routing.dtype == np.int16
        close = packed_logprobs(model, [g], replay=True)[0]
        assert g.logprobs == pytest.approx(close.tolist(), abs=1e-5)
