"""From log-probs of teacher and student to advantages by token. Pure. Source: spec/03 §1, §4.

    r_t = clip(log pi_teacher(y_t) - log pi_student(y_t), -R_max, R_max)

on sampled tokens alone, no discounting: r_t is the advantage of token t. With a token-mean loss, cells with short
answers would starve; `weights` makes cells or trajectories count the same, and leaves a token's mean weight at 1.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

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
    scale = weights([o.trajectory for o in opinions], config)
    for opinion, weight in zip(opinions, scale, strict=True):
        clipped = [max(-config.r_max, min(config.r_max, gap)) for gap in opinion.gaps]
        opinion.trajectory.teacher_logprobs = opinion.teacher_logprobs
        opinion.trajectory.token_advantages = [weight * r for r in clipped]


def weights(trajectories: Sequence[Trajectory], config: TokenRewardConfig) -> list[float]:
    """A factor per trajectory, whose mean over all sampled tokens is 1. With ``cell`` the tokens of each cell add up to
    its share among the cells that are present; with ``sequence`` those of each trajectory to the same."""
    if config.weighting == "token":
        return [1.0] * len(trajectories)
    cells = config.weighting == "cell"
    keys: list[Hashable] = [(t.domain, t.effort) if cells else t.id for t in trajectories]
    wanted: dict[Hashable, float] = {}
    tokens: dict[Hashable, int] = {}
    for key, t in zip(keys, trajectories, strict=True):
        tokens[key] = tokens.get(key, 0) + t.sampled_tokens
        wanted[key] = _share(t, config.cell_weights) if cells else 1.0
    present = sum(wanted[key] for key, count in tokens.items() if count)
    if present == 0:
        return [0.0] * len(trajectories)
    total = sum(tokens.values())
    return [total * wanted[key] / (present * tokens[key]) if tokens[key] else 0.0 for key in keys]


def _share(trajectory: Trajectory, shares: Mapping[str, float]) -> float:
    for name in (cell_name(trajectory), trajectory.domain, str(trajectory.effort or "none")):
        if name in shares:
            return shares[name]
    return 1.0


def cell_name(trajectory: Trajectory) -> str:
    """``domain.effort``."""
    return f"{trajectory.domain}.{trajectory.effort or 'none'}"


def metrics(opinions: Sequence[Opinion], names: Sequence[str], config: TokenRewardConfig) -> dict[str, float]:
    """Reverse KL per token (in all, by teacher, by cell), clipped share (in all, by cell), each cell's share of the
    tokens and of the gradient: of the sum of absolute advantages."""
    gaps = [g for o in opinions for g in o.gaps]
    if not gaps:
        return {}
    scale = weights([o.trajectory for o in opinions], config)
    by_teacher: dict[str, list[float]] = {}
    by_cell: dict[str, list[float]] = {}
    pull: dict[str, float] = {}
    for opinion, weight in zip(opinions, scale, strict=True):
        cell = cell_name(opinion.trajectory)
        by_teacher.setdefault(names[opinion.teacher], []).extend(opinion.gaps)
        by_cell.setdefault(cell, []).extend(opinion.gaps)
        pull[cell] = pull.get(cell, 0.0) + weight * sum(min(abs(g), config.r_max) for g in opinion.gaps)
    whole = sum(pull.values())
    out = {"teacher/kl": -fmean(gaps), "teacher/clipped_share": _clipped(gaps, config)}
    out |= {f"teacher/kl/teacher/{name}": -fmean(g) for name, g in by_teacher.items() if g}
    for cell, g in by_cell.items():
        if g:
            out[f"teacher/kl/cell/{cell}"] = -fmean(g)
            out[f"teacher/clipped_share/cell/{cell}"] = _clipped(g, config)
            out[f"teacher/token_share/cell/{cell}"] = len(g) / len(gaps)
            out[f"teacher/gradient_share/cell/{cell}"] = pull[cell] / whole if whole else 0.0
    return out


def _clipped(gaps: Sequence[float], config: TokenRewardConfig) -> float:
    return sum(abs(g) > config.r_max for g in gaps) / len(gaps)
