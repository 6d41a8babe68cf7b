"""KL estimators against the exact value and gradient of an enumerable policy of five tokens."""

from __future__ import annotations

import pytest
import torch

from k3rl.algorithms import TokenBatch
from k3rl.algorithms.kl import KlPenalty, kl_estimate, kl_loss

F64 = torch.float64
V = 5


def policies(seed: int):
    """Logits of policy, reference and behaviour."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(V, generator=g, dtype=F64, requires_grad=True)
    reference = torch.randn(V, generator=g, dtype=F64)
    behaviour = logits.detach() + 0.5 * torch.randn(V, generator=g, dtype=F64)
    return logits, reference, behaviour


def expected_loss_gradient(estimator, gradient, seed, on_policy):
    """Gradient of the *expected* loss term under the behaviour policy, by enumerating all tokens."""
    logits, reference, behaviour = policies(seed)
    if on_policy:
        behaviour = logits.detach()
    mu = behaviour.softmax(0)
    logp = logits.log_softmax(0)
    ones = torch.ones(V, dtype=torch.long)
    batch = TokenBatch(
        logprobs_T=logp,
        behaviour_logprobs_T=behaviour.log_softmax(0),
        advantages_T=torch.zeros(V, dtype=F64),
        mask_T=torch.ones(V, dtype=torch.bool),
        sequence_T=torch.arange(V),
        sequence_tokens_T=ones,
        group_tokens_T=ones * V,
        reference_logprobs_T=reference.log_softmax(0),
    )
    terms, _ = kl_loss(KlPenalty(coefficient=1.0, estimator=estimator, gradient=gradient), batch)
    (found,) = torch.autograd.grad((mu * terms).sum(), logits)
    return found


def true_gradient(seed, direction):
    logits, reference, _ = policies(seed)
    p, q = logits.log_softmax(0), reference.log_softmax(0)
    kl = (p.exp() * (p - q)).sum() if direction == "reverse" else (q.exp() * (q - p)).sum()
    return torch.autograd.grad(kl, logits)[0]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_exact_form_follows_the_gradient_of_reverse_kl(estimator, on_policy, seed):
    found = expected_loss_gradient(estimator, "exact", seed, on_policy)
    assert torch.allclose(found, true_gradient(seed, "reverse"), atol=1e-12), f"seed {seed}"


@pytest.mark.parametrize("seed", [0, 1])
def test_plain_forms_have_the_gradients_the_table_says(seed):
    assert torch.allclose(
        expected_loss_gradient("k1", "plain", seed, True), torch.zeros(V, dtype=F64), atol=1e-12
    )
    reverse, forward = true_gradient(seed, "reverse"), true_gradient(seed, "forward")
    assert torch.allclose(expected_loss_gradient("k2", "plain", seed, True), reverse, atol=1e-12)
    assert torch.allclose(expected_loss_gradient("k3", "plain", seed, True), forward, atol=1e-12)
    assert not torch.allclose(reverse, forward, atol=1e-2)


def test_values_by_hand():
    d = torch.tensor([0.5], dtype=F64)
    assert kl_estimate("k1", d).item() == pytest.approx(0.5)
    assert kl_estimate("k2", d).item() == pytest.approx(0.125)
    assert kl_estimate("k3", d).item() == pytest.approx(0.6065306597 - 1 + 0.5)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_expected_value_is_the_kl(estimator):
    logits, reference, _ = policies(5)
    p, q = logits.detach().log_softmax(0), reference.log_softmax(0)
    assert (p.exp() * kl_estimate(estimator, p - q)).sum().item() == pytest.approx(
        (p.exp() * (p - q)).sum().item()
    )
