"""What is done about length: K3's budget rule, K2.5's Toggle, K1.5's length reward. Pure; by name in the
config.

T(y), the length that counts: thinking tokens for general domains; for agents every sampled token of the
trajectory, that is reasoning and tool calls' arguments. Source: spec/02 §2 and §3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from k3rl.config.rewards import BudgetConfig, LengthReward, ReplaceOverBudget, Toggle
from k3rl.types import Channel, Effort, Outcome, Problem, Reward, Trajectory

Tau = Mapping[str, Mapping[Effort, float]]
DEFAULT_DOMAIN = "default"


def counted_tokens(trajectory: Trajectory, whole_trajectory_domains: Sequence[str]) -> int:
    """T(y) in tokens."""
    if trajectory.domain in whole_trajectory_domains:
        return trajectory.sampled_tokens
    return trajectory.channel_tokens(Channel.THINK)


def tau_of(tau: Tau, domain: str, effort: Effort | None) -> float | None:
    """tau of a domain and effort; `None`: no limit."""
    if effort is None:
        return None
    for name in (domain, DEFAULT_DOMAIN):
        if name in tau and effort in tau[name]:
            return tau[name][effort]
    return None


def token_limit(problem: Problem, trajectory: Trajectory, tau: Tau) -> float | None:
    """tau * b0 in tokens; `None` where the problem has no budget or its domain and effort no tau."""
    factor = tau_of(tau, trajectory.domain, trajectory.effort)
    if factor is None or problem.budget_tokens is None:
        return None
    return factor * problem.budget_tokens


def apply_budgets(
    config: BudgetConfig | None,
    problem: Problem,
    trajectories: Sequence[Trajectory],
    rewards: Sequence[Reward],
    step: int,
    tau: Tau | None = None,
) -> list[Reward]:
    """The rewards of a group after its length rule.

    The task's total is kept as the component ``task``; what the rule did is in ``over_budget`` (0 or 1) or
    ``length``. Trajectories that were not scored stay as they are. ``tau`` overrides the config's, as the
    curriculum moves it.
    """
    match config:
        case None:
            return list(rewards)
        case ReplaceOverBudget():
            return _replace(config, problem, trajectories, rewards, config.tau if tau is None else tau)
        case Toggle():
            return _toggle(config, problem, trajectories, rewards, step)
        case LengthReward():
            return _length(config, trajectories, rewards, step)


def _with(reward: Reward, total: float, **components: float) -> Reward:
    assert reward.total is not None
    return replace(reward, total=total, components={**reward.components, "task": reward.total, **components})


def _replace(
    config: ReplaceOverBudget,
    problem: Problem,
    trajectories: Sequence[Trajectory],
    rewards: Sequence[Reward],
    tau: Tau,
) -> list[Reward]:
    """T(y) > tau * b0: the task reward is replaced, not added to."""
    changed = []
    for trajectory, reward in zip(trajectories, rewards, strict=True):
        limit = token_limit(problem, trajectory, tau)
        if limit is None or reward.total is None:
            changed.append(reward)
            continue
        over = counted_tokens(trajectory, config.whole_trajectory_domains) > limit
        total = config.penalty if over else reward.total
        changed.append(_with(reward, total, over_budget=float(over), token_limit=limit))
    return changed


def _toggle(
    config: Toggle, problem: Problem, trajectories: Sequence[Trajectory], rewards: Sequence[Reward], step: int
) -> list[Reward]:
    """Phase 0 (floor(t / m) even): r * 1{group mean < lambda or T <= budget}. Phase 1: r."""
    limited = (step // config.period) % 2 == 0
    scored = [r.total for r in rewards if r.total is not None]
    if not limited or problem.budget_tokens is None or not scored:
        return list(rewards)
    weak = sum(scored) / len(scored) < config.accuracy
    limit = config.factor * problem.budget_tokens
    changed = []
    for trajectory, reward in zip(trajectories, rewards, strict=True):
        if reward.total is None:
            changed.append(reward)
            continue
        over = counted_tokens(trajectory, config.whole_trajectory_domains) > limit
        total = reward.total if weak or not over else 0.0
        changed.append(_with(reward, total, over_budget=float(over), token_limit=limit))
    return changed


def _length(
    config: LengthReward, trajectories: Sequence[Trajectory], rewards: Sequence[Reward], step: int
) -> list[Reward]:
    """lambda = 0.5 - (len - min_len) / (max_len - min_len); correct: r + w lambda, wrong: r + w min(0,
    lambda)."""
    lengths = [
        t.sampled_tokens for t, r in zip(trajectories, rewards, strict=True) if r.outcome is Outcome.SCORED
    ]
    if not lengths:
        return list(rewards)
    shortest, longest = min(lengths), max(lengths)
    warm = min(1.0, step / config.warmup_steps) if config.warmup_steps else 1.0
    changed = []
    for trajectory, reward in zip(trajectories, rewards, strict=True):
        if reward.total is None:
            changed.append(reward)
            continue
        share = 0.0  # all of one length: nothing to prefer
        if longest > shortest:
            share = 0.5 - (trajectory.sampled_tokens - shortest) / (longest - shortest)
        length = share if reward.total >= config.correct_at else min(0.0, share)
        changed.append(_with(reward, reward.total + config.weight * warm * length, length=length))
    return changed
