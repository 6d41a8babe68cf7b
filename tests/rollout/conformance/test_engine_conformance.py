"""What every engine promises (`rollout.engine.Engine`), tested alike on all of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from engine_labs import EOS, MAX_CONTEXT, SLOTS, VOCAB, Lab, decode

from k3rl.types import StopReason
from rollout.engine import Generation, SamplingParams


def close(a: list[float], b: list[float], tolerance: float) -> None:
    assert len(a) == len(b)
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


# -- tokens and log-probs ----------------------------------------------------------------------


def test_greedy_equals_the_reference(lab: Lab):
    """For the transformers models the reference is `transformers.generate`. Ragged prompts, more than
    slots."""
    requests = [
        lab.request(n, temperature=0.0, max_tokens=20) for n in (1, 2, 3, 7, 16, 33, 64, 65, 100, 130)
    ]
    lab.run(*requests)
    for g in requests:
        assert g.token_ids == lab.generate(g.context_ids, 20)
        close(g.logprobs, lab.logprobs(g), lab.tolerance)


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.6}, {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1},
     {"temperature": 1.5, "top_p": 0.7, "top_k": 30, "min_p": 0.01}],
    ids=str,
)  # fmt: skip
def test_logprobs_are_those_of_the_processed_distribution(lab: Lab, settings: dict[str, float]):
    """Recomputed from the reference's logits by definition; and nothing outside the kept set is drawn."""
    requests = [lab.request(n, **settings) for n in (3, 9, 40)]
    lab.run(*requests)
    for g in requests:
        logits = lab.logits(g.context_ids + g.token_ids, "a")[len(g.context_ids) - 1 : -1].double().numpy()
        expected = [
            np.log(processed(row, g.sampling)[token]) for row, token in zip(logits, g.token_ids, strict=True)
        ]
        close(g.logprobs, expected, lab.tolerance / settings.get("temperature", 1.0))


def processed(logits: np.ndarray, p: SamplingParams) -> np.ndarray:
    """Temperature, min-p, top-k, top-p, in that order, by definition."""
    probs = np.exp((logits - logits.max()) / p.temperature)
    order = np.argsort(-probs)
    keep = [i for i in order if probs[i] >= p.min_p]
    keep = keep[: p.top_k] if p.top_k else keep
    mass = np.cumsum(probs[keep]) / probs[keep].sum()
    nucleus = keep[: int(np.searchsorted(mass, p.top_p)) + 1] if p.top_p < 1 else keep
    out = np.zeros_like(probs)
    out[nucleus] = probs[nucleus] / probs[nucleus].sum()
    return out


def test_mixed_settings_in_one_batch_keep_apart(lab: Lab):
    requests = [lab.request(10, temperature=0.0), lab.request(10), lab.request(10, top_k=1)]
    lab.run(*requests)
    assert requests[0].token_ids == lab.generate(requests[0].context_ids, 16)
    close(requests[1].logprobs, lab.logprobs(requests[1]), lab.tolerance)
    assert requests[2].token_ids == lab.generate(requests[2].context_ids, 16)
    close(requests[2].logprobs, [0.0] * 16, lab.tolerance)


def test_same_key_same_response_whatever_the_neighbours(lab: Lab):
    alone = lab.request(20)
    lab.run(alone)
    again = lab.request(alone.context_ids, key=alone.key)
    other = lab.request(alone.context_ids, key=alone.key + 1)
    lab.run(*[lab.request(n) for n in (5, 50)], again, other, lab.request(31))
    assert again.token_ids == alone.token_ids
    close(again.logprobs, alone.logprobs, lab.tolerance)
    assert other.token_ids != alone.token_ids


def test_samples_of_one_group_differ_and_agree_with_their_prefix(lab: Lab):
    context = lab.request(30).context_ids
    group = [lab.request(context) for _ in range(SLOTS + 3)]
    lab.run(*group)
    assert len({tuple(g.token_ids) for g in group}) > SLOTS // 2
    for g in group:
        close(g.logprobs, lab.logprobs(g), lab.tolerance)


# -- ends ----------------------------------------------------------------------


def sampled(lab: Lab, n: int = 12, **settings: object) -> tuple[list[int], list[int]]:
    """Context and a greedy response to cut: what an engine without stop rules would say."""
    context = lab.request(n).context_ids
    return context, lab.generate(context, 24)


