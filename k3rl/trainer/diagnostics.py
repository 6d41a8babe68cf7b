"""What a step says about itself, from per-token columns of all ranks. Every name is explained in
docs/metrics.md.

Quantiles and shares are taken over all trained tokens at once, so they don't depend on ranks or
micro-batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from k3rl.algorithms import ObjectiveConfig, Sum
from k3rl.trainer.examples import Example
from k3rl.types import Outcome, Status, Trajectory

if TYPE_CHECKING:
    from k3rl.trainer.worker import StepOutput

STALENESS_BINS = ((0, 0), (1, 1), (2, 3), (4, 7), (8, None))


@dataclass(slots=True)
class Columns:
    """Per-token values of one rank's examples, by example."""

    keys: list[str] = field(default_factory=list)
    behaviour: list[np.ndarray] = field(default_factory=list)
    staleness: list[np.ndarray] = field(default_factory=list)
    advantage: list[np.ndarray] = field(default_factory=list)
    logprobs: dict[str, np.ndarray] = field(default_factory=dict)
    entropy: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def empty(cls, examples: Sequence[Example]) -> Columns:
        """For these examples; `take` brings the policy's values."""
        return cls(
            [e.key for e in examples],
            [e.behaviour for e in examples],
            [e.staleness for e in examples],
            [e.advantage for e in examples],
        )

    def take(self, examples: Sequence[Example], logprobs_P: Tensor, entropy_P: Tensor) -> None:
        """Keep one pass's values, on the host. The first pass over an example is before its update."""
        ends = np.cumsum([e.sequence_tokens for e in examples])[:-1]
        for held, values in ((self.logprobs, logprobs_P), (self.entropy, entropy_P)):
            rows = np.split(values.detach().float().cpu().numpy(), ends)
            for example, row in zip(examples, rows, strict=True):
                held.setdefault(example.key, row)

    def give_back(self, trajectories: Iterable[Trajectory]) -> None:
        """Store the policy's log-probs in the trajectories they belong to, found by id."""
        for t in trajectories:
            if t.id in self.logprobs:
                t.trainer_logprobs = self.logprobs[t.id].tolist()


def diagnose(
    trajectories: Sequence[Trajectory], outputs: Sequence[StepOutput], objective: ObjectiveConfig
) -> dict[str, float]:
    """All metrics of an RL step: speed and norm, the objective's own, the gap to the engine, rewards and
    lengths.
    """
    metrics = speed(outputs)
    sums: dict[str, Sum] = {}
    for output in outputs:
        for name, value in output.sums.items():
            sums[name] = sums[name] + value if name in sums else value
    metrics |= {name: value.mean for name, value in sums.items()}
    metrics |= gap_metrics([o.columns for o in outputs])
    metrics |= trajectory_metrics(trajectories)
    return metrics


def gap_metrics(columns: Sequence[Columns]) -> dict[str, float]:
    """Three things that look alike are kept apart: gap over all tokens, gap at the same version, version
    distance.
    """
    flat = _flatten(columns)
    if flat is None:
        return {}
    logprobs, behaviour, staleness, advantage, entropy = flat
    gap = logprobs - behaviour
    ratio = np.exp(gap)
    fresh = np.abs(gap[staleness == 0])
    metrics: dict[str, float] = {
        "rollout/logprob_diff": float(np.abs(gap).mean()),
        "rollout/logprob_diff_p99": float(np.quantile(np.abs(gap), 0.99)),
        "rollout/logprob_diff_max": float(np.abs(gap).max()),
        "ratio/p01": float(np.quantile(ratio, 0.01)),
        "ratio/p50": float(np.quantile(ratio, 0.5)),
        "ratio/p99": float(np.quantile(ratio, 0.99)),
        "ratio/max": float(ratio.max()),
        "ratio/effective_sample_size": float(ratio.sum() ** 2 / (len(ratio) * np.square(ratio).sum())),
        "kl_behaviour/k1": float(-gap.mean()),
        "kl_behaviour/k3": float((np.expm1(gap) - gap).mean()),
        "entropy": float(entropy.mean()),
        "staleness/mean": float(staleness.mean()),
        "staleness/max": float(staleness.max()),
        "advantage/abs_mean": float(np.abs(advantage).mean()),
        "advantage/zero_share": float((advantage == 0).mean()),
    }
    if len(fresh):
        metrics["rollout/logprob_diff_same_version"] = float(fresh.mean())
    for low, high in STALENESS_BINS:
        inside = staleness >= low if high is None else (staleness >= low) & (staleness <= high)
        name = f"{low}_up" if high is None else str(low) if low == high else f"{low}_{high}"
        metrics[f"staleness/share_{name}"] = float(inside.mean())
    return metrics


