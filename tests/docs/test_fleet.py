"""The fleet's simulation: sizes and times that can be computed by hand, and the page made from it."""

from __future__ import annotations

import pytest
import scaling_page
import simulate_fleet
from fleet_model import costs
from simulate_fleet import MINI, Clock, Fleet, publication_of, simulate


@pytest.fixture(scope="module")
def tensors():
    return publication_of("k3-mini")


def test_k3s_sizes_are_those_of_its_shapes():
    """By the released shapes (weight names and shapes of the index), counted here again."""
    k3 = costs("k3-full", 32)
    expert = 3072 * 3584 * 3
    assert k3.routed_params == 92 * 896 * expert
    kda = 4 * 12288 * 7168 + 7168 * 12288 + 3 * 12288 * 4 + 128 * 7168 + 12288 * 128 + 12288 + 96 * 7168 + 128
    mla = 12288 * 7168 * 2 + 1536 * 7168 + 18432 * 1536 + 576 * 7168 + 24576 * 512
    shared = 3 * 6144 * 7168 + 896 * 7168 + 2 * 3584 * 7168
    by_hand = 69 * kda + 24 * mla + 92 * shared + 3 * 33792 * 7168 + 2 * 163840 * 7168 + k3.routed_params
    assert k3.total_params == pytest.approx(by_hand, rel=1e-5)
    unused = 92 * (896 - 16) * expert + 163840 * 7168
    assert k3.active_params == pytest.approx(by_hand - unused, rel=1e-3)
    assert k3.kv_bytes_per_token == 24 * 576 * 2
    assert k3.state_bytes == 69 * 96 * 128 * 128 * 4


def test_decoding_alone_is_the_roofline_of_what_one_token_reads():
    k3 = costs("k3-full", 32)
    read = k3.served_bytes - 92 * 880 * 3072 * 3584 * 3 * 4.25 / 8 + 2 * k3.state_bytes + 1000 * 27648
    seconds = read / (32 * 4.8e12) / 0.4 + 0.02
    assert k3.decode_step_s(1, 1000) == pytest.approx(seconds, rel=1e-6)
    assert k3.decode_step_s(64, 64_000) < 64 * k3.decode_step_s(1, 1000)


def test_a_publication_has_the_models_bytes(tensors):
    assert sum(t.nbytes for t in tensors) == pytest.approx(2 * costs("k3-mini", 1).total_params, rel=0.01)
    assert len({t.name for t in tensors}) == len(tensors)


def test_equal_lengths_take_the_time_that_arithmetic_says(tensors, monkeypatch):
    """Two engines, all trajectories at once, each of 640 tokens: prefill, then 640 decode steps of full batches."""
    monkeypatch.setattr(simulate_fleet, "length_units", lambda *_: 640)
    fleet = Fleet(
        **{**MINI, "gpus": 2, "slots": 8, "slice_s": 1000.0, "groups": 4, "samples": 4, "completion": 1.0}
    )
    numbers = simulate(fleet, tensors, warm=0, steps=2)
    cost = costs("k3-mini", 1)
    decode = cost.decode_step_s(8, 8 * 512) * 640  # contexts are taken at a stretch's beginning
    assert numbers["rollout"] == pytest.approx(8 * cost.prefill_s(512) + decode, rel=1e-6)
    assert numbers["staleness max"] == 0
    assert numbers["trained"] * 2 * numbers["step"] == pytest.approx(16 * 640)


def test_a_smaller_lambda_cuts_the_tail_and_makes_tokens_staler(tensors):
    base = {**MINI, "gpus": 2, "slots": 16, "groups": 12, "samples": 4}
    whole, part = (simulate(Fleet(**{**base, "completion": c}), tensors, warm=2, steps=3) for c in (1.0, 0.5))
    assert (whole["staleness max"], whole["paused caches per host"]) == (0, 0)
    assert part["staleness mean"] > 0
    assert part["paused caches per host"] > 0
    assert part["tail"] < whole["tail"]
    assert part["use"] > whole["use"]


def test_two_runs_of_a_setting_are_the_same(tensors):
    fleet = Fleet(**{**MINI, "gpus": 1, "slots": 8, "groups": 4, "samples": 4})
    first, second = (simulate(fleet, tensors, 1, 2) for _ in range(2))
    first.pop("controller ms a trajectory"), second.pop("controller ms a trajectory")
    assert first == second


def test_kept_caches_are_not_computed_again(tensors):
    base = {**MINI, "gpus": 1, "slots": 16, "groups": 6, "samples": 4, "completion": 0.5}
    again, kept = (
        simulate(Fleet(**{**base, "resume": r}), tensors, 1, 2) for r in ("recompute", "keep_cache")
    )
    assert kept["recompute"] < again["recompute"]


def test_the_clock_goes_to_the_next_outcome():
    clock = Clock(5.0)
    transport = simulate_fleet.VirtualTransport(
        Fleet(**{**MINI, "gpus": 1}), costs("k3-mini", 1), clock, None
    )
    transport.due = {1: (9.0, "late"), 2: (7.0, "early")}
    assert transport.wait([1, 2], 0.5) == [2]
    assert clock() == 7.0
    assert transport.wait([1], 0.5) == [1]


def test_the_scaling_page_is_what_the_results_say():
    assert scaling_page.PAGE.read_text() == scaling_page.page(), "run: python scripts/scaling_page.py"
