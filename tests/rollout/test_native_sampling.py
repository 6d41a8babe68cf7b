"""The random stream and the sampler, against references in numpy and Python integers."""

import math
import random

import numpy as np
import pytest
import torch

from rollout.engine import SamplingParams
from rollout.sampling import (
    RowSampling,
    check_params,
    processed_logprobs,
    sample,
    token_logprobs,
    uniform_numpy,
    uniform_torch,
)


def reference_uniform(key: int, position: int) -> float:
    """splitmix64's finaliser over Python's unbounded integers."""
    mask = (1 << 64) - 1

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    return (mix(mix((key + golden) & mask) ^ (((position + 1) * golden) & mask)) >> 11) / 2**53


def reference_distribution(logits: np.ndarray, p: SamplingParams) -> np.ndarray:
    """Probabilities by definition: temperature, min-p, top-k, top-p; ties with the smallest kept one stay."""
    if p.temperature == 0:
        p = SamplingParams(max_tokens=1)
    # float32 division, as the model's logits are: which tokens tie is then the same question for both.
    z = (logits.astype(np.float32) / np.float32(p.temperature)).astype(np.float64)
    probs = np.exp(z - z.max())
    order = sorted(range(len(z)), key=lambda i: -z[i])
    kept = [i for i in order if probs[i] >= p.min_p * (1 - 1e-7)]
    if p.top_k:
        kept = kept[: p.top_k]
    total, mass, nucleus = sum(probs[i] for i in kept), 0.0, []
    for i in kept:
        if p.top_p < 1 and mass >= p.top_p * total:
            break
        nucleus.append(i)
        mass += probs[i]
    threshold = min(z[i] for i in nucleus)
    probs[z < threshold] = 0
    return probs / probs.sum()


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=1,
        temperature=rng.choice([0.0, 0.3, 0.7, 1.0, 1.6]),
        top_p=rng.choice([1.0, 1.0, 0.95, 0.5, 0.05]),
        top_k=rng.choice([0, 0, 1, 5, 40, 1000]),
        min_p=rng.choice([0.0, 0.0, 0.02, 0.3]),
    )


def test_stream_has_the_same_bits_in_numpy_torch_and_plain_integers():
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    keys = [rng.randrange(1 << 63) for _ in range(500)] + [0, 1, (1 << 63) - 1]
    positions = [rng.randrange(1 << 20) for _ in range(500)] + [0, 0, 1]
    expected = [reference_uniform(k, i) for k, i in zip(keys, positions, strict=True)]
    assert uniform_numpy(np.array(keys), np.array(positions)).tolist() == expected
    assert uniform_torch(torch.tensor(keys), torch.tensor(positions)).tolist() == expected