def test_end_of_sequence_ends_unless_ignored(lab: Lab):
    """At temperature 2 one token in some hundreds is EOS: wait for two responses that end so."""
    found = 0
    for _ in range(40):
        g = lab.request(8, ignore_eos=False, max_tokens=60, temperature=2.0)
        lab.run(g)
        if g.stop_reason is StopReason.END_OF_TURN:
            found += 1
            assert g.token_ids[-1] == EOS
            assert EOS not in g.token_ids[:-1]
        else:
            assert g.stop_reason is StopReason.MAX_TOKENS
            assert EOS not in g.token_ids
        if found == 2:
            break
    assert found == 2
    ignored = lab.request(g.context_ids, key=g.key, max_tokens=60, temperature=2.0)
    lab.run(ignored)
    assert ignored.stop_reason is StopReason.MAX_TOKENS
    assert ignored.token_ids[: len(g.token_ids)] == g.token_ids


def test_stop_ids_end_with_the_token_kept(lab: Lab):
    context, response = sampled(lab)
    stop = response[9]
    g = lab.request(context, temperature=0.0, max_tokens=24, stop_token_ids=(stop,))
    lab.run(g)
    assert g.stop_reason is StopReason.END_OF_TURN
    assert g.token_ids == response[: response.index(stop) + 1]
    assert len(g.logprobs) == len(g.versions) == len(g.token_ids)


def test_stop_strings_cross_the_borders_of_tokens(lab: Lab):
    context, response = sampled(lab)
    text = decode(response)
    for start, size in ((4, 1), (5, 2), (6, 5)):
        stop = text[start : start + size]
        g = lab.request(context, temperature=0.0, max_tokens=24, stop_strings=("never said", stop))
        lab.run(g)
        ends = next(i for i in range(1, 25) if stop in decode(response[:i]))
        assert g.stop_reason is StopReason.STOP_STRING
        assert g.token_ids == response[:ends]


def test_budget_is_the_trajectorys(lab: Lab):
    """Tokens that exist count: 10 of 16 leave 6 (spec/10 row 80)."""
    g = lab.request(12, max_tokens=16)
    lab.engine.submit([g])
    while len(g.token_ids) < 10:
        lab.engine.step()
    assert lab.engine.pause() == [g]
    assert not g.done
    lab.run(g)
    assert g.stop_reason is StopReason.MAX_TOKENS
    assert len(g.token_ids) == 16
    spent = Generation(
        "spent", g.context_ids, g.sampling, 1, 0, "", list(g.token_ids), list(g.logprobs), list(g.versions)
    )
    lab.run(spent)
    assert spent.stop_reason is StopReason.MAX_TOKENS
    assert len(spent.token_ids) == 16


def test_context_limit_is_told_from_the_budget(lab: Lab):
    g = lab.request(MAX_CONTEXT - 5, max_tokens=50)
    lab.run(g)
    assert g.stop_reason is StopReason.MAX_CONTEXT
    assert len(g.token_ids) == 5


@pytest.mark.parametrize(
    ("change", "words"),
    [({"context_ids": []}, "empty context"), ({"context_ids": [5] * MAX_CONTEXT}, "leaves no room"),
     ({"context_ids": [VOCAB]}, "token ids"), ({"sampling": SamplingParams(max_tokens=0)}, "max_tokens"),
     ({"stop_reason": StopReason.MAX_TOKENS}, "already finished"), ({"token_ids": [5]}, "differ in number")],
    ids=str,
)  # fmt: skip
def test_a_request_that_cannot_be_served_is_refused_with_all_it_came_with(lab: Lab, change: dict, words: str):
    bad, good = lab.request(5), lab.request(5)
    for name, value in change.items():
        setattr(bad, name, value)
    with pytest.raises(ValueError, match=words):
        lab.engine.submit([good, bad])
    assert lab.engine.pending() == 0


def test_an_id_may_be_in_the_engine_once(lab: Lab):
    g = lab.request(5)
    lab.engine.submit([g])
    with pytest.raises(ValueError, match="already queued or running"):
        lab.engine.submit([g])


# -- leaving and coming back ----------------------------------------------------------------------


