"""One rank: the update doesn't depend on how the batch is cut, packed or ordered; odd input is defined."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from trainer_data import close, make_conversations, make_trajectories, nano, same, state_of, worker

from k3rl.algorithms import K25Config
from k3rl.algorithms.ppo import PpoConfig
from k3rl.errors import RunError
from k3rl.models import ModelConfig, build_model
from k3rl.trainer.packing import plan, spread
from k3rl.types import Author, Status


def weights(w):
    return torch.cat([t.flatten() for t in w.parameters.values()]).detach().clone()


@pytest.mark.parametrize("micro_batch_tokens", [1, 97, 10_000])
def test_the_cut_into_micro_batches_changes_nothing(micro_batch_tokens):
    """1: every sequence alone (no packing). 10,000: everything packed into one pass."""
    data = make_trajectories(5)
    reference = worker(micro_batch_tokens=400)
    reference.step(data)
    w = worker(micro_batch_tokens=micro_batch_tokens)
    w.step(data)
    assert close(w, reference)


def test_packed_equals_each_sequence_alone_in_every_trained_logprob():
    data = make_trajectories(6)
    packed, alone = worker(micro_batch_tokens=10_000), worker(micro_batch_tokens=1)
    for a, b in zip(packed.score(data), alone.score(data), strict=True):
        assert a == pytest.approx(b, abs=1e-5)


def test_logprobs_are_those_of_a_plain_forward_at_the_samplers_temperature():
    data = make_trajectories(7, groups=1)
    w = worker()
    w.policy.temperature = 0.6
    for t, row in zip(data, w.score(data), strict=True):
        ids = torch.tensor([*t.prompt_ids, *t.token_ids])
        with torch.no_grad():
            logits = w.model.logits(w.model(ids, torch.tensor([0, len(ids)])))
        logp = (logits / 0.6).log_softmax(-1)
        where = [len(t.prompt_ids) + i for i, m in enumerate(t.sampled_mask) if m]
        assert row == pytest.approx([logp[i - 1, ids[i]].item() for i in where], abs=1e-5)


def test_order_of_trajectories_changes_nothing():
    """spec/10 row 46: rewards attached to other samples after a shuffle."""
    data = make_trajectories(8)
    a, b = worker(), worker()
    a.step(data)
    order = np.random.default_rng(0).permutation(len(data))
    b.step([data[i] for i in order])
    assert close(a, b)


def test_environment_tokens_carry_no_loss_but_are_read():
    data = make_trajectories(9)
    t = next(t for t in data if len(t.segments) > 1)
    w = worker()
    before = w.score([t])[0]
    t.segments[1].token_ids = [(i + 1) % 512 for i in t.segments[1].token_ids]
    after = w.score([t])[0]
    first = len(t.segments[0])
    assert before[:first] == pytest.approx(after[:first], abs=1e-6)
    assert before[first:] != pytest.approx(after[first:], abs=1e-6)
    assert len(after) == sum(len(s) for s in t.segments if s.author is Author.MODEL)


def test_trainer_logprobs_are_stored_with_their_trajectory_before_the_update():
    data = make_trajectories(10)
    w = worker(micro_batch_tokens=60)
    scored = w.score(data)
    metrics = w.step(data)
    for t, row in zip(data, scored, strict=True):
        assert t.trainer_logprobs == pytest.approx(row, abs=1e-6)
    gaps = [abs(a - b) for t in data for a, b in zip(t.trainer_logprobs, t.logprobs, strict=True)]
    assert metrics["rollout/logprob_diff"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-5)
    assert w.score(data)[0] != pytest.approx(scored[0], abs=1e-6)


def test_a_positive_advantage_raises_the_probability_of_what_was_done():
    data = make_trajectories(11, groups=1, samples=2)
    w = worker(lr=1e-3, objective=K25Config(tau=0.0))
    for t, row, a in zip(data, w.score(data), (1.0, -1.0), strict=True):
        start = 0
        for s in t.segments:
            if s.author is Author.MODEL:
                s.logprobs = row[start : start + len(s)]
                start += len(s)
        t.advantage = a
    before = [sum(r) for r in w.score(data)]
    w.step(data)
    after = [sum(r) for r in w.score(data)]
    assert after[0] > before[0]
    assert after[1] < before[1]


def test_sft_lowers_the_loss_and_weights_tokens_globally():
    data = make_conversations(3)
    w = worker()
    losses = [w.sft_step(data)["train/loss"] for _ in range(5)]
    assert losses[-1] < losses[0] - 0.3
    reference = worker()
    total = count = 0.0
    for ids, mask, weight in data:
        tokens = torch.tensor(ids)
        logp = reference.model.logits(reference.model(tokens, torch.tensor([0, len(ids)]))).log_softmax(-1)
        for i in range(1, len(ids)):
            if mask[i]:
                total -= weight * logp[i - 1, ids[i]].item()
                count += weight
    assert losses[0] == pytest.approx(total / count, rel=1e-5)


def test_sft_is_the_same_in_one_pass_and_in_many():
    data = make_conversations(4)
    a, b = worker(micro_batch_tokens=10_000), worker(micro_batch_tokens=1)
    a.sft_step(data)
    b.sft_step(data)
    assert close(a, b)


def test_several_minibatches_and_epochs_use_the_logprobs_from_before_the_first_update():
    data = make_trajectories(12)
    w = worker(lr=1e-3, minibatches=2, epochs=2, objective=PpoConfig())
    scored = w.score(data)
    metrics = w.step(data)
    assert w.version == 4
    assert metrics["train/updates"] == 4
    assert metrics["ratio/proximal"] != pytest.approx(1.0, abs=1e-6)  # later updates are off pi_old
    for t, row in zip(data, scored, strict=True):
        if t.trainer_logprobs is not None:
            assert len(t.trainer_logprobs) == len(row)


# -- odd input
# ------------------------------------------------------------------------------------------------


def test_an_empty_batch_is_no_update():
    w = worker()
    before = state_of(w)
    metrics = w.step([])
    assert (metrics["train/updates"], w.version) == (0, 0)
    assert same(before, state_of(w))
    assert w.sft_step([])["train/updates"] == 0
    assert w.sft_step([([1, 2, 3], [False] * 3, 1.0)])["train/updates"] == 0


def test_all_zero_advantages_move_nothing_but_the_regulariser():
    data = make_trajectories(13)
    for t in data:
        t.advantage = 0.0
    w = worker(objective=K25Config(tau=0.0))
    metrics = w.step(data)
    assert metrics["train/grad_norm"] == 0.0
    assert metrics["advantage/zero_share"] == 1.0
    assert torch.equal(weights(w), weights(worker()))


def test_nan_advantage_reward_or_logprob_never_reaches_the_weights():
    for change in ("advantage", "logprob"):
        data = make_trajectories(14)
        if change == "advantage":
            data[3].advantage = math.nan
        else:
            data[3].segments[0].logprobs[0] = math.nan
        w = worker()
        with pytest.raises(ValueError, match=f"trajectory {data[3].id}"):
            w.step(data)
        assert w.version == 0
        assert torch.equal(weights(w), weights(worker()))


def test_a_gradient_that_is_not_finite_stops_before_the_weights():
    w = worker()
    before = weights(w)
    with torch.no_grad():
        w.model.model.norm.weight[0] = float("nan")
    version = w.version
    with pytest.raises(RunError, match="gradient isn't finite at version 0"):
        w.step(make_trajectories(15))
    assert w.version == version
    after = weights(w)
    assert int(torch.isnan(after).sum()) == 1  # only the one that was put there
    assert torch.equal(after[~torch.isnan(after)], before[~torch.isnan(after)])


def test_one_token_responses_and_truncated_ones():
    data = make_trajectories(16, lengths=(1, 1))
    for t in data:
        t.status = Status.TRUNCATED
    metrics = worker().step(data)
    assert metrics["response/truncated_share"] == 1.0
    assert math.isfinite(metrics["train/loss"])


def test_records_that_do_not_fit_are_refused():
    w = worker()
    data = make_trajectories(17)
    data[0].token_advantages = [0.0]
    with pytest.raises(ValueError, match="1 values of advantage for"):
        w.step(data)
    data = make_trajectories(17)
    data[0].advantage = None
    with pytest.raises(ValueError, match="has no advantage"):
        w.step(data)
    data = make_trajectories(17)
    data[0].segments[0].policy_version = 5
    with pytest.raises(ValueError, match="version 5 sampled it, the trainer is at 0"):
        w.step(data)
    data = make_trajectories(17)
    data[0].prompt_ids = []
    with pytest.raises(ValueError, match="no prompt before it"):
        w.step(data)


def test_a_sequence_beyond_the_models_context_is_refused():
    small = build_model(ModelConfig(path="k3-nano", overrides={"max_position_embeddings": 8}), 0)
    with pytest.raises(ValueError, match="exceeds the model's context of 8"):
        worker(model=small).step(make_trajectories(18))


def test_every_metric_is_finite_on_an_ordinary_step():
    metrics = worker().step(make_trajectories(19))
    assert all(math.isfinite(v) for v in metrics.values()), metrics
    assert metrics["staleness/share_0"] == 1.0


# -- plans
# ----------------------------------------------------------------------------------------------------


def test_plans_hold_every_sequence_once_within_the_budget():
    rng = np.random.default_rng(1)
    for _ in range(50):
        lengths = rng.integers(1, 120, rng.integers(0, 40)).tolist()
        bins = plan(lengths, 100)
        assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
        assert all(sum(lengths[i] for i in b) <= 100 or len(b) == 1 for b in bins)
        shares = spread(lengths, 3)
        assert sorted(i for s in shares for i in s) == list(range(len(lengths)))
        if lengths:
            loads = [sum(lengths[i] for i in s) for s in shares]
            assert max(loads) - min(loads) <= max(lengths)


def test_bfloat16_with_master_weights_keeps_small_updates():
    """Updates of 1e-5 round to nothing in bfloat16 alone, and add up in float32 masters."""
    data = make_conversations(5)

    def moved(masters: bool) -> float:
        w = worker(lr=1e-6, model=nano(dtype=torch.bfloat16), master_weights=masters)
        start = {n: t.detach().float().clone() for n, t in w.masters.targets.items()}
        for _ in range(3):
            w.sft_step(data)
        part = [
            (t.detach().float() - start[n]).abs().mean()
            for n, t in w.masters.targets.items()
            if w.parameters[n].dtype is torch.bfloat16
        ]
        return float(torch.stack(part).mean())

    assert moved(True) == pytest.approx(3e-6, rel=0.3)
    assert moved(False) < 1.5e-6
