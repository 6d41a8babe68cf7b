"""KDA's forms against its definition in float64: forward and backward, packed, cut anywhere, at the decay's bound."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from kda_reference import naive_kda, relative
from torch import Tensor

from k3rl.models.k3.kda_ops import TILE, decay, kda, kda_chunked, kda_recurrent, kda_step, l2_normalise
from k3rl.models.packing import Layout

BOUND = -5.0


def layout_of(lengths: list[int]) -> Layout:
    return Layout(sum(lengths), torch.tensor([0, *lengths]).cumsum(0), torch.device("cpu"))


def drawn(seed: int, longest: int = 90) -> tuple[list[int], list[Tensor], Tensor]:
    """Random sizes, then (q, k, v, g, beta) and a first state, in float64. Decays span the whole allowed range."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda low, high: int(torch.randint(low, high, (), generator=generator))  # noqa: E731
    lengths = [draw(1, longest) for _ in range(draw(1, 5))]
    heads, key, value = draw(1, 4), draw(2, 25), draw(1, 25)
    rand = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    T = sum(lengths)
    q, k = (l2_normalise(rand(T, heads, key)) for _ in range(2))
    g = BOUND * torch.sigmoid(3 * rand(T, heads, key) - 2)
    beta = torch.sigmoid(2 * rand(T, heads))
    print("seed", seed, "lengths", lengths, "heads", heads, "widths", key, value)
    return lengths, [q, k, rand(T, heads, value), g, beta], rand(len(lengths), heads, key, value)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("chunk", [16, 32, 64])
def test_chunked_and_recurrent_equal_the_definition(seed: int, chunk: int) -> None:
    lengths, inputs, state = drawn(seed)
    out, last = naive_kda(*inputs, lengths, state)
    single = [x.float() for x in inputs]
    chunked = kda_chunked(*single, layout_of(lengths), state.float(), chunk)
    recurrent = kda_recurrent(*single, layout_of(lengths), state.float())
    for form in (chunked, recurrent):
        assert relative(form[0], out) < 1e-5
        assert relative(form[1], last) < 1e-5


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("form", [kda_chunked, kda_recurrent])
def test_gradients_equal_those_of_the_definition(seed: int, form) -> None:
    lengths, inputs, state = drawn(100 + seed, longest=50)
    generator = torch.Generator().manual_seed(seed)
    exact = [x.clone().requires_grad_() for x in (*inputs, state)]
    out, last = naive_kda(*exact[:5], lengths, exact[5])
    up, up_last = (torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (out, last))
    ((out * up).sum() + (last * up_last).sum()).backward()
    single = [x.float().requires_grad_() for x in (*inputs, state)]
    out, last = form(*single[:5], layout_of(lengths), single[5])
    ((out * up.float()).sum() + (last * up_last.float()).sum()).backward()
    for name, a, b in zip(("q", "k", "v", "g", "beta", "state"), single, exact, strict=True):
        assert relative(a.grad, b.grad) < 1e-5, name


@pytest.mark.parametrize("seed", range(6))
def test_a_sequence_cut_at_random_places_continues_exactly(seed: int) -> None:
    """Pieces, single tokens among them, each from the state that the one before it left."""
    lengths, inputs, _ = drawn(200 + seed)
    inputs = [x[: lengths[0]].float() for x in inputs]
    whole, last = kda_chunked(*inputs, layout_of(lengths[:1]), None)
    generator = torch.Generator().manual_seed(seed)
    state, outs, done = None, [], 0
    while done < lengths[0]:
        step = min(int(torch.randint(1, 40, (), generator=generator)), lengths[0] - done)
        piece = [x[done : done + step] for x in inputs]
        if step == 1 and state is not None:
            out, state = kda_step(*piece, state)
        else:
            out, state = kda_chunked(*piece, layout_of([step]), state)
        outs.append(out)
        done += step
    assert relative(torch.cat(outs), whole) < 1e-5
    assert relative(state, last) < 1e-5