def test_stream_is_uniform_and_neighbouring_keys_and_positions_are_unrelated():
    keys, positions = np.meshgrid(np.arange(400), np.arange(500), indexing="ij")
    u = uniform_numpy(keys, positions)
    counts = np.histogram(u, bins=100, range=(0, 1))[0]
    chi2 = ((counts - u.size / 100) ** 2 / (u.size / 100)).sum()
    assert chi2 < 99 + 5 * math.sqrt(2 * 99), "the seed is fixed, so this fails always or never"
    for a, b in ((u[1:], u[:-1]), (u[:, 1:], u[:, :-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / math.sqrt(a.size)


def test_processed_logprobs_match_the_definition():
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    params = [random_params(rng) for _ in range(200)]
    logits = torch.randn(200, 97, generator=gen) * 3
    logits[::3] = (logits[::3] * 2).round() / 2  # ties, as bfloat16 heads produce
    got = processed_logprobs(logits, RowSampling.build(params)).double().exp().numpy()
    for row, p in enumerate(params):
        np.testing.assert_allclose(
            got[row], reference_distribution(logits[row].numpy(), p), atol=2e-6, err_msg=p
        )


def test_rows_do_not_depend_on_their_neighbours():
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    params = [random_params(rng) for _ in range(60)]
    logits = (torch.randn(60, 513, generator=gen) * 4).round() / 2
    u = torch.rand(60, generator=gen, dtype=torch.float64)
    tokens, logprobs = sample(logits, RowSampling.build(params), u)
    for i in range(60):
        one = sample(logits[i : i + 1], RowSampling.build([params[i]]), u[i : i + 1])
        assert (one[0].item(), one[1].item()) == (tokens[i].item(), logprobs[i].item()), params[i]
    order = torch.randperm(60, generator=gen)
    shuffled = sample(logits[order], RowSampling.build([params[i] for i in order]), u[order])
    assert torch.equal(shuffled[0], tokens[order])
    assert torch.equal(shuffled[1], logprobs[order])


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.6, "top_p": 0.9}, {"top_k": 4, "min_p": 0.05}], ids=str
)
def test_draws_follow_the_distribution(params):
    """Chi-squared over 40,000 draws of one stream; nothing outside the kept set is ever drawn."""
    p = SamplingParams(max_tokens=1, **params)
    logits = torch.randn(24, generator=torch.Generator().manual_seed(3)) * 1.5
    expected = reference_distribution(logits.numpy(), p)
    n = 40_000
    u = uniform_torch(torch.full((n,), 12345), torch.arange(n))
    tokens, _ = sample(logits.expand(n, -1), RowSampling.build([p] * n), u)
    counts = np.bincount(tokens.numpy(), minlength=24)
    assert (counts[expected == 0] == 0).all()
    live = expected > 0
    chi2 = ((counts[live] - n * expected[live]) ** 2 / (n * expected[live])).sum()
    df = live.sum() - 1
    assert chi2 < df + 5 * math.sqrt(2 * df)


def test_greedy_takes_the_argmax_and_reports_its_plain_logprob():
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(1))
    rows = RowSampling.build([SamplingParams(max_tokens=1, temperature=0, top_k=3, top_p=0.4)] * 8)
    tokens, logprobs = sample(logits, rows, torch.full((8,), 0.999, dtype=torch.float64))
    assert torch.equal(tokens, logits.argmax(-1))
    assert torch.equal(logprobs, token_logprobs(logits, tokens))


def test_logprob_of_a_draw_at_temperature_1_has_the_bits_of_scoring():
    logits = torch.randn(16, 301, generator=torch.Generator().manual_seed(2)) * 3
    rows = RowSampling.build([SamplingParams(max_tokens=1)] * 16)
    tokens, logprobs = sample(logits, rows, torch.rand(16, dtype=torch.float64))
    assert torch.equal(logprobs, token_logprobs(logits, tokens))


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
def test_extreme_draws_never_leave_the_kept_set(u):
    logits = torch.full((4, 20), -torch.inf)
    logits[:, 3:7] = torch.randn(4, 4)
    rows = RowSampling.build([SamplingParams(max_tokens=1)] * 4)
    tokens, logprobs = sample(logits, rows, torch.full((4,), u, dtype=torch.float64))
    assert tokens.tolist() == [3 if u == 0 else 6] * 4
    assert torch.isfinite(logprobs).all()


def test_not_a_number_is_visible_in_the_logprob():
    logits = torch.zeros(1, 9)
    logits[0, 4] = torch.nan
    _, logprobs = sample(
        logits, RowSampling.build([SamplingParams(max_tokens=1)]), torch.tensor([0.5]).double()
    )
    assert torch.isnan(logprobs).all()


@pytest.mark.parametrize(
    "bad",
    [{"temperature": -1}, {"temperature": float("nan")}, {"top_p": 0}, {"top_p": 1.1}, {"min_p": 2},
     {"top_k": -1}, {"max_tokens": 0}],
    ids=str,
)  # fmt: skip
def test_settings_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        check_params(SamplingParams(**{"max_tokens": 1} | bad))
