"""Healthy ranges of metrics, and what usually makes one leave its range. Each has a row, and an anchor, in
docs/metrics.md; docs/troubleshooting.md begins with the symptom.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Range:
    """``low <= value <= high`` is healthy."""

    low: float
    high: float
    cause: str


RANGES: dict[str, Range] = {
    "rollout/logprob_diff_same_version": Range(
        0.0,
        0.05,
        "engine and trainer score the same tokens under the same version differently: another temperature or "
        "truncated sampling, quantised rollout without quantised training, or weights that did not arrive",
    ),
    "rollout/logprob_diff": Range(
        0.0, 0.3, "stale tokens (see staleness/mean), or a gap at the same version if that is high too"
    ),
    "ratio/effective_sample_size": Range(
        0.5, 1.0, "few tokens carry most of the importance weight: data too stale, or too large steps"
    ),
    "clip/below": Range(
        0.0, 0.2, "the policy moved away from many tokens it sampled: stale data or too large steps"
    ),
    "clip/above": Range(
        0.0, 0.2, "the policy moved towards many tokens it sampled: stale data or too large steps"
    ),
    "entropy": Range(
        0.02, math.inf, "the policy has collapsed: too many steps on too few problems, or too high a rate"
    ),
    "kl_behaviour/k3": Range(0.0, 0.2, "policy and sampler are far apart: stale data or too large steps"),
    "staleness/max": Range(
        0.0, 16.0, "trajectories stay paused for many steps: lambda is small for their length"
    ),
    "advantage/zero_share": Range(
        0.0, 0.8, "most groups are all right or all wrong: the problems don't fit the policy"
    ),
    "response/truncated_share": Range(0.0, 0.3, "responses run into their limit: budget too small, or loops"),
    "reward/unscored_share": Range(0.0, 0.1, "graders fail or time out: see the outcomes of the rollouts"),
    "reward/non_finite": Range(
        0.0, 0.0, "a reward became NaN or infinite after it was checked: nothing trained on it"
    ),
    "response/one_token_share": Range(0.0, 0.5, "the policy gives up at once, or its budget is one token"),
    "groups/zero_variance": Range(
        0.0,
        0.99,
        "no group has two different rewards: problems far too hard or too easy, or a reward that is constant",
    ),
    "batch/trained": Range(
        1.0,
        math.inf,
        "nothing of the step was trained on, the weights stay: see the fates in the rollout store",
    ),
    "train/grad_norm": Range(0.0, 100.0, "an outlier batch, or the first sign of divergence"),
    "moe/load_max_over_mean": Range(1.0, 4.0, "a few experts get most tokens: the router's bias is off"),
    "moe/replay_disagreement": Range(
        0.0, 0.05, "engine and trainer route tokens to other experts: replay the engine's"
    ),
    "judge/void_rate": Range(
        0.0,
        0.2,
        "the judge does not keep to its protocol, or its endpoint fails: read a trace (k3rl judge try)",
    ),
    "judge/order_bias_rate": Range(
        0.0, 0.3, "the verdict follows the seat: answers too alike for this judge, or too weak a judge"
    ),
    "judge/first_seat_rate": Range(
        0.3, 0.7, "the judge prefers a seat; both orders cancel it, at the price of ties"
    ),
    "judge/agreement": Range(
        0.6,
        1.0,
        "the judge contradicts itself when the order turns: its rubric does not tell these answers apart",
    ),
    "judge/rating_spread": Range(
        0.05, math.inf, "all answers of a group are rated alike: nothing is learnt from them"
    ),
    "judge/length_correlation": Range(
        -1.0, 0.5, "longer answers win: give the problems reference lengths and set sigma (the length guard)"
    ),
}


def anchor(name: str) -> str:
    """Of a metric's row in docs/metrics.md."""
    return name.replace("/", "-")


class Watch:
    """Says a thing once: a metric is named when it leaves its range, and again only after it was back."""

    def __init__(self) -> None:
        self._outside: set[str] = set()

    def __call__(self, metrics: Mapping[str, float]) -> list[str]:
        """Lines of `check` about metrics that were inside at the last call."""
        lines = {line.split(" ", 1)[0]: line for line in check(metrics)}
        new = [line for name, line in lines.items() if name not in self._outside]
        self._outside = (self._outside - metrics.keys()) | lines.keys()
        return new


def check(metrics: Mapping[str, float]) -> list[str]:
    """One line per metric outside its range, with where to read on; a value that isn't finite is always outside."""
    lines = []
    for name, r in RANGES.items():
        value = metrics.get(name)
        if value is not None and not r.low <= value <= r.high:
            lines.append(
                f"{name} is {value:.4g}, healthy is {r.low:g} to {r.high:g}: {r.cause} "
                f"(docs/metrics.md#{anchor(name)})"
            )
    lines += [
        f"{n} isn't finite ({v})" for n, v in metrics.items() if not math.isfinite(v) and n not in RANGES
    ]
    return lines
