"""What a step leaves behind: rows for the store, fates for the ledger, numbers for people."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import correlation, fmean
from typing import Any

from k3rl.algorithms import Selection
from k3rl.chat import Renderer
from k3rl.store import rollout_row
from k3rl.types import Channel, Problem, Status, Trajectory
from rewards.service import ScoredGroup
from rollout.pool import Progress


@dataclass(frozen=True)
class Leaving:
    """Groups that leave the run in a step: trained, or dropped with a reason."""

    scored: list[ScoredGroup]
    selection: Selection
    problems: dict[int, Problem]

    def _with_fate(self) -> list[tuple[Trajectory, str]]:
        fates = [(t, "trained") for t in self.selection.trained]
        fates += [(t, f"dropped:{reason}") for t, reason in self.selection.dropped]
        fates += [(t, f"dropped:{s.drop}") for s in self.scored if s.drop for t in s.group.trajectories]
        return sorted(fates, key=lambda f: (f[0].draw, f[0].sample))

    def rows(self, step: int, version: int, renderer: Renderer, thinking: bool) -> list[dict[str, Any]]:
        """By draw, then sample. ``version`` is the trainer's before the update."""
        return [
            rollout_row(
                t,
                self.problems[t.draw],
                fate,
                step=step,
                version=version,
                renderer=renderer,
                thinking=thinking,
            )
            for t, fate in self._with_fate()
        ]

    def fates(self) -> list[tuple[int, str]]:
        """Draw and reason; the reason is empty where any of the group's trajectories was trained on."""
        by_draw: dict[int, list[str]] = defaultdict(list)
        for trajectory, fate in self._with_fate():
            by_draw[trajectory.draw].append(fate)
        return [
            (draw, "" if "trained" in fates else fates[0].removeprefix("dropped:"))
            for draw, fates in sorted(by_draw.items())
        ]


def step_metrics(
    scored: list[ScoredGroup], selection: Selection, progress: Progress, others: dict[str, float]
) -> dict[str, float]:
    """Everything known about a step, by the names of docs/metrics.md."""
    finished = [t for s in scored for t in s.group.trajectories]
    metrics = {**others, **selection.metrics}
    metrics["rollout/completed"] = float(progress.done)
    metrics["rollout/in_flight"] = float(progress.in_flight)
    metrics["rollout/tokens_per_s"] = progress.tokens_per_s
    metrics["rollout/groups"] = float(len(scored))
    metrics |= lengths(finished)
    metrics |= components(finished)
    return metrics


JUDGE = {
    "void_rate", "order_bias_rate", "first_seat_rate", "agreement", "judgements", "judge_tokens", "judge_cost",
    "rating_spread", "over_length",
}  # fmt: skip
"""Components by which the agentic judge tells of its health (`rewards.grm`)."""


def components(trajectories: list[Trajectory]) -> dict[str, float]:
    """``reward/part/...``: mean of each reward component over the trajectories that have it; ``judge/...`` where it is
    a judge's health."""
    found: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        for name, value in trajectory.reward.components.items() if trajectory.reward else ():
            found[name].append(value)
    judges = {name.rpartition(".")[0] for name in found if name.endswith(".void_rate")}
    metrics = {}
    for name, values in found.items():
        part, _, last = name.rpartition(".")
        judged = part in judges and last in JUDGE
        metrics[f"judge/{last}" if judged else f"reward/part/{name}"] = fmean(values)
    if judges:
        metrics |= _length_correlation(trajectories)
    return metrics


def _length_correlation(trajectories: list[Trajectory]) -> dict[str, float]:
    """Pearson's, of sampled tokens and reward within groups; none where either does not vary."""
    by_draw: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for t in trajectories:
        if t.reward and t.reward.total is not None:
            by_draw[t.draw].append((float(t.sampled_tokens), t.reward.total))
    lengths_, rewards = [], []
    for rows in by_draw.values():
        for i, out in enumerate((lengths_, rewards)):
            mean = fmean(row[i] for row in rows)
            out += [row[i] - mean for row in rows]
    if not any(lengths_) or not any(rewards):
        return {}
    return {"judge/length_correlation": correlation(lengths_, rewards)}


def lengths(trajectories: list[Trajectory]) -> dict[str, float]:
    """Mean reward, thinking and sampled tokens, over all and by effort."""
    metrics: dict[str, float] = {}
    for effort in ["", *sorted({str(t.effort) for t in trajectories if t.effort})]:
        some = [t for t in trajectories if not effort or t.effort == effort]
        suffix = f"/effort/{effort}" if effort else ""
        rewards = [t.reward.total for t in some if t.reward and t.reward.total is not None]
        if rewards:
            metrics[f"reward/mean{suffix}"] = fmean(rewards)
        if some:
            metrics[f"length/thinking{suffix}"] = fmean(t.channel_tokens(Channel.THINK) for t in some)
            metrics[f"length/sampled{suffix}"] = fmean(t.sampled_tokens for t in some)
            metrics[f"length/truncated{suffix}"] = fmean(t.status is Status.TRUNCATED for t in some)
    return metrics


def summary(metrics: dict[str, float]) -> str:
    """One line for the terminal."""
    parts = []
    if "reward/mean" in metrics:
        parts.append(f"reward {metrics['reward/mean']:.3f}")
    if "length/thinking" in metrics:
        parts.append(f"thinking {metrics['length/thinking']:.1f}")
    parts.append(f"{metrics['rollout/tokens_per_s']:,.0f} tokens/s")
    if "staleness/mean" in metrics:
        parts.append(f"staleness {metrics['staleness/mean']:.2f}")
    return "  ".join(parts)
