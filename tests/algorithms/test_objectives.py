"""Every objective: a hand-worked number, and its gradient against a closed form written here, in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from algorithm_batches import make_batch, random_batch, take, with_logprobs
from pydantic import TypeAdapter, ValidationError

from k3rl.algorithms import CustomConfig, ObjectiveChoice, TokenLoss, compute_loss, get_objective, objective
from k3rl.errors import UserError

F64 = torch.float64
CHOICE = TypeAdapter(ObjectiveChoice)


def config(type: str, **changes):
    return CHOICE.validate_python({"type": type, **changes})


def test_k25_worked_example_of_the_specification():
    """spec/02 §1: K = 2, l = (0, 0.8 | 0.1), r = (1, 0), tau 0.1, bounds ±ln 2."""
    log_ratio = torch.tensor([0.0, 0.8, 0.1], dtype=F64, requires_grad=True)
    batch = make_batch(log_ratio, torch.tensor([0.5, 0.5, -0.5], dtype=F64), [2, 1])
    out = compute_loss(batch, config("k25", tau=0.1))
    assert -out.loss_sum.item() == pytest.approx(0.882415, abs=1e-6)
    assert -out.loss_sum.item() / out.denominator == pytest.approx(0.294138, abs=1e-6)
    assert (out.token_count, out.denominator) == (3, 3.0)
    (grad,) = torch.autograd.grad(out.loss_sum, log_ratio)
    expected = [-0.5, 2 * 0.1 * 0.8, 0.5 * math.exp(0.1) + 2 * 0.1 * 0.1]  # the second token: only the pull
    assert grad.tolist() == pytest.approx(expected, abs=1e-12)


def test_k25_options_for_each_ambiguity():
    log_ratio = torch.tensor([0.0, 0.8, 0.1], dtype=F64, requires_grad=True)
    batch = make_batch(log_ratio, torch.tensor([0.5, 0.5, -0.5], dtype=F64), [2, 1])

    def grad(**changes):
        return torch.autograd.grad(compute_loss(batch, config("k25", **changes)).loss_sum, log_ratio)[
            0
        ].tolist()

    assert grad(bounds_on="ratio", low=0.5, high=2.0) == pytest.approx(grad())
    assert grad(regularise="inside")[1] == 0.0
    assert grad(pg_form="logprob") == pytest.approx([-0.5, 0.16, 0.5 + 0.02])
    assert grad(tau=0.0)[1] == 0.0


def test_k25_masks_whatever_the_sign_of_the_advantage():
    """PPO would let a negative advantage push a ratio of 4 down; here no policy gradient flows."""
    log_ratio = torch.tensor([math.log(4.0)], dtype=F64, requires_grad=True)
    batch = make_batch(log_ratio, torch.tensor([-1.0], dtype=F64), [1])
    (g,) = torch.autograd.grad(compute_loss(batch, config("k25", tau=0.0)).loss_sum, log_ratio)
    assert g.item() == 0.0
    (g,) = torch.autograd.grad(compute_loss(with_old(batch), config("ppo")).loss_sum, log_ratio)
    assert g.item() == pytest.approx(4.0)


def with_old(batch):
    return replace(batch, old_logprobs_T=batch.behaviour_logprobs_T)


# ratios 1.5, 0.5, 0.7, 1.1 with advantages 1, 1, -2, -2 in sequences of 2 and 2
RATIOS, ADVANTAGES = [1.5, 0.5, 0.7, 1.1], [1.0, 1.0, -2.0, -2.0]
GM1, GM2 = math.sqrt(1.5 * 0.5), math.sqrt(0.7 * 1.1)  # GSPO's sequence ratios
HAND = {
    # min(1.5, 1.2) + min(.5, .8) + min(-1.4, -1.6) + min(-2.2, -2.2)
    "ppo": (-(1.2 + 0.5 - 1.6 - 2.2), 4.0),
    "grpo": (-(1.7 / 2 - 3.8 / 2), 2.0),
    "dr_grpo": (-(1.2 + 0.5 - 1.6 - 2.2), 2 * 1024.0),
    "dapo": (-(1.28 + 0.5 - 1.6 - 2.2), 4.0),
    "gspo": (-(min(GM1, GM1) + -2 * (1 - 3e-4)), 2.0),  # clip(GM2) = 1 - 3e-4 is worse for a negative A
}


@pytest.mark.parametrize("name", HAND)
def test_clipped_objectives_by_hand(name):
    log_ratio = torch.tensor(RATIOS, dtype=F64).log()
    batch = with_old(make_batch(log_ratio, torch.tensor(ADVANTAGES, dtype=F64), [2, 2]))
    out = compute_loss(batch, config(name))
    loss, denominator = HAND[name]
    assert out.loss_sum.item() == pytest.approx(loss, abs=1e-12)
    assert out.denominator == pytest.approx(denominator, abs=1e-12)


def test_logprob_objectives_by_hand():
    log_ratio = torch.tensor(RATIOS, dtype=F64).log()
    batch = with_old(make_batch(log_ratio, torch.tensor(ADVANTAGES, dtype=F64), [2, 2]))
    logp = [-1 + math.log(r) for r in RATIOS]
    weights = [1.28, 0.5, 0.7, 1.1]
    by_hand = -sum(w * a * p for w, a, p in zip(weights, ADVANTAGES, logp, strict=True))
    assert compute_loss(batch, config("cispo")).loss_sum.item() == pytest.approx(by_hand)
    by_hand = -sum(a * p for a, p in zip(ADVANTAGES, logp, strict=True))
    for name in ("reinforce", "rloo"):
        assert compute_loss(batch, config(name)).loss_sum.item() == pytest.approx(by_hand)


def test_dual_clip_bounds_an_exploded_token():
    log_ratio = torch.tensor([math.log(50.0)], dtype=F64, requires_grad=True)
    batch = with_old(make_batch(log_ratio, torch.tensor([-1.0], dtype=F64), [1]))
    out = compute_loss(batch, config("ppo", dual_clip=3.0))
    assert out.loss_sum.item() == pytest.approx(3.0)
    assert torch.autograd.grad(out.loss_sum, log_ratio)[0].item() == 0.0


def closed_gradient(name, batch):
    """d loss_sum / d logprob by token, from the formulas, without autograd."""
    p, mu, old = batch.logprobs_T.detach(), batch.behaviour_logprobs_T, batch.old_logprobs_T
    a, n = batch.advantages_T, batch.sequence_tokens_T.double()
    r = torch.exp(p - old)
    if name == "k25":
        l = p - mu
        inside = l.abs() <= math.log(2)
        return 0.2 * l - torch.where(inside, l.exp() * a, 0)
    if name in ("reinforce", "rloo"):
        return -a
    if name == "cispo":
        return -r.clamp(max=1.28) * a
    if name == "gspo":
        mean = torch.zeros(int(batch.sequence_T.max()) + 1, dtype=F64).index_add(
            0, batch.sequence_T, (p - old) / n
        )
        s = mean.exp()[batch.sequence_T]
        live = torch.where(a > 0, s <= 1 + 4e-4, s >= 1 - 3e-4)
        return torch.where(
            live, -s * a / n, 0
        )  # d s / d logp_i = s / n, summed over n tokens of weight 1 / n
    high = 1.28 if name == "dapo" else 1.2
    live = torch.where(a > 0, r <= high, r >= 0.8)
    grad = torch.where(live, -r * a, 0)
    return grad / n if name == "grpo" else grad


@pytest.mark.parametrize(
    "name", ["k25", "ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce"]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_gradient_equals_closed_form(name, seed):
    batch, leaf = random_batch(seed, [5, 1, 7, 3])
    (grad,) = torch.autograd.grad(compute_loss(batch, config(name)).loss_sum, leaf)
    assert torch.allclose(grad, closed_gradient(name, batch), atol=1e-12), f"seed {seed}"


@pytest.mark.parametrize("name", ["ppo", "k25", "reinforce"])
def test_losses_without_stop_gradients_pass_gradcheck(name):
    batch, _ = random_batch(3, [4, 2], spread=0.3)

    def loss(logprobs_T):
        return compute_loss(with_logprobs(batch, logprobs_T), config(name)).loss_sum

    assert torch.autograd.gradcheck(loss, (batch.logprobs_T.detach().requires_grad_(),), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("normalisation", ["token", "sequence", "group", "constant"])
@pytest.mark.parametrize("name", ["k25", "grpo", "gspo", "reinforce"])
def test_any_cut_of_the_batch_gives_the_same_gradient(name, normalisation):
    lengths = [5, 1, 7, 3, 4, 2]
    batch, leaf = random_batch(7, lengths)
    extra = {"constant_tokens": 16} if normalisation == "constant" else {}
    chosen = config(name, normalisation=normalisation, **extra)
    whole = compute_loss(batch, chosen)
    (expected,) = torch.autograd.grad(whole.loss_sum / whole.denominator, leaf)
    g = torch.Generator().manual_seed(1)
    for _ in range(5):
        owner_S = torch.randint(0, 3, (len(lengths),), generator=g)
        parts = [
            compute_loss(take(batch, (owner_S[batch.sequence_T] == part).nonzero().squeeze(1)), chosen)
            for part in range(3)
        ]
        total = sum(p.denominator for p in parts)
        (grad,) = torch.autograd.grad(sum(p.loss_sum for p in parts) / total, leaf, retain_graph=True)
        assert total == pytest.approx(whole.denominator)
        assert torch.allclose(grad, expected, atol=1e-14)


def test_a_mean_of_micro_batch_means_would_have_differed():
    """The failure this design rules out does exist on this data: otherwise the test above shows nothing."""
    batch, _ = random_batch(7, [5, 1, 7, 3])
    first, rest = (batch.sequence_T == 0).nonzero().squeeze(1), (batch.sequence_T != 0).nonzero().squeeze(1)
    a, b = compute_loss(take(batch, first), config("k25")), compute_loss(take(batch, rest), config("k25"))
    mean_of_means = (a.loss_sum / a.token_count + b.loss_sum / b.token_count) / 2
    whole = compute_loss(batch, config("k25"))
    assert abs(mean_of_means - whole.loss_sum / whole.denominator) > 1e-3


def test_masked_tokens_change_neither_loss_nor_gradient_even_as_nan():
    batch, leaf = random_batch(11, [4, 6])
    expected = compute_loss(batch, config("k25"))
    (g_expected,) = torch.autograd.grad(expected.loss_sum, leaf, retain_graph=True)
    nan = torch.full((3,), float("nan"), dtype=F64)
    bigger = torch.cat([leaf, nan])
    padded = replace(
        batch,
        logprobs_T=bigger,
        behaviour_logprobs_T=torch.cat([batch.behaviour_logprobs_T, nan]),
        advantages_T=torch.cat([batch.advantages_T, nan]),
        mask_T=torch.cat([batch.mask_T, torch.zeros(3, dtype=torch.bool)]),
        sequence_T=torch.cat([batch.sequence_T, torch.tensor([1, 1, 1])]),
        sequence_tokens_T=torch.cat([batch.sequence_tokens_T, torch.tensor([6, 6, 6])]),
        group_tokens_T=torch.cat([batch.group_tokens_T, torch.tensor([10, 10, 10])]),
        old_logprobs_T=None,
        reference_logprobs_T=None,
    )
    out = compute_loss(padded, config("k25"))
    assert out.loss_sum.item() == expected.loss_sum.item()
    assert torch.equal(torch.autograd.grad(out.loss_sum, leaf)[0], g_expected)
    assert out.token_count == expected.token_count


def test_nan_in_a_trained_token_is_refused():
    batch, _ = random_batch(0, [3, 2])
    batch.advantages_T[4] = float("nan")
    with pytest.raises(ValueError, match="advantages_T is nan at a trained token of sequence 1"):
        compute_loss(batch, config("k25"))


def test_an_empty_batch_gives_zero_with_a_graph():
    batch, _ = random_batch(0, [3])
    empty = take(batch, torch.zeros(0, dtype=torch.long))
    out = compute_loss(empty, config("k25"))
    assert (out.loss_sum.item(), out.token_count, out.denominator) == (0.0, 0, 0.0)
    out.loss_sum.backward()


def test_gspo_refuses_a_sequence_cut_in_two():
    batch, _ = random_batch(0, [4])
    with pytest.raises(ValueError, match="cut across micro-batches"):
        compute_loss(take(batch, torch.arange(3)), config("gspo"))


def test_missing_inputs_raise():
    batch, _ = random_batch(0, [4])
    bare = replace(batch, reference_logprobs_T=None)
    with pytest.raises(ValueError, match="reference_logprobs_T is missing"):
        compute_loss(bare, config("k25", kl={"coefficient": 0.1}))
    with pytest.raises(ValueError, match="entropy_T is missing"):
        compute_loss(bare, config("k25", entropy_bonus=0.1))
    with pytest.raises(ValueError, match="whole batch's counts are missing"):
        compute_loss(replace(bare, sequence_tokens_T=torch.zeros(4, dtype=torch.long)), config("grpo"))


def test_entropy_bonus_enters_the_loss():
    log_ratio = torch.zeros(2, dtype=F64)
    batch = make_batch(
        log_ratio, torch.zeros(2, dtype=F64), [2], entropy_T=torch.tensor([1.0, 3.0], dtype=F64)
    )
    assert compute_loss(batch, config("k25", entropy_bonus=0.5)).loss_sum.item() == pytest.approx(-2.0)


@objective("test-half-reinforce")
def half_reinforce(batch, config):
    return TokenLoss(-config.options["weight"] * batch.advantages_T * batch.logprobs_T)


def test_a_new_objective_is_one_decorated_function():
    batch, leaf = random_batch(0, [3, 2])
    mine = CustomConfig(module=__name__, name="test-half-reinforce", options={"weight": 0.5})
    mine.load()
    (grad,) = torch.autograd.grad(compute_loss(batch, mine).loss_sum, leaf)
    assert torch.allclose(grad, -0.5 * batch.advantages_T)
    with pytest.raises(UserError, match="did you mean 'test-half-reinforce'"):
        get_objective("test-half-reinforc")
    with pytest.raises(UserError, match="no module 'nowhere_at_all'"):
        CustomConfig(module="nowhere_at_all", name="x").load()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"type": "k25", "low": 0.1}, "must enclose an unchanged policy"),
        ({"type": "k25", "bounds_on": "ratio"}, "lower bound must be above 0"),
        ({"type": "k25", "normalisation": "constant"}, "needs constant_tokens"),
        ({"type": "k25", "constant_tokens": 5}, "has no effect"),
        ({"type": "k25", "group_weight": 1.0}, "has no effect"),
        ({"type": "k25", "correction": {"type": "masked"}}, "Extra inputs"),  # k25 corrects by itself
        ({"type": "ppo", "correction": {"type": "masked", "low": 3.0}}, "must be below"),
        ({"type": "nope"}, "does not match any of the expected tags"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(bad, message):
    with pytest.raises(ValidationError, match=message):
        CHOICE.validate_python(bad)
