"""From the values of several rewards to one total: gates, clips, weights, replacement. Pure.

    total = clip( sum over parts of  weight * clip(value)  where every gate of the part is passed )

unless a replacement applies. Every value is kept under its part's label, and a part's own components under
``label.component``, whether they counted or not.
"""

from __future__ import annotations

from collections.abc import Mapping

from k3rl.config.rewards import RewardConfig
from k3rl.types import Outcome, Reward
from rewards.api import Verdict


def bounded(value: float, bounds: tuple[float, float] | None) -> float:
    return value if bounds is None else min(max(value, bounds[0]), bounds[1])


def combine(config: RewardConfig, verdicts: Mapping[str, Verdict]) -> Reward:
    """One trajectory's reward from the verdicts of all parts, by label.

    A part that was not scored makes the whole not scored, with the first such part's outcome, unless its
    weight is 0 and nothing else looks at it.
    """
    components: dict[str, float] = {}
    explanations: list[str] = []
    failed: tuple[Outcome, str] | None = None
    looked_at = {label for part in config.parts for label in part.requires} | {
        rule.when for rule in config.replacements
    }
    for part in config.parts:
        verdict = verdicts[part.key]
        if verdict.explanation:
            explanations.append(f"{part.key}: {verdict.explanation}")
        if verdict.score is None:
            if failed is None and (part.weight != 0 or part.key in looked_at):
                failed = (verdict.outcome, "")
            continue
        components[part.key] = verdict.score.value
        components |= {f"{part.key}.{name}": v for name, v in verdict.score.components.items()}
    seconds_s = sum(v.seconds_s for v in verdicts.values())
    trace = next((v.score.trace for v in verdicts.values() if v.score and v.score.trace), "")
    explanation = "\n".join(explanations)
    if failed is not None:
        return Reward(None, components, failed[0], explanation, seconds_s, trace)
    total = _total(config, components)
    return Reward(total, components, Outcome.SCORED, explanation, seconds_s, trace)


def _total(config: RewardConfig, values: Mapping[str, float]) -> float:
    for rule in config.replacements:
        if values[rule.when] < rule.below:
            return rule.total
    total = 0.0
    for part in config.parts:
        if part.weight != 0 and all(values[label] >= least for label, least in part.requires.items()):
            total += part.weight * bounded(values[part.key], part.clip)
    return bounded(total, config.clip)
