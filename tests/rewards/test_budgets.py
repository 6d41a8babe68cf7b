"""Length rules against formulas written again here, on random groups; estimation of budgets."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
import yaml
from pydantic import ValidationError
from reward_helpers import RENDERER, make_group, make_problem
from typer.testing import CliRunner

from k3rl.cli import app
from k3rl.config.rewards import LengthReward, ReplaceOverBudget, RewardConfig, TauCurriculum, Toggle
from k3rl.errors import RunError, UserError
from k3rl.store import RunStore, rollout_row
from k3rl.types import Author, Channel, Effort, Group, Outcome, Reward, Segment, Status, Trajectory
from rewards.audit import audit
from rewards.budgets import apply_budgets, counted_tokens
from rewards.curriculum import Curriculum
from rewards.estimate import Answer, estimate, percentile
from rewards.worker import RewardWorker

WHOLE = ("agent", "coding")


def random_group(
    rng: random.Random, domain: str, effort: Effort, budget: int | None, count: int = 6
) -> Group:
    problem = make_problem("p", domain=domain, effort=effort, budget_tokens=budget)
    trajectories = []
    for sample in range(count):
        segments = []
        for channel in rng.choices(
            [Channel.THINK, Channel.RESPONSE, Channel.TOOL_CALL, Channel.STRUCTURE], k=5
        ):
            n = rng.randrange(6)
            segments.append(Segment(Author.MODEL, channel, [1] * n, [-1.0] * n, 0))
            segments.append(Segment(Author.ENVIRONMENT, Channel.OBSERVATION, [2] * rng.randrange(50)))
        t = Trajectory("p", 0, sample, domain, effort, [1], segments, Status.COMPLETE)
        trajectories.append(t)
    return Group(problem, 0, trajectories)


def random_rewards(rng: random.Random, group: Group) -> list[Reward]:
    return [
        Reward(None, {}, Outcome.GRADER_FAILED) if rng.random() < 0.2 else Reward(rng.choice([0.0, 1.0, 0.3]))
        for _ in group.trajectories
    ]


def length_of(t: Trajectory) -> int:
    """T(y), counted token by token."""
    total = 0
    for segment in t.segments:
        for _ in segment.token_ids:
            if segment.author is Author.MODEL and (t.domain in WHOLE or segment.channel is Channel.THINK):
                total += 1
    return total


def test_over_budget_the_task_reward_is_replaced_exactly_where_it_must_be():
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    tau = {
        "general": {Effort.LOW: 0.5, Effort.HIGH: 1.5},
        "agent": {Effort.LOW: 2.0},
        "default": {Effort.MAX: 3.0},
    }
    for _ in range(300):
        domain, effort = rng.choice(["general", "agent", "coding", "other"]), rng.choice(list(Effort))
        budget = rng.choice([None, 1, 4, 9])
        group = random_group(rng, domain, effort, budget)
        before = random_rewards(rng, group)
        after = apply_budgets(
            ReplaceOverBudget(tau=tau), group.problem, group.trajectories, before, step=rng.randrange(99)
        )
        limit = tau.get(domain, {}).get(effort) or tau["default"].get(effort)
        for t, old, new in zip(group.trajectories, before, after, strict=True):
            if old.total is None or limit is None or budget is None:
                assert new == old
            elif length_of(t) > limit * budget:
                assert (new.total, new.components["task"], new.components["over_budget"]) == (
                    -1.0,
                    old.total,
                    1.0,
                )
            else:
                assert (new.total, new.components["over_budget"]) == (old.total, 0.0)


def test_exactly_at_the_limit_is_within_it():
    group = random_group(random.Random(1), "agent", Effort.LOW, 10, count=1)
    (t,) = group.trajectories
    t.segments = [Segment(Author.MODEL, Channel.THINK, [1] * 20, [-1.0] * 20)]
    rule = ReplaceOverBudget(tau={"agent": {Effort.LOW: 2.0}})
    assert apply_budgets(rule, group.problem, [t], [Reward(1.0)], 0)[0].total == 1.0
    t.segments.append(Segment(Author.MODEL, Channel.TOOL_CALL, [1], [-1.0]))
    assert apply_budgets(rule, group.problem, [t], [Reward(1.0)], 0)[0].total == -1.0


def test_general_counts_thinking_alone_and_agents_everything_sampled():
    for seed in range(20):
        rng = random.Random(seed)
        for domain in ("general", "agent", "coding"):
            for t in random_group(rng, domain, Effort.LOW, 5).trajectories:
                assert counted_tokens(t, WHOLE) == length_of(t)


def test_the_store_alone_says_where_the_penalty_must_be(tmp_path):
    """Counted here from the rows, and by `k3rl budgets check`, which notices a single row that is wrong."""
    tau = {"general": {Effort.LOW: 1.0, Effort.HIGH: 2.0}}
    rule = ReplaceOverBudget(tau=tau)
    worker = RewardWorker(RewardConfig(budgets=rule), RENDERER)
    rows = []
    try:
        for effort in (Effort.LOW, Effort.HIGH, Effort.MAX):
            for think in range(0, 30, 3):
                problem = make_problem("p", effort=effort, budget_tokens=7)
                group = make_group(["8", "9"], problem, think="x" * think)
                for t, reward in zip(group.trajectories, worker.score(group), strict=True):
                    t.reward = reward
                    more = {"step": 0, "version": 0, "renderer": RENDERER, "thinking": True}
                    rows.append(rollout_row(t, problem, "trained", **more))
    finally:
        worker.close()
    penalised = 0
    for row in rows:
        factor = tau["general"].get(Effort(row["effort"]))
        over = factor is not None and row["thinking_tokens"] > factor * row["budget_tokens"]
        assert (row["reward"] == -1.0) is over
        penalised += over
    assert 10 < penalised < len(rows) - 10
    stored = {"kind": "rl", "rewards": {"budgets": rule.model_dump(mode="json")}}
    store = RunStore.create(tmp_path / "run", yaml.safe_dump(stored))
    store.write_rollouts(0, rows)
    found = audit(store.path)
    assert (found.rows, found.over, found.broken) == (40, penalised, [])
    assert (
        CliRunner().invoke(app, ["budgets", "check", str(store.path)], catch_exceptions=False).exit_code == 0
    )
    wrong = next(row for row in rows if row["reward"] == 1.0 and row["effort"] == "low")
    wrong["reward"] = -1.0
    store.write_rollouts(1, rows)
    assert len(audit(store.path).broken) == 1
    with pytest.raises(RunError, match="does not hold in 1 rows"):
        CliRunner().invoke(app, ["budgets", "check", str(store.path)], catch_exceptions=False)
    store.close()


def test_the_check_knows_tau_as_it_was_in_each_step(tmp_path):
    curriculum = TauCurriculum(stages={"general": ({Effort.LOW: 0.5},)}, hold_steps=2, approval="auto")
    rule = ReplaceOverBudget(tau={"general": {Effort.LOW: 4.0}}, curriculum=curriculum)
    store = RunStore.create(
        tmp_path / "run", yaml.safe_dump({"kind": "rl", "rewards": {"budgets": rule.model_dump(mode="json")}})
    )
    worker, state = RewardWorker(RewardConfig(budgets=rule), RENDERER), Curriculum(rule, store.path)
    problem, totals = make_problem("p", effort=Effort.LOW, budget_tokens=6), []
    for step in range(4):
        group, tau = make_group(["8"], problem, think="x" * 6), state.begin_step(step)
        (t,) = group.trajectories
        (t.reward,) = worker.score(group, step, tau)
        state.end_step(step, {"general": [1.0]})
        totals.append(t.reward.total)
        more = {"step": step, "version": 0, "renderer": RENDERER, "thinking": True}
        store.write_rollouts(step, [rollout_row(t, problem, "trained", **more)])
    worker.close()
    assert totals == [1.0, 1.0, -1.0, -1.0]
    found = audit(store.path)
    assert (found.rows, found.over, found.broken) == (4, 2, [])
    store.close()


def test_toggle_limits_in_even_phases_where_the_group_is_strong():
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    rule = Toggle(period=5, accuracy=0.5, factor=2.0)
    for _ in range(300):
        step, budget = rng.randrange(40), rng.choice([None, 2, 6])
        group = random_group(rng, rng.choice(["general", "agent"]), Effort.LOW, budget)
        before = random_rewards(rng, group)
        after = apply_budgets(rule, group.problem, group.trajectories, before, step)
        known = [r.total for r in before if r.total is not None]
        for t, old, new in zip(group.trajectories, before, after, strict=True):
            expected = old.total
            if old.total is not None and math.floor(step / 5) % 2 == 0 and budget is not None:
                expected = old.total * float(np.mean(known) < 0.5 or length_of(t) <= 2.0 * budget)
            assert new.total == expected


def test_length_reward_prefers_short_right_answers_and_punishes_long_wrong_ones():
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    rule = LengthReward(weight=0.5, warmup_steps=10, correct_at=0.5)
    for _ in range(200):
        step = rng.randrange(20)
        group = random_group(rng, "general", Effort.LOW, None)
        before = random_rewards(rng, group)
        after = apply_budgets(rule, group.problem, group.trajectories, before, step)
        sizes = np.array(
            [t.sampled_tokens for t, r in zip(group.trajectories, before, strict=True) if r.total is not None]
        )
        for t, old, new in zip(group.trajectories, before, after, strict=True):
            if old.total is None:
                assert new.total is None
                continue
            spread = sizes.max() - sizes.min()
            lam = 0.5 - (t.sampled_tokens - sizes.min()) / spread if spread else 0.0
            lam = lam if old.total >= 0.5 else min(0.0, lam)
            assert new.total == pytest.approx(old.total + 0.5 * min(1.0, step / 10) * lam)


def test_percentile_is_numpys():
    rng = random.Random(5)
    for _ in range(100):
        values = [rng.randrange(1000) for _ in range(rng.randint(1, 20))]
        rho = rng.random()
        assert percentile(values, rho) == pytest.approx(float(np.quantile(values, rho)))


def answer(problem: str, length: int, correct: bool, domain: str = "general") -> Answer:
    return Answer(problem, domain, length, length // 2, correct)


def test_budgets_are_percentiles_of_correct_lengths_with_a_rule_for_the_unsolved():
    answers = [answer("a", n, True) for n in (10, 20, 30)] + [answer("a", 999, False)]
    answers += [answer("b", n, False) for n in (50, 70)]
    answers += [answer("c", n, False, "agent") for n in (40, 80)]
    budgets = estimate(answers, "percentile", 0.5)
    assert (budgets["a"].budget_tokens, budgets["a"].rule, budgets["a"].solved) == (20, "solved", 3)
    assert (budgets["b"].budget_tokens, budgets["b"].rule) == (20, "domain")
    assert (budgets["c"].budget_tokens, budgets["c"].rule) == (60, "domain_unsolved")
    assert budgets["a"].reference_length == math.ceil(np.median([5, 10, 15, 499]))
    assert estimate(answers, "longest")["a"].budget_tokens == 30
    assert estimate(answers, "mean")["a"].budget_tokens == 20
    assert estimate(answers, "percentile", 0.9)["a"].budget_tokens == 28
    assert estimate([answer("z", 0, True)])["z"].budget_tokens == 1
    for arguments, says in [
        ((answers, "median"), "estimator"),
        ((answers, "mean", 2.0), "rho"),
        (([],), "no answers"),
    ]:
        with pytest.raises(UserError, match=says):
            estimate(*arguments)


def test_a_config_that_widens_or_names_nothing_is_refused():
    with pytest.raises(ValidationError, match="widens"):
        ReplaceOverBudget(
            tau={"general": {"low": 2}}, curriculum=TauCurriculum(stages={"general": ({"low": 3},)})
        )
    with pytest.raises(ValidationError, match="no tau yet"):
        ReplaceOverBudget(curriculum=TauCurriculum(stages={"general": ({"low": 3},)}))
    with pytest.raises(ValidationError, match="above 0"):
        ReplaceOverBudget(tau={"general": {"low": 0}})


def test_budgets_are_estimated_from_a_stored_evaluation_and_read_as_data(tmp_path):
    """`k3rl budgets estimate RUN`: the columns that it writes are those that a job's data reads."""
    from k3rl.data import load_problems
    from k3rl.data.config import JsonlData

    problems = [make_problem(f"p{i}", {"name": "exact", "answer": "8"}) for i in range(3)]
    data = tmp_path / "data.jsonl"
    data.write_text(
        "".join(json.dumps({"id": p.id, "messages": p.messages, "reward": p.reward}) + "\n" for p in problems)
    )
    store = RunStore.create(
        tmp_path / "run", f"kind: evaluate\nname: run\nmodels: {{a: {{path: k3-nano}}}}\n"
        f"evaluation: {{data: {{type: jsonl, path: {data}}}}}\n",
    )  # fmt: skip
    thoughts = {"p0": ["x" * 4, "x" * 10], "p1": ["x" * 20, "x" * 30], "p2": ["x", "x"]}
    answers = {"p0": ["8", "8"], "p1": ["8", "9"], "p2": ["9", "9"]}
    worker, rows = RewardWorker(RewardConfig(), RENDERER), []
    for draw, problem in enumerate(problems):
        pairs = zip(answers[problem.id], thoughts[problem.id], strict=True)
        trajectories = [
            group.trajectories[0] for group in (make_group([a], problem, think=t) for a, t in pairs)
        ]
        for sample, t in enumerate(trajectories):
            t.draw, t.sample = draw, sample
        for t, reward in zip(trajectories, worker.score(Group(problem, draw, trajectories)), strict=True):
            t.reward = reward
            rows.append(
                rollout_row(t, problem, "evaluated:a", step=0, version=0, renderer=RENDERER, thinking=True)
            )
    worker.close()
    store.write_rollouts(0, rows)
    store.close()
    out = tmp_path / "problems.jsonl"
    arguments = ["budgets", "estimate", str(store.path), "--out", str(out), "--rho", "0.5"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert "2 by solved" in result.output
    assert "1 by domain" in result.output
    found = load_problems(JsonlData(path=str(out)))
    assert [found[i].id for i in range(3)] == ["p0", "p1", "p2"]
    assert [found[i].budget_tokens for i in range(3)] == [7, 20, 10]  # p2: the median of 4, 10, 20
    assert all(found[i].reward == problems[i].reward for i in range(3))
    assert all(found[i].reference_length for i in range(3))
