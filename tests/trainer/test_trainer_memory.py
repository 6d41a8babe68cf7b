"""The memory plan's parts against counts of the model, and how ranks divide them."""

from __future__ import annotations

import pytest
import torch
from trainer_data import nano

from k3rl.config.trainer import ParallelConfig, TrainerConfig
from k3rl.trainer.memory import plan

CPU = torch.device("cpu")


def test_parts_are_the_models_own_counts():
    model = nano(1)
    found = plan(model, TrainerConfig(), CPU)
    numel = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert (found.weights, found.gradients, found.moments) == (4 * numel, 4 * trained, 8 * trained)
    assert found.masters == 0  # float32 is its own master
    assert found.total == numel * 4 + trained * 12 + found.activations + found.head
    assert "fits" in str(found)


@pytest.mark.parametrize(("ranks", "context"), [(2, 1), (4, 1), (2, 2), (4, 2), (4, 4)])
def test_ranks_divide_state_and_context_divides_activations(ranks: int, context: int):
    model = nano(1)
    alone = plan(model, TrainerConfig(micro_batch_tokens=4096), CPU)
    config = TrainerConfig(
        micro_batch_tokens=4096, parallel=ParallelConfig(ranks=ranks, context=context), logprob_chunk_mb=512
    )
    found = plan(model, config, CPU, ranks)
    assert (found.weights, found.moments) == (alone.weights // ranks, alone.moments // ranks)
    assert found.activations == alone.activations // context
    assert found.head == 8 * 4096 // context * model.vocab_size


def test_a_plan_beyond_what_is_free_says_so():
    assert "does NOT fit" in str(plan(nano(1), TrainerConfig(micro_batch_tokens=10**10), CPU))
