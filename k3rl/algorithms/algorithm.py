"""From scored groups to what is trained: rewards to advantages, and which trajectories are left out and why.

Pure: the groups that come in are read, the records that come out are new. One record per trajectory carries
all that belongs to it, so no later shuffling or cutting can pair a reward with another's tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from k3rl.algorithms.advantages import advantages, zero_variance
from k3rl.algorithms.batch import LossOutput, TokenBatch
from k3rl.algorithms.config import CustomConfig, ObjectiveChoice
from k3rl.algorithms.objective import compute_loss
from k3rl.algorithms.overlong import MaskTruncated, SoftPenalty, soft_penalty
from k3rl.types import Group, Outcome, Status, Trajectory


@dataclass(frozen=True, slots=True)
class Selection:
    """``trained`` and ``dropped`` together are exactly the trajectories of the groups, in their order."""

    trained: list[Trajectory]
    dropped: list[tuple[Trajectory, str]]
    metrics: dict[str, float] = field(default_factory=dict)


class Algorithm:
    """An objective by its config: `batch` makes advantages, `loss` is what is minimised."""

    def __init__(self, config: ObjectiveChoice) -> None:
        if isinstance(config, CustomConfig):
            config.load()
        self.config = config

    def loss(self, batch: TokenBatch) -> LossOutput:
        """See `k3rl.algorithms.objective.compute_loss`."""
        return compute_loss(batch, self.config)

    def batch(self, groups: Sequence[Group]) -> Selection:
        """Advantages by group; what can't or shouldn't be trained is dropped with its reason.

        Reasons: ``failed``, ``unscored`` (no reward, or one that isn't finite), ``no_tokens``,
        ``truncated`` (``overlong: mask``), ``zero_variance`` (``zero_variance_groups: drop``),
        ``no_teacher`` (``token_advantages`` without them).
        """
        trained: list[Trajectory] = []
        dropped: list[tuple[Trajectory, str]] = []
        flat = non_finite = scored_groups = 0
        for group in groups:
            rewards_K = [self._reward(t) for t in group.trajectories]
            non_finite += sum(
                t.reward is not None and t.reward.total is not None and not math.isfinite(t.reward.total)
                for t in group.trajectories
            )
            advantages_K = advantages(rewards_K, self.config.baseline)
            is_flat = zero_variance(rewards_K)
            flat += is_flat
            scored_groups += any(r is not None for r in rewards_K)
            for trajectory, advantage in zip(group.trajectories, advantages_K, strict=True):
                reason = self._drop_reason(trajectory, advantage, is_flat)
                if reason:
                    dropped.append((replace(trajectory, advantage=advantage), reason))
                else:
                    trained.append(self._with_advantage(trajectory, advantage))
        metrics = {
            "groups/count": float(len(groups)),
            "groups/zero_variance": flat / scored_groups if scored_groups else 0.0,
            "reward/non_finite": float(non_finite),
            "batch/trained": float(len(trained)),
            "batch/dropped": float(len(dropped)),
        }
        return Selection(trained, dropped, metrics)

    def _reward(self, trajectory: Trajectory) -> float | None:
        reward = trajectory.reward
        if reward is None or reward.outcome is not Outcome.SCORED or reward.total is None:
            return None
        if not math.isfinite(reward.total):
            return None
        if isinstance(self.config.overlong, SoftPenalty):
            return reward.total + soft_penalty(trajectory.sampled_tokens, self.config.overlong)
        return reward.total

    def _drop_reason(self, trajectory: Trajectory, advantage: float | None, flat: bool) -> str:
        needs_group = not self.config.token_advantages or self.config.group_weight > 0
        if trajectory.status is Status.FAILED:
            return "failed"
        if trajectory.sampled_tokens == 0:
            return "no_tokens"
        if needs_group and advantage is None:
            return "unscored"
        if self.config.token_advantages and trajectory.token_advantages is None:
            return "no_teacher"
        if isinstance(self.config.overlong, MaskTruncated) and trajectory.status is Status.TRUNCATED:
            return "truncated"
        if needs_group and flat and self.config.zero_variance_groups == "drop":
            return "zero_variance"
        return ""

    def _with_advantage(self, trajectory: Trajectory, advantage: float | None) -> Trajectory:
        if not self.config.token_advantages:
            return replace(trajectory, advantage=advantage, token_advantages=None)
        tokens = trajectory.token_advantages
        assert tokens is not None  # _drop_reason took these out
        if len(tokens) != trajectory.sampled_tokens:
            raise ValueError(
                f"trajectory {trajectory.id}: {len(tokens)} token advantages "
                f"for {trajectory.sampled_tokens} sampled tokens"
            )
        if self.config.group_weight and advantage is not None:
            tokens = [a + self.config.group_weight * advantage for a in tokens]
        return replace(trajectory, advantage=advantage, token_advantages=tokens)