@pytest.mark.parametrize("seed", range(4))
def test_packed_equals_separate_to_the_last_bit_of_the_chunk(seed: int) -> None:
    lengths, inputs, state = drawn(300 + seed)
    inputs, state = [x.float() for x in inputs], state.float()
    packed, last = kda_chunked(*inputs, layout_of(lengths), state)
    start = 0
    for n, length in enumerate(lengths):
        piece = [x[start : start + length] for x in inputs]
        out, end = kda_chunked(*piece, layout_of([length]), state[n : n + 1])
        torch.testing.assert_close(packed[start : start + length], out, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(last[n : n + 1], end, rtol=1e-5, atol=1e-6)
        start += length


def raw_inputs(
    seed: int, lengths: list[int], heads: int = 2, width: int = 16
) -> tuple[list[Tensor], Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    T = sum(lengths)
    raw = [
        rand(T, heads, width),
        rand(T, heads, width),
        rand(T, heads, width),
        rand(T, heads, width),
        rand(T, heads),
    ]
    return raw, rand(heads) * 0.5, rand(heads, width) - 2


def naive_from_raw(raw: list[Tensor], A_log: Tensor, dt_bias: Tensor, lengths: list[int]) -> Tensor:
    q, k, v, z, b = (x.double() for x in raw)
    g = BOUND / (1 + torch.exp(-A_log.double().exp()[:, None] * (z + dt_bias.double())))
    scale = q.shape[-1] ** -0.5
    return naive_kda(F.normalize(q, dim=-1) * scale, F.normalize(k, dim=-1), v, g, b.sigmoid(), lengths)[0]


@pytest.mark.parametrize("seed", range(4))
def test_from_raw_projections_and_in_bfloat16(seed: int) -> None:
    """float32 within 1e-5. With bfloat16 inputs the arithmetic is float32 inside, so only the output's own rounding
    (2^-9, relative) remains: bound 3e-3 against the definition on the same rounded inputs."""
    lengths = [33, 1, 70]
    raw, A_log, dt_bias = raw_inputs(seed, lengths)
    expected = naive_from_raw(raw, A_log, dt_bias, lengths)
    single = [x.float() for x in raw]
    out, _ = kda(*single, A_log.float(), dt_bias.float(), BOUND, layout_of(lengths), None)
    assert relative(out, expected) < 1e-5
    half = [x.bfloat16() for x in raw]
    out, state = kda(*half, A_log.float(), dt_bias.float(), BOUND, layout_of(lengths), None)
    assert out.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    assert relative(out, naive_from_raw(half, A_log.float(), dt_bias.float(), lengths)) < 3e-3


def test_gradients_in_bfloat16_stay_within_a_percent() -> None:
    lengths = [40, 25]
    raw, A_log, dt_bias = raw_inputs(9, lengths)
    up = torch.randn(65, 2, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    half = [x.bfloat16().requires_grad_() for x in raw]
    exact = [x.detach().double().requires_grad_() for x in half]
    out, _ = kda(*half, A_log.float(), dt_bias.float(), BOUND, layout_of(lengths), None)
    (out * up.to(out.dtype)).sum().backward()
    (naive_from_raw(exact, A_log, dt_bias, lengths) * up.bfloat16().double()).sum().backward()
    for name, a, b in zip("qkvzb", half, exact, strict=True):
        assert relative(a.grad, b.grad) < 1e-2, name


def test_decay_stays_inside_its_bound_for_any_input() -> None:
    z = torch.tensor([-1e6, -30.0, 0.0, 30.0, 1e6])[:, None, None]
    g = decay(z, torch.tensor([math.log(16.0)]), torch.zeros(1, 1), BOUND)
    assert g.dtype == torch.float32
    assert bool((g >= BOUND).all())
    assert bool((g <= 0).all())
    assert float(decay(torch.zeros(1, 1, 1), torch.zeros(1), torch.zeros(1, 1), BOUND)) == BOUND / 2


def test_at_the_bound_every_inverse_in_a_tile_is_finite_in_bfloat16_and_the_softplus_gate_overflows() -> None:
    """A tile's keys are divided by their running decay. With 16 steps of at most e^-5 the largest quotient is
    e^80 = 5.5e34, inside bfloat16's range. The usual gate, -exp(A) softplus(z), has no such bound."""
    z = torch.full((TILE, 1, 1), 20.0)
    bounded = decay(z, torch.tensor([math.log(16.0)]), torch.zeros(1, 1), BOUND)
    softplus = -16.0 * F.softplus(z)
    assert torch.exp(-bounded.cumsum(0)).bfloat16().isfinite().all()
    assert not torch.exp(-softplus.cumsum(0)).bfloat16().isfinite().all()

    lengths = [3 * TILE + 5]
    T, K = lengths[0], 8
    generator = torch.Generator().manual_seed(0)
    q, k = (l2_normalise(torch.randn(T, 1, K, generator=generator)) for _ in range(2))
    v, beta = torch.randn(T, 1, K, generator=generator), torch.ones(T, 1)
    at_bound = torch.full((T, 1, K), BOUND, requires_grad=True)
    out, _ = kda_chunked(q, k, v, at_bound, beta, layout_of(lengths), None)
    out.sum().backward()
    assert at_bound.grad.isfinite().all()
    assert relative(out, naive_kda(q, k, v, at_bound.detach(), beta, lengths)[0]) < 1e-5
    unbounded, _ = kda_chunked(q, k, v, softplus[:1].expand(T, 1, K), beta, layout_of(lengths), None)
    assert not unbounded.isfinite().all()


def test_padding_of_a_chunk_never_reaches_a_result() -> None:
    """A NaN in another sequence of the pack, beside a chunk's padding, changes nothing (0 * NaN is NaN)."""
    lengths = [5, 19]
    raw, A_log, dt_bias = raw_inputs(3, lengths)
    single = [x.float() for x in raw]
    clean, _ = kda(*single, A_log.float(), dt_bias.float(), BOUND, layout_of(lengths), None)
    poisoned = [x.clone() for x in single]
    for x in poisoned:
        x[5:] = math.nan
    out, _ = kda(*poisoned, A_log.float(), dt_bias.float(), BOUND, layout_of(lengths), None)
    assert torch.equal(out[:5], clean[:5])
