"""Off-policy corrections: numbers by hand, no gradient through the weights."""

from __future__ import annotations

import math

import pytest
import torch
from algorithm_batches import make_batch
from pydantic import TypeAdapter

from k3rl.algorithms import ObjectiveChoice, compute_loss

F64 = torch.float64
# trainer's pi_old over the engine's mu, by token
WEIGHTS = [0.4, 1.0, 3.0, 1.5]


def loss_and_gradient(correction: dict):
    weights = torch.tensor(WEIGHTS, dtype=F64)
    behaviour = torch.full((4,), -1.0, dtype=F64)
    old = behaviour + weights.log()
    leaf = old.clone().requires_grad_()
    batch = make_batch(
        leaf - behaviour, torch.ones(4, dtype=F64), [2, 2], behaviour_T=behaviour, old_logprobs_T=old
    )
    config = TypeAdapter(ObjectiveChoice).validate_python({"type": "ppo", "correction": correction})
    out = compute_loss(batch, config)
    return out, torch.autograd.grad(out.loss_sum, leaf)[0].tolist()


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        ({"type": "none"}, [1, 1, 1, 1]),
        ({"type": "truncated", "high": 2.0}, [0.4, 1.0, 2.0, 1.5]),
        ({"type": "masked", "low": 0.5, "high": 2.0}, [0.0, 1.0, 0.0, 1.5]),
        ({"type": "truncated", "high": 2.0, "level": "sequence"}, [0.4, 0.4, 2.0, 2.0]),
        ({"type": "masked", "low": 0.3, "high": 2.0, "level": "sequence"}, [0.4, 0.4, 0.0, 0.0]),
    ],
)
def test_weights_by_hand(correction, expected):
    out, gradient = loss_and_gradient(correction)
    assert gradient == pytest.approx([-w for w in expected])  # ratio 1, A = 1: gradient is minus the weight
    assert out.loss_sum.item() == pytest.approx(-sum(expected))
    assert out.token_count == 4  # a masked token stays in the denominator, as IcePop has it
    if correction["type"] == "masked" and "level" not in correction:
        assert out.metrics["correction/cut"].mean == pytest.approx(0.5)


def test_without_old_logprobs_the_present_policy_stands_in():
    behaviour = torch.full((1,), -1.0, dtype=F64)
    leaf = (behaviour + math.log(3.0)).requires_grad_()
    batch = make_batch(leaf - behaviour, torch.ones(1, dtype=F64), [1], behaviour_T=behaviour)
    config = TypeAdapter(ObjectiveChoice).validate_python(
        {"type": "reinforce", "correction": {"type": "truncated", "high": 2.0}}
    )
    (grad,) = torch.autograd.grad(compute_loss(batch, config).loss_sum, leaf)
    assert grad.item() == pytest.approx(-2.0)