def test_abort_takes_out_only_those_named(lab: Lab):
    requests = [lab.request(10, max_tokens=20) for _ in range(SLOTS + 2)]  # the last two wait
    lab.engine.submit(requests)
    for _ in range(6):
        lab.engine.step()
    gone = [requests[1], requests[-1]]
    assert {g.id for g in lab.engine.abort([g.id for g in gone] + ["nobody"])} == {g.id for g in gone}
    assert all(g.stop_reason is StopReason.ABORTED for g in gone)
    lengths = [len(g.token_ids) for g in gone]
    finished = lab.drain()
    assert {g.id for g in finished} == {g.id for g in requests} - {g.id for g in gone}
    assert [len(g.token_ids) for g in gone] == lengths


def test_pause_at_any_token_loses_and_doubles_nothing(lab: Lab):
    """Greedy, cut at every position: the whole equals one pass."""
    context, response = sampled(lab, 40)
    for cut in range(0, 24, 1 if lab.exact_stream else 5):
        g = lab.request(context, temperature=0.0, max_tokens=24)
        lab.engine.submit([g])
        while len(g.token_ids) < cut:
            lab.engine.step()
        kept = list(g.token_ids)
        assert lab.engine.pause() == [g]
        assert lab.engine.pending() == 0
        assert lab.engine.step() == []
        lab.run(g)
        assert g.token_ids == response
        assert g.token_ids[: len(kept)] == kept
        assert len(g.logprobs) == len(g.versions) == 24


def test_pause_is_oldest_first_and_covers_the_waiting(lab: Lab):
    requests = [lab.request(10) for _ in range(SLOTS + 4)]
    lab.engine.submit(requests)
    for _ in range(4):
        lab.engine.step()
    assert [g.id for g in lab.engine.pause()] == [g.id for g in requests]


def test_a_resumed_sample_draws_what_it_would_have_drawn(lab: Lab):
    whole = lab.request(25, max_tokens=24)
    lab.run(whole)
    cut = lab.request(whole.context_ids, key=whole.key, max_tokens=24)
    for stop in (1, 7, 8, 15):
        lab.engine.submit([cut])
        while len(cut.token_ids) < stop:
            lab.engine.step()
        lab.engine.pause()
    lab.run(cut)
    close(cut.logprobs, lab.logprobs(cut), lab.tolerance)
    if lab.exact_stream:
        assert cut.token_ids == whole.token_ids
    else:  # reproducible all the same: the same cuts give the same tokens
        again = lab.request(whole.context_ids, key=whole.key, max_tokens=24)
        for stop in (1, 7, 8, 15):
            lab.engine.submit([again])
            while len(again.token_ids) < stop:
                lab.engine.step()
            lab.engine.pause()
        lab.run(again)
        assert again.token_ids == cut.token_ids


def test_offset_continues_the_stream_of_an_earlier_turn(lab: Lab):
    """The second half, asked for as a turn of its own at offset 12, draws the same tokens."""
    whole = lab.request(25, max_tokens=24)
    lab.run(whole)
    second = lab.request(whole.context_ids + whole.token_ids[:12], key=whole.key, max_tokens=12)
    second.offset = 12
    lab.run(second)
    if lab.exact_stream:
        assert second.token_ids == whole.token_ids[12:]
    close(second.logprobs, lab.logprobs(second), lab.tolerance)


# -- weights ----------------------------------------------------------------------


def test_weight_update_between_tokens_is_stamped_and_leaves_no_stale_cache(lab: Lab):
    g = lab.request(30, max_tokens=20)
    lab.engine.submit([g])
    while len(g.token_ids) < 8:
        lab.engine.step()
    lab.engine.load_weights(lab.weights["b"], 7)
    at = len(g.token_ids)
    lab.drain()
    assert g.versions == [0] * at + [7] * (20 - at)
    assert lab.engine.stats().version == 7
    close(g.logprobs[:at], lab.logprobs(g, "a")[:at], lab.tolerance)
    close(g.logprobs[at:], lab.logprobs(g, "b")[at:], lab.tolerance)


def test_the_same_prompt_before_and_after_an_update_follows_its_weights(lab: Lab):
    """Prefix caches included (spec/10 rows 16 and 17): there, and back again."""
    context = lab.request(100).context_ids
    for version, name in ((1, "b"), (2, "a"), (3, "b")):
        lab.engine.load_weights(lab.weights[name], version)
        for _ in range(2):
            g = lab.request(context)
            lab.run(g)
            close(g.logprobs, lab.logprobs(g, name), lab.tolerance)
            assert g.versions == [version] * 16