def _flatten(columns: Sequence[Columns]) -> tuple[np.ndarray, ...] | None:
    rows: dict[str, list[np.ndarray]] = defaultdict(list)
    for c in columns:
        for key, b, s, a in zip(c.keys, c.behaviour, c.staleness, c.advantage, strict=True):
            if key in c.logprobs:
                for name, row in (
                    ("l", c.logprobs[key]),
                    ("b", b),
                    ("s", s),
                    ("a", a),
                    ("e", c.entropy[key]),
                ):
                    rows[name].append(row)
    if not rows:
        return None
    as64 = {name: np.concatenate(parts).astype(np.float64) for name, parts in rows.items()}
    return tuple(as64[name] for name in ("l", "b", "s", "a", "e"))


def trajectory_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Rewards by domain and effort, lengths, how responses ended."""
    if not trajectories:
        return {}
    lengths = np.array([t.sampled_tokens for t in trajectories], float)
    metrics: dict[str, float] = {
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/truncated_share": _share(t.status is Status.TRUNCATED for t in trajectories),
        "response/one_token_share": float((lengths == 1).mean()),
    }
    rewards: dict[str, list[float]] = defaultdict(list)
    for t in trajectories:
        if t.reward is not None and t.reward.outcome is Outcome.SCORED and t.reward.total is not None:
            names = ["mean", f"domain/{t.domain}"]
            if t.effort is not None:
                names += [f"effort/{t.effort}", f"cell/{t.domain}.{t.effort}"]
            for name in names:
                rewards[name].append(t.reward.total)
    metrics |= {f"reward/{name}": float(np.mean(values)) for name, values in rewards.items()}
    if rewards:
        metrics["reward/std"] = float(np.std(rewards["mean"]))
    metrics["reward/unscored_share"] = 1.0 - len(rewards.get("mean", ())) / len(trajectories)
    return metrics


def _share(flags: Iterable[Any]) -> float:
    values = [bool(f) for f in flags]
    return sum(values) / len(values)


def sft_metrics(outputs: Sequence[StepOutput]) -> dict[str, float]:
    """Of all ranks: ``loss`` (weighted), ``nll`` and ``entropy`` per token in nats, and speed."""
    metrics = speed(outputs)
    for name in dict.fromkeys(name for o in outputs for name in o.sums):
        sums = [o.sums[name] for o in outputs if name in o.sums]
        metrics[name if "/" in name else f"train/{name}"] = sum(sums[1:], sums[0]).mean
    return metrics


def speed(outputs: Sequence[StepOutput]) -> dict[str, float]:
    """Of all ranks: loss, norm, counts and tokens per second."""
    seconds = max(o.seconds_s for o in outputs)
    tokens = sum(o.tokens for o in outputs)
    return {
        "train/loss": sum(o.loss for o in outputs),
        "train/grad_norm": outputs[0].grad_norm,
        "train/learning_rate": outputs[0].learning_rate,
        "train/updates": float(outputs[0].updates),
        "train/tokens": float(tokens),
        "train/trained_tokens": float(sum(o.trained_tokens for o in outputs)),
        "train/seconds_s": seconds,
        "train/peak_memory_bytes": float(max(o.peak_bytes for o in outputs)),
        "train/tokens_per_s": tokens / seconds if seconds > 0 else 0.0,
    }
