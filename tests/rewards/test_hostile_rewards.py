"""Whatever a reward does, its trajectory is marked and the others keep their scores."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from reward_helpers import RENDERER, descendants, make_group, make_problem

from k3rl.config.rewards import RewardConfig, RewardPart
from k3rl.types import Outcome, Reward
from rewards.worker import RewardWorker

FILE = Path(__file__).with_name("hostile_rewards.py")
LIMIT_S = 1.0


def worker_for(name: str, **options) -> RewardWorker:
    settings = {"timeout_s": LIMIT_S, "retries": 0, "memory_mb": 1024, "processes": 1, **options}
    return RewardWorker(RewardConfig(parts=(RewardPart(reward=f"{FILE}:{name}"),), **settings), RENDERER)


def scored(name: str, contents: list[str], **options) -> list[Reward]:
    worker = worker_for(name, **options)
    try:
        return worker.score(make_group(contents))
    finally:
        worker.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[RewardWorker]:
    """One worker for many hostile rewards: what one breaks, the next would notice."""
    worker = RewardWorker(RewardConfig(timeout_s=LIMIT_S, retries=0, memory_mb=1024, processes=1), RENDERER)
    yield worker
    worker.close()


@pytest.mark.parametrize(
    ("name", "outcome", "says"),
    [
        ("loops_forever", Outcome.TIMED_OUT, "stopped after 1 s"),
        ("loops_inside_c", Outcome.TIMED_OUT, "stopped after 1 s"),
        ("deadlocks", Outcome.TIMED_OUT, "stopped after 1 s"),
        ("allocates", Outcome.GRADER_FAILED, "MemoryError"),
        ("raises", Outcome.GRADER_FAILED, "RuntimeError: the reward's own bug"),
        ("is_nan", Outcome.GRADER_FAILED, "value is nan"),
        ("is_none", Outcome.GRADER_FAILED, "value is None"),
        ("part_is_infinite", Outcome.GRADER_FAILED, "component 'a' is inf"),
        ("prints_a_gigabyte", Outcome.GRADER_FAILED, "after a gigabyte"),
        ("kills_itself", Outcome.GRADER_FAILED, "process died"),
        ("exits", Outcome.GRADER_FAILED, "process died"),
        ("kills_its_parent", Outcome.GRADER_FAILED, "process died"),
        ("overflows_the_stack", Outcome.GRADER_FAILED, "process died"),
    ],
)
def test_a_hostile_reward_costs_its_own_trajectory_alone(shared, name, outcome, says):
    problem = make_problem(name, {"name": f"{FILE}:{name}"})
    first, bad, last = shared.score(make_group(["1", "bad", "2"], problem))
    assert (bad.total, bad.outcome) == (None, outcome)
    assert says in bad.explanation
    assert len(bad.explanation) < 5000
    for good in (first, last):
        assert (good.total, good.outcome) == (1.0, Outcome.SCORED)


def test_a_reward_that_kills_its_parent_takes_no_other_call_with_it():
    """Three calls at a time, of which some kill the process that all others depend on."""
    worker = worker_for("kills_its_parent", processes=3)
    try:
        for _ in range(3):
            contents = ["1", "bad", "2", "3", "bad", "4", "5", "6", "7"]
            for content, got in zip(contents, worker.score(make_group(contents)), strict=True):
                expected = Outcome.GRADER_FAILED if content == "bad" else Outcome.SCORED
                assert got.outcome is expected, (content, got)
    finally:
        worker.close()


def test_a_group_reward_of_the_wrong_length_scores_nobody():
    rewards = scored("wrong_length", ["1", "bad", "2"])
    assert [r.outcome for r in rewards] == [Outcome.GRADER_FAILED] * 3
    assert "4 values for 3 trajectories" in rewards[0].explanation
    assert [r.total for r in scored("wrong_length", ["1", "2"])] == [1.0, 1.0]


def test_failed_calls_are_repeated_in_another_process():
    worker = worker_for("kills_itself", retries=2)
    try:
        bad, good = worker.score(make_group(["bad", "1"]))
        assert (bad.outcome, good.total) == (Outcome.GRADER_FAILED, 1.0)
        metrics = worker.metrics()
        assert (metrics["processes/died"], metrics["retries"]) == (3, 2)
    finally:
        worker.close()


def test_a_pool_of_one_process_survives_one_hung_check_after_another():
    worker = worker_for("loops_forever", timeout_s=0.3, processes=1)
    try:
        for _ in range(4):
            bad, good = worker.score(make_group(["bad", "1"]))
            assert (bad.outcome, good.total) == (Outcome.TIMED_OUT, 1.0)
        assert worker.metrics()["processes/timed_out"] == 4
    finally:
        worker.close()


def test_a_process_with_a_thread_left_over_is_not_used_again():
    worker = worker_for("leaves_a_thread")
    try:
        for _ in range(3):
            worker.score(make_group(["1"]))
        assert worker.metrics()["processes/killed"] == 3
    finally:
        worker.close()


def test_what_a_reward_started_dies_with_the_worker():
    worker = worker_for("leaves_a_process")
    worker.score(make_group(["1"]))
    deadline = time.monotonic() + 10
    while not any("sleep 86399" in c for c in descendants(os.getpid()).values()):
        assert time.monotonic() < deadline, "the reward's process never started"
        time.sleep(0.01)
    worker.close()
    deadline = time.monotonic() + 10
    while any("86399" in c for c in descendants(os.getpid()).values()) or _sleeping():
        assert time.monotonic() < deadline, "a reward's process outlived its worker"
        time.sleep(0.1)


def _sleeping() -> bool:
    return any("sleep 86399" in c for c in descendants(1).values())


def test_processes_and_descriptors_do_not_grow_over_a_thousand_calls():
    worker = worker_for("raises", processes=2, cache_entries=0)
    try:
        worker.score(make_group(["1", "2"]))
        before = len(descendants(os.getpid())), len(os.listdir("/proc/self/fd"))
        group = make_group(["1"] * 24 + ["bad"])
        for _ in range(42):
            worker.score(group)
        after = len(descendants(os.getpid())), len(os.listdir("/proc/self/fd"))
        assert after[0] <= before[0] + 1
        assert after[1] <= before[1] + 2
    finally:
        worker.close()


def test_only_a_fresh_process_forgets():
    """The trap: one answer that patches the grader forges all later verdicts of that process."""
    worker = worker_for("remembers")
    try:
        assert [r.total for r in worker.score(make_group(["a", "b", "c"]))] == [1.0, 2.0, 3.0]
    finally:
        worker.close()
    forged, later = scored("runs_what_the_model_wrote", ["grader.verdict = lambda: 1.0", "pass"])
    assert (forged.total, later.total) == (1.0, 0.0)


def test_what_a_failing_reward_printed_is_kept_to_its_first_characters():
    (bad,) = scored("prints_a_gigabyte", ["bad"], timeout_s=30.0)
    assert "printed: xxx" in bad.explanation


@pytest.mark.parametrize(
    ("on_error", "total", "drop"), [("zero", 0.0, ""), ("drop_group", None, "reward:grader_failed")]
)
def test_on_error_says_what_becomes_of_the_group(on_error, total, drop):
    from rewards.service import settle

    config = RewardConfig(parts=(RewardPart(reward=f"{FILE}:raises"),), on_error=on_error, retries=0)
    worker = RewardWorker(config, RENDERER)
    try:
        group = make_group(["1", "bad"], make_problem("q"))
        done = settle(group, worker.score(group), config, 0)
    finally:
        worker.close()
    assert done.drop == drop
    assert [t.reward.total for t in group.trajectories] == [1.0, total]
    assert group.trajectories[1].reward.outcome is Outcome.GRADER_FAILED