@pytest.mark.parametrize("fault", ["missing", "twice", "foreign", "shape", "dtype"])
def test_a_faulty_update_is_refused_and_changes_nothing(lab: Lab, fault: str):
    weights = list(lab.weights["b"])
    name, tensor = weights[len(weights) // 2]
    faulty = {
        "missing": weights[:-1],
        "twice": [*weights, weights[0]],
        "foreign": [*weights, ("model.extra.weight", tensor)],
        "shape": [(n, torch.cat([t, t]) if n == name else t) for n, t in weights],
        "dtype": [(n, t.double() if n == name else t) for n, t in weights],
    }[fault]
    before = lab.request(20)
    lab.run(before)
    with pytest.raises(ValueError, match="weight"):
        lab.engine.load_weights(iter(faulty), 9)
    assert lab.engine.stats().version == 0
    after = lab.request(before.context_ids, key=before.key)
    lab.run(after)
    assert after.token_ids == before.token_ids


def test_scoring_matches_the_reference_and_sampling(lab: Lab):
    requests = [lab.request(n, max_tokens=12) for n in (1, 6, 70)]
    lab.run(*requests)
    sequences = [g.context_ids + g.token_ids for g in requests]
    scores = lab.engine.score(sequences, [len(g.context_ids) for g in requests])
    for g, score in zip(requests, scores, strict=True):
        close(score, lab.logprobs(g), lab.tolerance)
        close(score, g.logprobs, lab.tolerance)
    whole = lab.engine.score([sequences[2]], [1])[0]
    close(whole[-12:], scores[2], lab.tolerance)
    full = [*lab.request(MAX_CONTEXT - 1).context_ids, 5]
    assert len(lab.engine.score([full], [MAX_CONTEXT - 1])[0]) == 1
    with pytest.raises(ValueError, match="scored from 0"):
        lab.engine.score([full], [0])


def test_scoring_leaves_running_generations_alone(lab: Lab):
    alone = lab.request(20, max_tokens=20)
    lab.run(alone)
    g = lab.request(alone.context_ids, key=alone.key, max_tokens=20)
    lab.engine.submit([g])
    for _ in range(5):
        lab.engine.step()
    lab.engine.score([lab.request(50).context_ids], [10])
    lab.drain()
    assert g.token_ids == alone.token_ids
    assert g.done


# -- memory ----------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake(lab: Lab, level: int):
    """Level 1 goes on as before; level 2 refuses to generate until weights came (spec/09 trap 9)."""
    g = lab.request(20, max_tokens=20)
    lab.engine.submit([g])
    lab.engine.step()
    with pytest.raises(RuntimeError, match="pause before sleeping"):
        lab.engine.sleep(level)
    lab.engine.pause()
    lab.engine.sleep(level)
    for call in (lambda: lab.engine.submit([g]), lab.engine.step, lambda: lab.engine.score([[5, 6]], [1])):
        with pytest.raises(RuntimeError, match="sleeps"):
            call()
    with pytest.raises(RuntimeError, match="already sleeps"):
        lab.engine.sleep(level)
    lab.engine.wake()
    with pytest.raises(RuntimeError, match="awake"):
        lab.engine.wake()
    if level == 2:
        with pytest.raises(RuntimeError, match="no weights"):
            lab.engine.submit([g])
        lab.engine.load_weights(lab.weights["b"], 4)
    lab.run(g)
    name, version = ("b", 4) if level == 2 else ("a", 0)
    assert g.versions[-1] == version
    close(g.logprobs[1:], lab.logprobs(g, name)[1:], lab.tolerance)


def test_stats_count(lab: Lab):
    before = lab.engine.stats()
    requests = [lab.request(10, max_tokens=6) for _ in range(SLOTS + 2)]
    lab.engine.submit(requests)
    seen = []
    while lab.engine.pending():
        lab.engine.step()
        seen.append(lab.engine.stats())
    assert max(s.running for s in seen) == SLOTS
    assert any(s.queued == 2 for s in seen)
    assert max(s.kv_used_fraction for s in seen) > 0
    assert seen[-1].running == seen[-1].queued == 0
    assert seen[-1].generated_tokens - before.generated_tokens == 6 * (SLOTS + 2)
    assert all(a.generated_tokens <= b.generated_tokens for a, b in itertools.pairwise(seen))
