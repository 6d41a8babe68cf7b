"""`TrainerGroup` on real Ray actors: the same numbers as a worker in this process, weights through Ray's
object store.
"""

from __future__ import annotations

import pytest
import ray
import torch
from trainer_data import NANO, make_conversations, make_trajectories

from k3rl.config.trainer import AdamWConfig, ParallelConfig, TrainerConfig
from k3rl.errors import RunError
from k3rl.models import build_model
from k3rl.trainer import TrainerGroup, TrainerWorker
from k3rl.weights import checksum, receive


@pytest.fixture(scope="module", autouse=True)
def ray_here():
    ray.shutdown()  # of other tests: their actors would hold the cores
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


@pytest.mark.parametrize(("ranks", "context"), [(1, 1), (2, 1), (2, 2)])
def test_a_group_is_a_worker(ranks, context, tmp_path):
    config = TrainerConfig(
        optimizer=AdamWConfig(lr=1e-3, eps=1e-2),
        parallel=ParallelConfig(ranks=ranks, context=context),
        micro_batch_tokens=100,
    )
    group = TrainerGroup(NANO, config, seed=3, device="cpu", num_cpus=1, timeout_s=120)
    alone = TrainerWorker(
        NANO, config.model_copy(update={"parallel": ParallelConfig()}), seed=3, device="cpu"
    )
    data, twin = make_trajectories(1), make_trajectories(1)
    m, expected = group.step(data), alone.step(twin)
    assert group.version == alone.version == 1
    for name in (
        "train/loss",
        "train/grad_norm",
        "rollout/logprob_diff",
        "reward/mean",
        "clip/below",
        "entropy",
    ):
        assert m[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    for a, b in zip(data, twin, strict=True):
        assert a.trainer_logprobs == pytest.approx(b.trainer_logprobs, abs=1e-5)
    sft = make_conversations(2)
    assert group.sft_step(sft)["train/nll"] == pytest.approx(alone.sft_step(sft)["train/nll"], rel=1e-4)
    for a, b in zip(group.score(data), alone.score(twin), strict=True):
        assert a == pytest.approx(b, abs=1e-4)

    publication = group.publication()
    model = build_model(NANO, 77)
    model.load_named_weights(receive(publication))
    assert publication.version == 2
    assert checksum(model.named_weights()) == publication.checksum
    for (_, a), (_, b) in zip(model.named_weights(), alone.named_weights(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)

    group.save(tmp_path / "step-2")
    group.step([])  # nothing to train on: no update
    assert group.version == 2
    group.sft_step(sft)
    group.load(tmp_path / "step-2")
    assert group.version == 2
    assert group.publication().checksum == publication.checksum
    group.sleep()
    group.wake()
    group.close()


def test_errors_of_a_rank_arrive_as_they_are_and_a_dead_rank_is_named():
    group = TrainerGroup(NANO, TrainerConfig(), device="cpu", timeout_s=60)
    data = make_trajectories(1)
    data[0].segments[0].token_ids[0] = 511
    data[0].prompt_ids = [9] * 5000
    with pytest.raises(ValueError, match="exceeds the model's context of 4096"):
        group.step(data)
    ray.kill(group.ranks[0])
    with pytest.raises(RunError, match="rank 0 died in 'step_examples'"):
        group.step(make_trajectories(1))
