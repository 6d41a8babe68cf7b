"""Quantile balancing against its definition; histograms against exact quantiles; several ranks against one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3rl.models import ModelConfig, build_model
from k3rl.models.k3.moe import Router
from k3rl.optim import FrozenBalancing, QuantileBalancing, RouterBalancing, SignBalancing
from k3rl.optim.balancing import RouterBalance
from k3rl.optim.quantile_balancing import Bins, exact_quantile, margins, next_bias, sign_step


def drawn(seed: int, tokens: int = 700, experts: int = 24) -> tuple[Tensor, Tensor]:
    """Skewed scores [T, E] and a bias [E]."""
    generator = torch.Generator().manual_seed(seed)
    print("seed", seed)
    taste = torch.randn(experts, generator=generator)
    scores = torch.sigmoid(taste + torch.randn(tokens, experts, generator=generator))
    return scores, 0.2 * torch.randn(experts, generator=generator)


@pytest.mark.parametrize("seed", range(5))
def test_margin_tells_exactly_who_is_chosen(seed: int) -> None:
    """Expert j is among the k best of score + bias where its margin is below its bias, and nowhere else."""
    scores, bias = drawn(seed)
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    chosen.scatter_(1, (scores + bias).topk(4, -1).indices, True)
    # Away from ties of float32 rounding between score + bias and alpha.
    distance = margins(scores, bias, 4) - bias
    clear = distance.abs() > 1e-6
    assert torch.equal((distance < 0)[clear], chosen[clear])
    assert float(clear.float().mean()) > 0.95


@pytest.mark.parametrize("seed", range(5))
def test_exact_quantile_leaves_each_expert_its_share_of_margins(seed: int) -> None:
    scores, bias = drawn(seed)
    r = margins(scores, bias, 4)
    q = exact_quantile(r, 4)
    below, up_to = (r < q).double().mean(0), (r <= q).double().mean(0)
    share = 4 / 24
    assert bool((below < share + 1e-9).all())
    assert bool((up_to >= share - 1e-9).all())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("number", [50, 1000])
def test_histogram_is_within_one_bin_of_exact(seed: int, number: int) -> None:
    scores, bias = drawn(seed)
    r = margins(scores, bias, 4)
    bins = Bins.around(bias, number)
    counts = bins.count(r)
    assert counts.dtype == torch.int64
    assert bool((counts.sum(1) == len(scores)).all())
    error = (bins.quantile(counts, 4) - exact_quantile(r, 4)).abs()
    assert float(error.max()) <= bins.width * (1 + 1e-9)


def test_every_margin_lies_inside_the_bins() -> None:
    bias = torch.tensor([-3.0, 0.5, 2.0, 7.0])
    scores = torch.tensor([[0.0, 0.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]])
    for k in (1, 2, 3):
        r = margins(scores, bias, k)
        bins = Bins.around(bias, 1000)
        assert bins.low <= float(r.min())
        assert float(r.max()) <= bins.high


def test_iterating_on_fixed_scores_balances_the_load() -> None:
    scores, bias = drawn(7, tokens=4096)
    target = 4096 * 4 / 24
    worst = []
    for _ in range(12):
        load = torch.bincount((scores + bias).topk(4, -1).indices.flatten(), minlength=24)
        worst.append(float(load.max()) / target)
        bias = next_bias(exact_quantile(margins(scores, bias, 4), 4), bias)
    assert worst[0] > 2
    assert worst[-1] < 1.1, worst
    assert float(bias.mean().abs()) < 1e-6


def test_moving_average_keeps_its_part_of_the_old_bias() -> None:
    new = next_bias(torch.tensor([1.0, 3.0], dtype=torch.float64), torch.tensor([0.5, -0.5]), ema=0.75)
    torch.testing.assert_close(new, torch.tensor([0.125, -0.125]))


def test_sign_step_is_up_for_the_idle_and_down_for_the_busy() -> None:
    load = torch.tensor([10, 0, 5, 5])
    torch.testing.assert_close(sign_step(load, torch.zeros(4), 0.01), torch.tensor([-0.01, 0.01, 0.0, 0.0]))


def test_any_cut_into_micro_batches_gives_the_same_bits() -> None:
    scores, start = drawn(11)
    results = []
    for cuts in ([700], [1, 99, 600], [350, 350], [50] * 14):
        bias = start.clone()
        balance = RouterBalance(bias, 4, QuantileBalancing())
        for part in scores.split(cuts):
            balance.observe(part, (part + bias).topk(4, -1).indices)
            assert torch.equal(bias, start), "moved inside a step"
        balance.move(None)
        results.append(bias)
    assert not torch.equal(results[0], start)
    assert all(torch.equal(results[0], r) for r in results[1:])


def train_once(config, checkpointing: bool = False) -> tuple[dict[str, Tensor], dict[str, float]]:
    model = build_model(ModelConfig(path="k3-nano"), 0).train()
    model.activation_checkpointing = checkpointing
    balancing = RouterBalancing(model, config)
    ids = torch.randint(0, 512, (300,), generator=torch.Generator().manual_seed(0))
    model(ids, torch.tensor([0, 120, 300])).square().mean().backward()
    metrics = balancing.step()
    routers = {n: m for n, m in model.named_modules() if isinstance(m, Router)}
    return {n: m.e_score_correction_bias.clone() for n, m in routers.items()}, metrics


def test_frozen_is_the_default_and_touches_nothing() -> None:
    biases, metrics = train_once(FrozenBalancing())
    assert metrics == {}
    assert all(bool((b == 0).all()) for b in biases.values())


@pytest.mark.parametrize("config", [QuantileBalancing(), QuantileBalancing(bins=0), SignBalancing()])
def test_a_model_moves_all_its_routers_and_counts_recomputed_tokens_once(config) -> None:
    plain, metrics = train_once(config)
    recomputed, _ = train_once(config, checkpointing=True)
    assert len(plain) == 3
    assert metrics["balance/max_load"] >= metrics["balance/mean_max_load"] >= 1
    for name, bias in plain.items():
        assert bias.dtype == torch.float32
        assert bool((bias != 0).any())
        assert torch.equal(bias, recomputed[name])


def test_passes_without_gradients_and_passes_switched_off_are_not_counted() -> None:
    model = build_model(ModelConfig(path="k3-nano"), 0).train()
    balancing = RouterBalancing(model, QuantileBalancing())
    ids, cu = torch.zeros(9, dtype=torch.int64), torch.tensor([0, 9])
    with torch.no_grad():
        model(ids, cu)
    balancing.counting(False)
    model(ids, cu)
    assert all(int(b.load_E.sum()) == 0 for b in balancing.routers.values())
    balancing.counting(True)
    model(ids, cu)
    assert all(int(b.load_E.sum()) == 18 for b in balancing.routers.values())
