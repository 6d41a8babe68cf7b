"""MX formats against float64 tables: every code, every scale, every rule, ties, zeros, subnormals, NaN."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from k3rl.errors import UserError
from k3rl.quant import E2M1, E4M3, fake_quantise, quantise_mxfp4, unpack_mxfp4

RULES = ("ceil", "floor", "even")
TABLES = {
    "E2M1": (E2M1, np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)[:8], 1),
    "E4M3": (E4M3, np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64), 3),
}


def reference(x: np.ndarray, table: np.ndarray, mantissa: int, rule: str) -> np.ndarray:
    """Blocks [N, 32] in float64: scale by the rule's definition, element by look-up, the even code on ties."""
    out = np.empty_like(x)
    largest = table[-1]
    emax = math.floor(math.log2(largest))
    for row, block in enumerate(x):
        amax = np.abs(block).max()
        if amax == 0:
            out[row] = 0.0
            continue
        if rule == "ceil":
            k = next(k for k in range(-140, 140) if amax <= largest * 2.0**k)
        else:
            rounded = amax
            if rule == "even":
                unit = 2.0 ** (math.frexp(amax)[1] - 1 - mantissa)
                rounded = math.floor(amax / unit + 0.5) * unit
            k = math.frexp(rounded)[1] - 1 - emax
        scaled = np.abs(block) / 2.0 ** max(k, -127)
        distance = np.abs(scaled[:, None] - table[None])
        best = distance.min(1, keepdims=True)
        code = np.where(
            distance == best, np.arange(len(table)) + 1000 * (np.arange(len(table)) % 2), 10**6
        ).argmin(1)
        out[row] = np.sign(block) * table[code] * 2.0 ** max(k, -127)
    return out


def blocks(seed: int, count: int) -> np.ndarray:
    """Float32 values of many magnitudes, a third of them on or next to decision borders."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, 32)) * 2.0 ** rng.integers(-30, 30, (count, 1))
    eighths = rng.integers(-56, 57, (count, 32)) / 8 * 2.0 ** rng.integers(-20, 20, (count, 1))
    x = np.where(rng.random((count, 1)) < 0.33, eighths, x)
    x[rng.random((count, 32)) < 0.05] = 0
    return x.astype(np.float32).astype(np.float64)


def compare(name: str, rule: str, count: int) -> None:
    seed = int(torch.randint(2**31, ()))
    print("seed", seed)
    element, table, mantissa = TABLES[name]
    x = blocks(seed, count)
    ours = fake_quantise(torch.from_numpy(x).float(), element, rule).double().numpy()
    np.testing.assert_array_equal(ours, reference(x, table, mantissa, rule))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", TABLES)
def test_values_equal_the_float64_look_up(name, rule):
    compare(name, rule, 3000)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_ten_million_values_equal_the_float64_look_up(rule):
    compare("E2M1", rule, 312_500)


def test_every_nibble_with_every_scale_byte_decodes_to_its_value():
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[0::2] | codes[1::2] << 4).repeat(256, 2)  # [256, 16]: all codes, twice
    scale = torch.arange(256, dtype=torch.uint8)[:, None]
    values = unpack_mxfp4(packed, scale, torch.float32).double().numpy()
    table = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    expected = np.tile(table, 2)[None] * 2.0 ** (np.arange(256)[:, None] - 127.0)
    expected[255] = np.nan
    with np.errstate(over="ignore"):  # 4 * 2^126 and beyond lie outside float32
        expected = expected.astype(np.float32).astype(np.float64)
    np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("rule", RULES)
def test_packing_and_back_gives_the_fake_quantised_values_in_bfloat16_too(rule):
    x = torch.from_numpy(blocks(5, 400)).float().reshape(50, 256)
    for dtype in (torch.float32, torch.bfloat16):
        w = x.to(dtype)
        packed, scale = quantise_mxfp4(w, rule)
        assert (packed.shape, scale.shape) == ((50, 128), (50, 8))
        back = unpack_mxfp4(packed, scale, dtype)
        assert torch.equal(back, fake_quantise(w, E2M1, rule))
        assert torch.equal(fake_quantise(back, E2M1, rule), back)  # idempotent in value


def test_the_even_column_is_the_low_nibble():
    w = torch.zeros(1, 32)
    w[0, :4] = torch.tensor([6.0, -0.5, 1.0, -6.0])
    packed, scale = quantise_mxfp4(w)
    assert scale.tolist() == [[127]]
    assert packed[0, :3].tolist() == [0x97, 0xF2, 0x00]


def test_zeros_subnormals_infinities_and_nan_are_defined():
    for rule in RULES:
        packed, scale = quantise_mxfp4(torch.zeros(1, 32), rule)
        assert scale.item() == 127
        assert unpack_mxfp4(packed, scale).abs().max() == 0
        for bad in (math.inf, -math.inf, math.nan):
            x = torch.ones(2, 32)
            x[0, 3] = bad
            quantised = fake_quantise(x, E2M1, rule)
            assert quantised[0].isnan().all()
            assert torch.equal(quantised[1], x[1])
        tiny = torch.full((1, 32), 2.0**-128)  # 0.5 under the smallest scale
        assert torch.equal(fake_quantise(tiny, E2M1, rule), tiny)
        assert torch.equal(fake_quantise(torch.full((1, 32), 2.0**-140), E2M1, rule), torch.zeros(1, 32))


def test_nothing_saturates_under_ceil_and_floor_clips():
    x = torch.zeros(1, 32)
    x[0, 0] = 7.0
    assert fake_quantise(x, E2M1, "ceil")[0, 0] == 8.0
    assert fake_quantise(x, E2M1, "floor")[0, 0] == 6.0
    assert fake_quantise(x, E2M1, "even")[0, 0] == 8.0


def test_gradients_pass_straight_through():
    x = torch.randn(4, 64, requires_grad=True)
    weights = torch.randn(4, 64)
    (fake_quantise(x) * weights).sum().backward()
    assert torch.equal(x.grad, weights)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="multiple of 32"):
        fake_quantise(torch.zeros(2, 48))
    with pytest.raises(UserError, match="layer: packed .* are not an MXFP4 pair"):
        unpack_mxfp4(
            torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8), name="layer"
        )
