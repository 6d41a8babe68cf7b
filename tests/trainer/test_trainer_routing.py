"""Router replay: with the engine's choices every token takes the same experts; without, it is counted."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from trainer_data import make_trajectories, nano, worker

from k3rl.trainer import TrainerWorker
from k3rl.types import Author, Channel, Effort, Segment, Status, Trajectory
from rollout.engine import Generation, SamplingParams
from rollout.native.engine import NativeEngine


def record(model, trajectories) -> None:
    """What an engine would note, without the last token, which it samples and never reads."""
    for t in trajectories:
        ids = torch.tensor([*t.prompt_ids, *t.token_ids])
        with torch.no_grad(), model.record_routing() as noted:
            model(ids, torch.tensor([0, len(ids)]))
        t.routing = noted.ids_TLK().numpy()[:-1]


def test_replay_takes_the_engines_experts_on_every_token():
    engine = nano(1)
    with torch.no_grad():  # an engine whose router rounds differently
        for name, p in engine.named_parameters():
            if name.endswith("gate.weight"):
                p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    data = make_trajectories(3)
    record(engine, data)
    without = worker(replay_routing=False).step(data)
    assert without["moe/replay_disagreement"] > 0.01
    replayed = worker(replay_routing=True).step(data)
    assert replayed["moe/replay_disagreement"] == 0.0
    assert replayed["moe/load_max_over_mean"] >= 1.0


def sampled(seed: int, count: int = 12) -> list[Trajectory]:
    """Trajectories that the engine really samples, in packed steps with others, under weights of the same seed."""
    rng = random.Random(seed)
    generations = [
        Generation(
            f"g{i}",
            [rng.randrange(320) for _ in range(rng.randint(2, 30))],
            SamplingParams(max_tokens=rng.randint(1, 40), ignore_eos=True),
            key=i,
        )
        for i in range(count)
    ]
    engine = NativeEngine(nano(1).eval(), 4, 128, max_batch_tokens=16, record_routing=True)
    engine.submit(generations)
    finished = 0
    while finished < count:
        finished += len(engine.step())
    out = []
    for i, g in enumerate(generations):
        segment = Segment(Author.MODEL, Channel.RESPONSE, g.token_ids, g.logprobs, 0)
        t = Trajectory("p", i // 4, i % 4, "general", Effort.LOW, g.context_ids, [segment])
        t.status, t.advantage, t.routing = Status.COMPLETE, rng.uniform(-1, 1), g.routing
        out.append(t)
    return out


def chosen(w: TrainerWorker, data: list[Trajectory]) -> tuple[int, int]:
    """(token, layer) pairs at which the trainer's next step takes the engine's experts, and all of them."""
    same_, all_ = [], []
    count = w.experts._count

    def watched(ids_TLK: torch.Tensor, recorded_TLK: torch.Tensor, read_T: torch.Tensor) -> None:
        same = (ids_TLK.sort(-1).values == recorded_TLK.sort(-1).values).all(-1)
        same_.append(int(same.sum()))
        all_.append(same.numel())
        count(ids_TLK, recorded_TLK, read_T)

    w.experts._count = watched
    w.step(data)
    return sum(same_), sum(all_)


def test_trainer_and_engine_agree_on_every_token_of_what_the_engine_sampled():
    """The trainer's router has moved on by 4 steps of a high rate: its own choices are others."""
    data = sampled(1)
    tokens = sum(len(t.prompt_ids) + len(t.token_ids) for t in data)
    found = {}
    for replay in (True, False):
        w = worker(lr=3e-2, replay_routing=replay)
        for seed in range(4):
            w.step(make_trajectories(seed))
        found[replay] = chosen(w, data)
        metrics = w.step(data)
        pairs = found[replay][1]
        assert pairs == tokens * len(w.model.config.moe_layers)
        assert (
            metrics["moe/replay_disagreement"] == 0 if replay else metrics["moe/replay_disagreement"] > 0.05
        )
    print(f"{tokens} tokens: replayed {found[True]}, own {found[False]}")
    assert found[True][0] == found[True][1]
    assert found[False][0] < 0.95 * found[False][1]


def test_replaying_the_own_choice_changes_nothing():
    data = make_trajectories(4)
    plain = worker()
    expected = plain.score(data)
    record(nano(1), data)
    w = worker()
    metrics = w.step(data)
    assert metrics["moe/replay_disagreement"] == 0.0
    for t, row in zip(data, expected, strict=True):
        assert t.trainer_logprobs == pytest.approx(row, abs=1e-5)


def test_the_routers_weights_stay_live_under_replay():
    """Gradient still reaches the router: only the discrete choice is replayed."""
    data = make_trajectories(5)
    record(nano(1), data)
    w = worker()
    w.step(data)
    assert any(float(g.abs().max()) > 0 for n, g in w.gradients.items() if n.endswith("gate.weight"))


def test_routing_that_does_not_fit_is_refused():
    data = make_trajectories(6)
    record(nano(1), data)
    data[0].routing = data[0].routing[:-1]
    with pytest.raises(ValueError, match="routing of shape"):
        worker().step(data)
    data = make_trajectories(6)
    record(nano(1), data)
    data[2].routing = None
    with pytest.raises(ValueError, match=f"trajectory {data[2].id} has no routing"):
        worker().step(data)
    assert isinstance(data[0].routing, np.ndarray)
