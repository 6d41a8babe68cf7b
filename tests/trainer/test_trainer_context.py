"""Ranks that share each sequence train as one rank does: gradients, weights, scores, metrics, routers' biases."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from test_trainer_ranks import EPS, run_ranks, train
from trainer_data import make_trajectories, state_of, worker

from k3rl.config.trainer import ParallelConfig, TrainerConfig
from k3rl.models.hf import HFModel
from k3rl.trainer import TrainerWorker
from k3rl.trainer.context import check, part_of
from k3rl.trainer.diagnostics import diagnose
from k3rl.trainer.distributed import World
from k3rl.trainer.examples import Example, from_trajectories
from k3rl.trainer.packing import build, spread

RANKS = 4
SETTINGS = {
    "k25": {"balancing": {"type": "sign", "speed": 1e-3}},
    "gspo": {"objective": {"type": "gspo"}, "minibatches": 2},
}
"""k25 masks tokens, GSPO weights whole sequences: a rank that saw only its piece would get another ratio."""


def step(w: TrainerWorker, world: World | None = None):
    """One more step, its metrics those of every rank's output; trajectories bring an engine's routing."""
    trajectories = make_trajectories(11, groups=2, samples=2, lengths=(1, 60))
    for t in trajectories:
        rng = np.random.default_rng(t.draw * 10 + t.sample)
        length = len(t.prompt_ids) + len(t.token_ids)
        layers, k = len(w.model.config.moe_layers), w.model.config.num_experts_per_token
        scores = rng.random((length - 1, layers, w.model.config.num_experts))
        t.routing = scores.argsort(-1)[..., :k].astype(np.int16)
    examples = from_trajectories(trajectories, w.version)
    if world is not None:
        groups = world.size // world.context_size
        share = spread([len(e) for e in examples], groups)[world.rank // world.context_size]
        examples = [examples[i] for i in share]
    return w.step_examples(examples)


def biases(w: TrainerWorker) -> dict[str, torch.Tensor]:
    """Of the routers."""
    return {n: b.clone() for n, b in w.model.named_buffers() if n.endswith("correction_bias")}


CHILD = """
import sys, torch
sys.path.insert(0, {here!r})
from test_trainer_context import SETTINGS, biases, step
from test_trainer_ranks import EPS, train
from trainer_data import make_trajectories, worker
from k3rl.trainer.distributed import ShardedWorld
rank, address, context, folder, name = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), *sys.argv[4:]
world = ShardedWorld(rank, 4, address, torch.device("cpu"), 60, context=context)
w = worker(world=world, micro_batch_tokens=90, optimizer_eps=EPS, seed=1, **SETTINGS[name])
train(w, world=world)
gradients = w.gradients, biases(w)
w.save(f"{{folder}}/{{name}}-{{context}}")
scores = w.score(make_trajectories(3, groups=2))
output = step(w, world)
torch.save((gradients, scores, output, w.version), f"{{folder}}/{{name}}-{{context}}-{{rank}}.pt")
world.close()
"""


def launch(name: str, context: int, folder: Path) -> None:
    run_ranks(CHILD.format(here=str(Path(__file__).parent)), RANKS, context, folder, name)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def context(request):
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory, alone, context):
    path = tmp_path_factory.mktemp("context")
    launch(alone[0], context, path)
    return path


@pytest.fixture(scope="module", params=["k25", pytest.param("gspo", marks=pytest.mark.slow)])
def alone(request):
    w = train(worker(micro_batch_tokens=100_000, optimizer_eps=EPS, **SETTINGS[request.param]))
    gradients, state = (w.gradients, biases(w)), state_of(w)
    scores = w.score(make_trajectories(3, groups=2))
    return request.param, gradients, state, scores, step(w)


def test_ranks_that_share_sequences_equal_one_rank(alone, folder, context):
    """Two groups of two, and one of four, after five steps of RL and SFT in turns."""
    name, (gradients, wanted), state, scores, _ = alone
    for rank in range(RANKS):
        file = folder / f"{name}-{context}-{rank}.pt"
        (found, moved), found_scores, _, _ = torch.load(file, weights_only=False)
        assert found.keys() == gradients.keys()
        assert max(float((found[n] - g).abs().max()) for n, g in gradients.items()) < 1e-6
        assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(found_scores, scores, strict=True))
        assert all(torch.equal(moved[n], bias) for n, bias in wanted.items())
        assert name != "k25" or any(bias.any() for bias in wanted.values())
    loaded = worker(seed=3, optimizer_eps=EPS, **SETTINGS[name])
    loaded.load(folder / f"{name}-{context}")
    found = state_of(loaded)
    assert found.keys() == state.keys()
    assert max(float((found[n] - state[n]).abs().max()) for n in state) < 1e-5


def test_metrics_are_those_of_one_rank(alone, folder, context):
    """Each token is counted once, filled up ends never, replayed experts are the engine's."""
    name, _, _, _, output = alone
    outputs = [
        torch.load(folder / f"{name}-{context}-{rank}.pt", weights_only=False)[2] for rank in range(RANKS)
    ]
    trajectories = make_trajectories(11, groups=2, samples=2, lengths=(1, 60))
    config = TrainerConfig(**SETTINGS[name]).objective
    one, four = (diagnose(trajectories, o, config) for o in ([output], outputs))
    assert one.keys() == four.keys()
    measured = {"train/seconds_s", "train/tokens_per_s", "train/peak_memory_bytes"}
    if context < RANKS:
        measured.add("moe/load_max_over_mean")  # of the more uneven group, each with its own share
    for key in one.keys() - measured:
        assert four[key] == pytest.approx(one[key], rel=1e-4, abs=1e-6), key
    assert one["moe/replay_disagreement"] == 0
    assert one["moe/load_max_over_mean"] > 0


class Place(World):
    """A rank's place, without its group."""

    context = "a group"  # type: ignore[assignment]

    def __init__(self, rank: int, size: int) -> None:
        self.context_rank, self.context_size = rank, size


@pytest.mark.parametrize("length", [2, 3, 16, 17, 31])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_target_is_predicted_once_by_the_rank_that_holds_the_token_before(length, size):
    ids = np.arange(100, 100 + length)
    example = Example("a", ids, np.arange(1, length))
    parts = [part_of(build([example], torch.device("cpu")), Place(r, size)) for r in range(size)]
    assert len({len(p.ids_T) for p in parts}) == 1
    assert len(parts[0].ids_T) >= 4
    assert sum(p.tokens for p in parts) == length
    assert torch.cat([p.ids_T[: p.tokens] for p in parts]).tolist() == ids.tolist()
    pairs = [
        (p.ids_T[i].item(), t.item()) for p in parts for i, t in zip(p.predict_P, p.targets_P, strict=True)
    ]
    assert pairs == [(t - 1, t) for t in ids[1:].tolist()]
    assert all((p.predict_P < p.tokens).all() for p in parts)


def test_several_sequences_are_refused():
    example = Example("a", np.arange(4), np.arange(1, 4))
    with pytest.raises(ValueError, match="one sequence at a time, not 2"):
        part_of(build([example, example], torch.device("cpu")), Place(0, 2))


def test_settings_that_do_not_fit_are_one_sentence():
    with pytest.raises(
        ValueError, match=r"6 ranks cannot be divided into groups of 4; ranks must be a multiple"
    ):
        ParallelConfig(ranks=6, context=4)
    assert check(object.__new__(HFModel), World()) is None
    assert "HFModel cannot share a sequence" in (check(object.__new__(HFModel), Place(0, 2)) or "")
