"""Muon and quantile balancing as a trainer's choices: configured, stepped, saved and resumed bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from trainer_data import make_conversations, make_trajectories, nano, state_of

from k3rl.config.trainer import AdamWConfig, MuonConfig, ScheduleConfig, TrainerConfig
from k3rl.optim import FrozenBalancing, Muon, QuantileBalancing
from k3rl.trainer import TrainerWorker
from k3rl.trainer.optimizer import rate


def make(dtype: torch.dtype | None = None, **fields: object) -> TrainerWorker:
    config = TrainerConfig.model_validate({"optimizer": {"type": "muon", "lr": 3e-3}, **fields})
    return TrainerWorker(nano(dtype=dtype), config, device="cpu")


def test_the_optimiser_is_chosen_by_type_and_adamw_needs_none() -> None:
    assert isinstance(TrainerConfig.model_validate({"optimizer": {"lr": 1.0}}).optimizer, AdamWConfig)
    assert isinstance(TrainerConfig.model_validate({"optimizer": {"type": "muon"}}).optimizer, MuonConfig)
    assert isinstance(TrainerConfig().balancing, FrozenBalancing)
    with pytest.raises(ValidationError, match="moun"):
        TrainerConfig.model_validate({"optimizer": {"type": "moun"}})


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_training_with_muon_lowers_the_loss_and_moves_every_matrix(dtype: torch.dtype | None) -> None:
    w = make(dtype)
    assert isinstance(w.optimizer, Muon)
    before = {n: t.clone() for n, t in w.model.named_weights()}
    losses = [w.sft_step(make_conversations(0))["train/loss"] for _ in range(6)]
    assert losses[-1] < losses[0] - 0.1, losses
    w.step(make_trajectories(1))
    still = {n for n, t in w.model.named_weights() if torch.equal(t, before[n])}
    assert all("e_score" in n or "layers.0.self_attention_res" in n or "A_log" in n for n in still), still


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    one = make(balancing={"type": "quantile"})
    for i in range(2):
        one.step(make_trajectories(i))
    one.save(tmp_path / "step-2")
    two = make(balancing={"type": "quantile"})
    two.load(tmp_path / "step-2")
    for w in (one, two):
        w.step(make_trajectories(7))
    a, b = state_of(one), state_of(two)
    assert a.keys() == b.keys()
    assert any(name.startswith("momentum_buffer/") for name in a)
    assert all(torch.equal(a[n], b[n]) for n in a)
    for (name, x), (_, y) in zip(one.model.named_weights(), two.model.named_weights(), strict=True):
        assert torch.equal(x, y), name


def test_biases_move_once_a_step_where_asked_and_are_published() -> None:
    w = make(balancing=QuantileBalancing().model_dump(), micro_batch_tokens=60)
    name = next(n for n, _ in w.model.named_weights() if "e_score_correction_bias" in n)
    w.step(make_trajectories(0))
    first = dict(w.named_weights())[name].clone()
    assert bool((first != 0).any())
    w.score(make_trajectories(1))
    w.canary()
    assert torch.equal(dict(w.named_weights())[name], first)


def test_qk_clip_bounds_the_logits_in_training() -> None:
    w = make(optimizer={"type": "muon", "lr": 1e-5, "qk_clip": 1e-3})
    layer = w.model.model.layers[1].self_attn
    before = layer.q_b_proj.weight.detach().clone()
    w.sft_step(make_conversations(0))
    assert float(layer.q_b_proj.weight.detach().norm() / before.norm()) < 0.9
    off = make(optimizer={"type": "muon", "lr": 1e-5, "qk_clip": 0})
    assert not off.model.model.layers[1].self_attn.track_max_logit


def test_warm_up_stable_decay_has_three_straight_parts() -> None:
    schedule = ScheduleConfig(shape="wsd", warmup_steps=2, stable_steps=3, decay_steps=4, final_fraction=0.2)
    wanted = [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    assert [rate(schedule, i) for i in range(11)] == pytest.approx(wanted)
    with pytest.raises(ValidationError, match="stable_steps has no effect"):
        ScheduleConfig(shape="cosine", decay_steps=5, stable_steps=3)


def test_cosine_ends_where_it_should() -> None:
    schedule = ScheduleConfig(shape="cosine", warmup_steps=1, decay_steps=4, final_fraction=0.1)
    assert [rate(schedule, i) for i in (0, 1, 3, 5, 9)] == pytest.approx([1.0, 1.0, 0.55, 0.1, 0.1])
