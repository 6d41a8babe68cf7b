"""Advantages, selection of what trains, and length rules."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from k3rl.algorithms import Algorithm, K25Config, ObjectiveChoice, advantages, zero_variance
from k3rl.algorithms.overlong import SoftPenalty, soft_penalty
from k3rl.types import Author, Channel, Group, Outcome, Problem, Reward, Segment, Status, Trajectory

rewards = st.lists(st.floats(-10, 10), min_size=2, max_size=16)


@given(rewards)
def test_a_groups_advantages_sum_to_zero(values):
    for baseline in ("group-mean", "group-mean-std", "leave-one-out"):
        assert math.fsum(advantages(values, baseline)) == pytest.approx(0.0, abs=1e-6)


@given(rewards)
def test_against_an_independent_reference(values):
    mean = statistics.fmean(values)
    assert advantages(values, "group-mean") == pytest.approx([v - mean for v in values], abs=1e-9)
    loo = [v - statistics.fmean(values[:i] + values[i + 1 :]) for i, v in enumerate(values)]
    assert advantages(values, "leave-one-out") == pytest.approx(loo, abs=1e-9)
    std = statistics.stdev(values)
    assert advantages(values, "group-mean-std") == pytest.approx(
        [(v - mean) / (std + 1e-6) for v in values], abs=1e-5
    )


def test_by_hand():
    assert advantages([1.0, 0.0, 0.0, 1.0], "group-mean") == [0.5, -0.5, -0.5, 0.5]
    assert advantages([1.0, 0.0, 0.0], "leave-one-out") == pytest.approx([1.0, -0.5, -0.5])
    assert advantages([2.0, -1.0], "none") == [2.0, -1.0]
    assert advantages([1.0, 0.0], "group-mean-std")[0] == pytest.approx(0.5 / math.sqrt(0.5), abs=1e-5)
    assert advantages([3.0], "group-mean-std") == [0.0]


def test_a_failed_grader_is_no_zero():
    assert advantages([1.0, None, 0.0], "group-mean") == [0.5, None, -0.5]
    assert advantages([None, None], "group-mean") == [None, None]
    assert not zero_variance([None, None])
    assert zero_variance([0.5, None, 0.5])
    with pytest.raises(ValueError, match="reward 1 of the group is nan"):
        advantages([1.0, float("nan")], "group-mean")


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (101, -1.0)]
)
def test_soft_penalty_table(tokens, penalty):
    assert soft_penalty(tokens, SoftPenalty(max_tokens=100, interval_tokens=20)) == pytest.approx(penalty)


def trajectory(sample, total, tokens=3, status=Status.COMPLETE, outcome=Outcome.SCORED, **more):
    return Trajectory(
        problem_id="p",
        draw=0,
        sample=sample,
        domain="general",
        effort=None,
        prompt_ids=[1, 2],
        segments=[Segment(Author.MODEL, Channel.RESPONSE, [5] * tokens, [-0.5] * tokens, 0)]
        if tokens
        else [],
        status=status,
        reward=None if outcome is None else Reward(total, outcome=outcome),
        **more,
    )


def group(*trajectories):
    problem = Problem("p", "general", [{"role": "user", "content": "?"}], {"name": "x"})
    return Group(problem, 0, list(trajectories))


def algorithm(**config):
    return Algorithm(TypeAdapter(ObjectiveChoice).validate_python({"type": "k25", **config}))


def test_everything_is_trained_or_dropped_with_a_reason():
    g = group(
        trajectory(0, 1.0),
        trajectory(1, 0.0),
        trajectory(2, None, outcome=Outcome.JUDGE_FAILED),
        trajectory(3, float("nan")),
        trajectory(4, 0.5, status=Status.FAILED),
        trajectory(5, 0.5, tokens=0),
        trajectory(6, 0.5, outcome=None),
    )
    chosen = algorithm().batch([g])
    assert [t.sample for t in chosen.trained] == [0, 1]
    assert [(t.sample, why) for t, why in chosen.dropped] == [
        (2, "unscored"),
        (3, "unscored"),
        (4, "failed"),
        (5, "no_tokens"),
        (6, "unscored"),
    ]
    assert chosen.trained[0].advantage == pytest.approx(0.5)
    assert chosen.metrics["reward/non_finite"] == 1
    assert g.trajectories[0].advantage is None  # what came in is not changed


def test_dynamic_sampling_drops_flat_groups_only():
    flat, mixed = group(trajectory(0, 1.0), trajectory(1, 1.0)), group(trajectory(0, 1.0), trajectory(1, 0.0))
    chosen = algorithm(zero_variance_groups="drop").batch([flat, mixed])
    assert len(chosen.trained) == 2
    assert [why for _, why in chosen.dropped] == ["zero_variance"] * 2
    assert chosen.metrics["groups/zero_variance"] == 0.5
    kept = algorithm().batch([flat, mixed])
    assert [t.advantage for t in kept.trained] == [0.0, 0.0, 0.5, -0.5]


def test_overlong_mask_and_penalty():
    g = group(trajectory(0, 1.0, tokens=10, status=Status.TRUNCATED), trajectory(1, 1.0, tokens=4))
    chosen = algorithm(overlong={"type": "mask"}).batch([g])
    assert [(t.sample, why) for t, why in chosen.dropped] == [(0, "truncated")]
    chosen = algorithm(overlong={"type": "soft_penalty", "max_tokens": 10, "interval_tokens": 4}).batch([g])
    assert [t.advantage for t in chosen.trained] == pytest.approx([-0.5, 0.5])


def test_token_advantages():
    g = group(
        trajectory(0, 1.0, token_advantages=[0.1, 0.2, 0.3]),
        trajectory(1, None, outcome=Outcome.SKIPPED, token_advantages=[1.0, 1.0, 1.0]),
        trajectory(2, 0.0),
    )
    chosen = algorithm(token_advantages=True).batch([g])
    assert [t.token_advantages for t in chosen.trained] == [[0.1, 0.2, 0.3], [1.0, 1.0, 1.0]]
    assert [why for _, why in chosen.dropped] == ["no_teacher"]
    chosen = algorithm(token_advantages=True, group_weight=2.0).batch([g])
    assert chosen.trained[0].token_advantages == pytest.approx([1.1, 1.2, 1.3])
    assert [why for _, why in chosen.dropped] == ["unscored", "no_teacher"]
    with pytest.raises(ValueError, match="2 token advantages for 3 sampled tokens"):
        algorithm(token_advantages=True).batch([group(trajectory(0, 1.0, token_advantages=[0.1, 0.2]))])


def test_all_zero_advantages_all_truncated_and_no_groups_are_defined():
    assert algorithm().batch([]).trained == []
    truncated = group(*(trajectory(k, 0.0, status=Status.TRUNCATED) for k in range(3)))
    assert [t.advantage for t in algorithm().batch([truncated]).trained] == [0.0] * 3
    assert algorithm(overlong={"type": "mask"}).batch([truncated]).trained == []
    assert isinstance(algorithm().config, K25Config)
