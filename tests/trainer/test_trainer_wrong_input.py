"""What a step does with rewards and responses nobody can learn from: through the reward worker, the objective and the
trainer, and what is said of it.
"""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
from trainer_data import make_trajectories, same, state_of, worker

from k3rl.algorithms import Algorithm
from k3rl.algorithms.k25 import K25Config
from k3rl.chat import load_renderer
from k3rl.config.rewards import RewardConfig, RewardPart
from k3rl.errors import RunError
from k3rl.tracking.health import check
from k3rl.types import Author, Channel, Group, Outcome, Problem, Reward, Segment, Status
from rewards.api import Scored, reward
from rewards.service import settle
from rewards.worker import RewardWorker


@reward(trusted=True, name="wrong_input_by_sample")
def by_sample(s: Scored, bad: int, value: str = "nan") -> float:
    return float(value) if s.trajectory.sample == bad else 0.25 * s.trajectory.sample


def groups(seed: int, **more) -> list[Group]:
    """Trajectories of three problems, three each, without rewards."""
    found: dict[int, list] = {}
    for t in make_trajectories(seed, **more):
        t.reward = t.advantage = None
        found.setdefault(t.draw, []).append(t)
    messages = [{"role": "user", "content": "3+5="}]
    return [
        Group(Problem(f"sum-{draw}", "general", messages, {"name": "wrong_input_by_sample"}), draw, own)
        for draw, own in found.items()
    ]


def scored(some: list[Group], bad_draw: int = -1, value: str = "nan", **config) -> list:
    """What the reward service hands to the recipe."""
    out = []
    for group in some:
        bad = 1 if group.draw == bad_draw else -1
        settings = RewardConfig(
            parts=(
                RewardPart(
                    reward="wrong_input_by_sample", label="letters", arguments={"bad": bad, "value": value}
                ),
            ),
            **config,
        )
        scorer = RewardWorker(settings, load_renderer("k3-nano"))
        out.append(settle(group, scorer.score(group), settings, step=0))
        scorer.close()
    return out


def said(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_reward_that_is_no_number_names_problem_trajectory_and_reward_and_trains_nothing(value, caplog):
    data = groups(1)
    done = scored(data, bad_draw=1, value=value)
    bad = data[1].trajectories[1]
    assert (bad.reward.outcome, bad.reward.total) == (Outcome.GRADER_FAILED, None)
    assert said(caplog) == [
        f"grader_failed on trajectory {bad.id} of 'sum-1': letters: the reward's value is {value}; its group is not "
        "trained on"
    ]
    assert [s.drop for s in done] == ["", "reward:grader_failed", ""]
    with_it, without = worker(), worker()
    selection = Algorithm(K25Config()).batch([s.group for s in done if not s.drop])
    metrics = with_it.step(selection.trained)
    clean = [s.group for s in scored(groups(1)) if s.group.draw != 1]
    without.step(Algorithm(K25Config()).batch(clean).trained)
    assert same(state_of(with_it), state_of(without))
    assert all(math.isfinite(v) for v in metrics.values())
    with pytest.raises(
        RunError, match=rf"trajectory {bad.id} of 'sum-1': letters: the reward's value is {value}"
    ):
        scored(groups(1), bad_draw=1, value=value, on_error="raise")


def test_a_nan_that_came_past_the_rewards_is_counted_said_and_not_trained_on():
    """A total of weights and clips beyond what floats hold, say."""
    (group,) = groups(2, groups=1)
    for t in group.trajectories:
        t.reward = Reward(math.nan if t.sample == 0 else float(t.sample))
    selection = Algorithm(K25Config()).batch([group])
    assert [(t.sample, why) for t, why in selection.dropped] == [(0, "unscored")]
    assert selection.metrics["reward/non_finite"] == 1
    assert any(line.startswith("reward/non_finite is 1") for line in check(selection.metrics))
    assert math.isfinite(worker().step(selection.trained)["train/loss"])


def test_an_empty_batch_leaves_everything_as_it_is_and_says_so():
    w = worker()
    before = state_of(w)
    selection = Algorithm(K25Config()).batch([])
    metrics = {**w.step(selection.trained), **selection.metrics}
    assert (w.version, metrics["train/updates"], metrics["batch/trained"]) == (0, 0, 0)
    assert same(before, state_of(w))
    assert all(math.isfinite(v) for v in metrics.values())
    assert any(line.startswith("batch/trained is 0") for line in check(metrics))


def test_rewards_that_are_all_alike_pull_only_to_the_old_policy_and_are_said():
    (group,) = groups(3, groups=1)
    for t in group.trajectories:
        t.reward = Reward(1.0)
    selection = Algorithm(K25Config(tau=0.0)).batch([group])
    assert [t.advantage for t in selection.trained] == [0.0] * 3
    w = worker(objective=K25Config(tau=0.0))
    metrics = {**w.step(selection.trained), **selection.metrics}
    assert metrics["train/grad_norm"] == 0
    assert metrics["groups/zero_variance"] == metrics["advantage/zero_share"] == 1
    lines = [line.split(" ")[0] for line in check(metrics)]
    assert {"advantage/zero_share", "groups/zero_variance"} <= set(lines)
    dropped = Algorithm(K25Config(zero_variance_groups="drop")).batch([group])
    assert [why for _, why in dropped.dropped] == ["zero_variance"] * 3


def test_one_token_responses_train_and_are_said():
    (group,) = groups(4, groups=1)
    for t in group.trajectories:
        t.segments = [Segment(Author.MODEL, Channel.RESPONSE, [5 + t.sample], [-6.0], 0)]
        t.reward = Reward(float(t.sample))
    selection = Algorithm(K25Config()).batch([group])
    w = worker()
    before = state_of(w)
    metrics = w.step(selection.trained)
    assert (metrics["train/trained_tokens"], metrics["response/one_token_share"]) == (3, 1.0)
    assert metrics["train/grad_norm"] > 0
    assert not same(before, state_of(w))
    assert any(line.startswith("response/one_token_share is 1") for line in check(metrics))


@pytest.mark.parametrize("overlong", [None, {"type": "mask"}])
def test_when_every_sample_is_truncated_they_train_or_none_does_as_asked_and_it_is_said(overlong):
    (group,) = groups(5, groups=1)
    for t in group.trajectories:
        t.status, t.reward = Status.TRUNCATED, Reward(float(t.sample))
    config = K25Config.model_validate({"overlong": overlong} if overlong else {})
    selection = Algorithm(config).batch([group])
    w = worker(objective=config)
    metrics = {**w.step(selection.trained), **selection.metrics}
    names = [line.split(" ")[0] for line in check(metrics)]
    if overlong:
        assert [why for _, why in selection.dropped] == ["truncated"] * 3
        assert (w.version, metrics["train/updates"]) == (0, 0)
        assert "batch/trained" in names
    else:
        assert (w.version, metrics["response/truncated_share"]) == (1, 1.0)
        assert np.isfinite(metrics["train/loss"])
        assert "response/truncated_share" in names
