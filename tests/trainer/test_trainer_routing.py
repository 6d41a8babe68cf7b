"""Router replay: with the engine's choices every token takes the same experts; without, it is counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from trainer_data import make_trajectories, nano, worker


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
