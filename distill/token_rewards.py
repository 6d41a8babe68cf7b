"""From log-probs of teacher and student to advantages by token. Pure. Source: spec/03 §1, §4.

    r_t = clip(log pi_teacher(y_t) - log pi_student(y_t), -R_max, R_max)

on sampled tokens alone, no discounting: r_t is the advantage of token t. With a token-mean loss, cells with short
answers would starve; `weights` makes cells or trajectories count the same, and leaves a token's mean weight at 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from k3rl.config.distill import TokenRewardConfig
from k3rl.types import Trajectory


@dataclass(frozen=True, slots=True)
class Opinion:
    """What a teacher thinks of a trajectory's sampled tokens, beside what the student thought. Natural logs."""

    trajectory: Trajectory
    teacher: int
    teacher_logprobs: list[float]
    student_logprobs: list[float]

    def __post_init__(self) -> None:
        counts = {len(self.teacher_logprobs), len(self.student_logprobs), self.trajectory.sampled_tokens}
        if len(counts) > 1:
            raise ValueError(
                f"trajectory {self.trajectory.id}: {len(self.teacher_logprobs)} log-probs of the teacher and "
                f"{len(self.student_logprobs)} of the student for {self.trajectory.sampled_tokens} sampled tokens"
            )

    @property
    def gaps(self) -> list[float]:
        """log teacher - log student; their mean is minus the reverse KL's estimate."""
        return [t - s for t, s in zip(self.teacher_logprobs, self.student_logprobs, strict=True)]


def assign(opinions: Sequence[Opinion], config: TokenRewardConfig) -> None:
    """Put ``teacher_logprobs`` and ``token_advantages`` on the trajectories."""
    scale = weights([o.trajectory for o in opinions], config.weighting)
    for opinion, weight in zip(opinions, scale, strict=True):
        clipped = [max(-config.r_max, min(config.r_max, gap)) for gap in opinion.gaps]
        opinion.trajectory.teacher_logprobs = opinion.teacher_logprobs
        opinion.trajectory.token_advantages = [weight * r for r in clipped]


def weights(trajectories: Sequence[Trajectory], weighting: str) -> list[float]:
    """A factor per trajectory, whose mean over all sampled tokens is 1."""
    if weighting == "token":
        return [1.0] * len(trajectories)
    keys = [(t.domain, t.effort) if weighting == "cell" else t.id for t in trajectories]
    tokens: dict[object, int] = {}
    for key, t in zip(keys, trajectories, strict=True):
        tokens[key] = tokens.get(key, 0) + t.sampled_tokens
    sizes = {key: count for key, count in tokens.items() if count}
    total = sum(sizes.values())
    return [total / (len(sizes) * sizes[key]) if key in sizes else 0.0 for key in keys]


def metrics(opinions: Sequence[Opinion], names: Sequence[str], config: TokenRewardConfig) -> dict[str, float]:
    """Reverse KL per token (in all, by teacher, by cell), clipped share, and each cell's share of the gradient."""
    out: dict[str, float] = {}
    gaps = [g for o in opinions for g in o.gaps]
    if not gaps:
        return out
    out["teacher/kl"] = -sum(gaps) / len(gaps)
    out["teacher/clipped_share"] = sum(abs(g) > config.r_max for g in gaps) / len(gaps)
    parts: dict[str, list[float]] = {}
    pull: dict[str, float] = {}
    scale = weights([o.trajectory for o in opinions], config.weighting)
    for opinion, weight in zip(opinions, scale, strict=True):
        cell = f"{opinion.trajectory.domain}.{opinion.trajectory.effort or 'none'}"
        parts.setdefault(f"teacher/kl/teacher/{names[opinion.teacher]}", []).extend(opinion.gaps)
        parts.setdefault(f"teacher/kl/cell/{cell}", []).extend(opinion.gaps)
        pull[cell] = pull.get(cell, 0.0) + weight * sum(abs(g) for g in opinion.gaps)
    out |= {name: -sum(g) / len(g) for name, g in parts.items() if g}
    whole = sum(pull.values())
    out |= {f"teacher/gradient_share/cell/{cell}": p / whole for cell, p in pull.items() if whole}
    return out
