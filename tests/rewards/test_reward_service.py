"""The service over Ray: groups go in, rewarded groups come out, whatever dies."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from reward_helpers import RENDERER, descendants, make_group, make_problem

from k3rl.config.jobs import RayConfig
from k3rl.config.rewards import ReplaceOverBudget, RewardConfig, RewardPart, TauCurriculum
from k3rl.errors import RunError
from k3rl.types import Effort, Outcome, Status
from rewards.curriculum import read_events
from rewards.service import RewardService

HOSTILE = Path(__file__).with_name("hostile_rewards.py")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    from k3rl.recipes.launch import ray_cluster

    with ray_cluster(RayConfig(num_cpus=4)):
        yield


def service(config: RewardConfig) -> RewardService:
    return RewardService(config, "k3-nano", True)


def test_groups_come_back_once_each_with_a_reward_on_every_trajectory():
    config = RewardConfig(parts=(RewardPart(), RewardPart(reward="xtml_format", weight=0.5)), workers=2)
    rewards = service(config)
    try:
        assert rewards.fingerprint() == RENDERER.fingerprint()
        groups = [make_group(["8", str(i)], make_problem(f"p{i}")) for i in range(12)]
        for step, group in enumerate(groups):
            group.draw = step
            rewards.submit(group, step)
        assert rewards.queue_depth == 12
        done = sorted(rewards.drain(), key=lambda s: s.group.draw)
        assert [s.group for s in done] == groups
        assert [s.step for s in done] == list(range(12))
        assert all(not s.drop for s in done)
        for i, one in enumerate(done):
            right, other = one.group.trajectories
            assert right.reward.components == {"problem": 1.0, "xtml_format": 1.0} | {
                f"xtml_format.{k}": 1.0 for k in ("closed", "clean", "calls", "channels")
            }
            assert (right.reward.total, other.reward.total) == (1.5, 1.5 if i == 8 else 0.5)
        metrics = rewards.metrics()
        assert (metrics["rewards/groups"], metrics["rewards/queue_depth"]) == (12.0, 0.0)
        assert metrics["rewards/cache_hits"] > 0
        assert rewards.drain() == []
    finally:
        rewards.close()


def test_a_failed_trajectory_is_skipped_and_the_others_count():
    rewards = service(RewardConfig())
    try:
        group = make_group(["8", "8", "9"])
        group.trajectories[1].status, group.trajectories[1].error = Status.FAILED, "sandbox lost"
        rewards.submit(group)
        (done,) = rewards.drain()
        assert not done.drop
        assert [t.reward.total for t in group.trajectories] == [1.0, None, 0.0]
        assert group.trajectories[1].reward.outcome is Outcome.SKIPPED
        assert "sandbox lost" in group.trajectories[1].reward.explanation
    finally:
        rewards.close()


def test_a_hung_reward_holds_up_no_other_group():
    config = RewardConfig(
        parts=(RewardPart(reward=f"{HOSTILE}:loops_forever"),), processes=2, timeout_s=2.0, retries=0
    )
    rewards = service(config)
    try:
        rewards.submit(make_group(["1"]))
        rewards.drain()  # its process has started
        hung, healthy = make_group(["bad", "1"], make_problem("h")), make_group(["1", "2"], make_problem("g"))
        rewards.submit(hung)
        rewards.submit(healthy)
        first = rewards.poll(timeout_s=30)
        assert [s.group.problem.id for s in first] == ["g"]
        (last,) = rewards.drain()
        assert last.drop == "reward:timed_out"
        assert [t.reward.outcome for t in hung.trajectories] == [Outcome.TIMED_OUT, Outcome.SCORED]
    finally:
        rewards.close()


def test_a_worker_that_dies_is_replaced_and_its_groups_are_scored():
    import ray

    rewards = service(
        RewardConfig(parts=(RewardPart(reward=f"{HOSTILE}:loops_forever"),), timeout_s=3.0, retries=0)
    )
    try:
        rewards.submit(make_group(["1"]))
        rewards.drain()
        groups = [make_group(["bad"], make_problem("slow")), make_group(["1"], make_problem("quick"))]
        for group in groups:
            rewards.submit(group)
        time.sleep(0.5)
        ray.kill(rewards.workers[0])
        done = rewards.drain(60)
        assert {s.group.problem.id for s in done} == {"slow", "quick"}
        assert groups[1].trajectories[0].reward.total == 1.0
        assert groups[0].trajectories[0].reward.outcome is Outcome.TIMED_OUT
        assert rewards.counts["worker_deaths"] == 1
    finally:
        rewards.close()


def test_drain_gives_up_in_time_and_names_what_is_missing():
    rewards = service(
        RewardConfig(parts=(RewardPart(reward=f"{HOSTILE}:loops_forever"),), timeout_s=30.0, retries=0)
    )
    try:
        rewards.submit(make_group(["bad"], make_problem("the-slow-one")))
        with pytest.raises(RunError, match="the-slow-one"):
            rewards.drain(1.0)
    finally:
        rewards.close()


def test_on_error_raise_stops_the_run_with_the_reason():
    rewards = service(
        RewardConfig(parts=(RewardPart(reward=f"{HOSTILE}:raises"),), retries=0, on_error="raise")
    )
    try:
        rewards.submit(make_group(["bad"]))
        with pytest.raises(RunError, match="the reward's own bug"):
            rewards.drain()
    finally:
        rewards.close()


def test_tau_moves_for_groups_handed_over_afterwards():
    tight, wide = {"general": {Effort.LOW: 0.5}}, {"general": {Effort.LOW: 100.0}}
    config = RewardConfig(budgets=ReplaceOverBudget(tau=wide))
    rewards = service(config)
    try:
        problem = make_problem(budget_tokens=4, effort=Effort.LOW)
        before, after = (make_group(["8"], problem, think="3 + 5 = 8") for _ in range(2))
        rewards.submit(before)
        rewards.set_tau(tight)
        rewards.submit(after)
        rewards.drain()
        assert (before.trajectories[0].reward.total, after.trajectories[0].reward.total) == (1.0, -1.0)
        assert after.trajectories[0].reward.components["task"] == 1.0
    finally:
        rewards.close()


def test_closing_leaves_no_process_behind():
    rewards = service(RewardConfig(parts=(RewardPart(reward=f"{HOSTILE}:raises"),), retries=0))
    rewards.submit(make_group(["1"]))
    rewards.drain()
    mine = _zygotes()
    assert mine
    rewards.close()
    deadline = time.monotonic() + 15
    while mine & _zygotes():
        assert time.monotonic() < deadline, "a reward's process outlived the service"
        time.sleep(0.1)


def _zygotes() -> set[int]:
    """Processes that fork rewards, of this test's cluster."""
    return {pid for pid, command in descendants(os.getpid()).items() if "rewards.isolation.zygote" in command}


def test_a_curriculum_moves_tau_between_steps(tmp_path):
    curriculum = TauCurriculum(stages={"general": ({Effort.LOW: 0.5},)}, hold_steps=1, approval="auto")
    rule = ReplaceOverBudget(tau={"general": {Effort.LOW: 100.0}}, curriculum=curriculum)
    rewards = service(RewardConfig(budgets=rule))
    try:
        rewards.follow_curriculum(tmp_path, 0)
        problem, totals = make_problem(budget_tokens=4, effort=Effort.LOW), []
        for step in range(3):
            group = make_group(["8"], problem, think="3 + 5 = 8")
            rewards.submit(group, step)
            rewards.drain()
            totals.append(group.trajectories[0].reward.total)
        assert totals == [1.0, -1.0, -1.0]
        assert rewards.metrics()["curriculum/stage/general"] == 1.0
        assert [e["event"] for e in read_events(tmp_path)] == ["proposed", "approved", "applied"]
    finally:
        rewards.close()


FLAKY = """
import os
from rewards import JudgeError, Scored, reward

@reward(trusted=True)
def needs_server(scored: Scored) -> float:
    if not os.path.exists({file!r}):
        raise JudgeError("the judge is down")
    return float(scored.content)
"""


def test_groups_whose_judge_is_down_wait_for_later_steps_and_are_dropped_in_the_end(tmp_path):
    server, module = tmp_path / "up", tmp_path / "flaky.py"
    module.write_text(FLAKY.format(file=str(server)))
    part = RewardPart(reward=f"{module}:needs_server")
    rewards = service(RewardConfig(parts=(part,), on_error="defer_group", deferrals=2, retries=0))
    try:
        late, lost = make_group(["1", "2"], make_problem("late")), make_group(["3"], make_problem("lost"))
        rewards.submit(late, 0)
        assert rewards.drain() == []
        assert rewards.counts["deferred"] == 1
        assert late.trajectories[0].reward.total is None  # nothing is scored by default
        server.touch()
        rewards.again(1)
        (done,) = rewards.drain()
        assert (done.step, done.drop, done.group) == (1, "", late)
        assert [t.reward.total for t in late.trajectories] == [1.0, 2.0]
        server.unlink()
        rewards.submit(lost, 1)
        (gone,) = rewards.drain(last=True)  # no step follows: its further tries are made at once
        assert (gone.drop, rewards.counts["deferred"], rewards.counts["dropped"]) == (
            "reward:judge_failed",
            3,
            1,
        )
    finally:
        rewards.close()
