"""Trying a reward on stored rollouts: what `k3rl rewards test` computes. No training, no Ray."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from k3rl.config.rewards import PROBLEM, RewardConfig, RewardPart
from k3rl.errors import UserError
from k3rl.types import Outcome, Reward
from rewards.api import Scored, Verdict
from rewards.isolation.pool import IsolatedPool
from rewards.registry import get_reward, load_modules
from rewards.stored import StoredGroup
from rewards.worker import arguments_of


@dataclass(frozen=True, slots=True)
class Case:
    """One trajectory, scored again."""

    step: int
    id: str
    problem_id: str
    question: str
    content: str
    stored: float | None
    value: float | None
    outcome: str
    components: dict[str, float]
    explanation: str
    seconds_s: float


@dataclass(slots=True)
class Trial:
    """What a reward says of stored rollouts."""

    reward: str
    cases: list[Case] = field(default_factory=list)

    @property
    def values(self) -> list[float]:
        return [c.value for c in self.cases if c.value is not None]

    @property
    def failures(self) -> list[Case]:
        return [c for c in self.cases if c.outcome != Outcome.SCORED]

    def disagreements(self, tolerance: float = 1e-6) -> list[Case]:
        """Cases whose value is not the stored one, largest difference first."""
        apart = [
            (abs(c.value - c.stored), c) for c in self.cases if c.value is not None and c.stored is not None
        ]
        far = [(distance, c) for distance, c in apart if distance > tolerance]
        return [c for _, c in sorted(far, key=lambda pair: -pair[0])]

    def slowest(self, count: int) -> list[Case]:
        return sorted(self.cases, key=lambda c: -c.seconds_s)[:count]

    def histogram(self, bins: int = 10) -> list[tuple[str, int]]:
        """Values and their counts; by range where there are more than ``bins`` values."""
        counts = Counter(round(v, 6) for v in self.values)
        if len(counts) <= bins:
            return [(f"{value:g}", counts[value]) for value in sorted(counts)]
        low, high = min(counts), max(counts)
        width = (high - low) / bins
        filled = Counter(min(int((v - low) / width), bins - 1) for v in self.values)
        return [(f"{low + i * width:.3g} to {low + (i + 1) * width:.3g}", filled[i]) for i in range(bins)]

    def component_means(self) -> dict[str, float]:
        names = {name for c in self.cases for name in c.components}
        return {
            n: statistics.fmean(c.components[n] for c in self.cases if n in c.components)
            for n in sorted(names)
        }

    def contrasts(self, count: int) -> list[tuple[Case, Case]]:
        """The best and the worst answer to one problem, for the problems where they lie furthest apart."""
        by_problem: dict[str, list[tuple[float, Case]]] = {}
        for case in self.cases:
            if case.value is not None:
                by_problem.setdefault(case.problem_id, []).append((case.value, case))
        ordered = [sorted(some, key=lambda pair: pair[0]) for some in by_problem.values()]
        apart = [(some[-1][0] - some[0][0], some[-1][1], some[0][1]) for some in ordered]
        apart.sort(key=lambda pair: -pair[0])
        return [(best, worst) for distance, best, worst in apart if distance > 0][:count]

    def summary(self) -> dict[str, Any]:
        """As JSON: for machines, and for tests."""
        values = self.values
        return {
            "reward": self.reward,
            "trajectories": len(self.cases),
            "scored": len(values),
            "outcomes": dict(Counter(c.outcome for c in self.cases)),
            "mean": statistics.fmean(values) if values else None,
            "std": statistics.pstdev(values) if values else None,
            "histogram": self.histogram() if values else [],
            "components": self.component_means(),
            "disagreements": len(self.disagreements()),
            "seconds_s_mean": statistics.fmean(c.seconds_s for c in self.cases) if self.cases else None,
            "slowest": [asdict(c) for c in self.slowest(3)],
            "errors": [asdict(c) for c in self.failures[:10]],
        }


def try_reward(
    name: str, groups: Iterable[StoredGroup], arguments: Mapping[str, Any], config: RewardConfig
) -> Trial:
    """Score stored groups again with the reward ``name`` (``problem``: each problem's own).

    Raises `UserError` before the first call where the reward does not exist or lacks an argument.
    """
    load_modules(config.modules)
    pool = IsolatedPool(config.processes, config.memory_mb, config.retries, config.modules, config.sandbox)
    trial = Trial(name)
    part = RewardPart(reward=name, arguments=dict(arguments))
    try:
        for group in groups:
            own, given = arguments_of(part, group.problem)
            if name == PROBLEM and not own:
                raise UserError("the rollouts do not say what the problems' rewards are: name a reward")
            function = get_reward(own)
            bound = function.bind(given, f"problem '{group.problem.id}'")
            verdicts = pool.run(function, group.views, bound, function.timeout_s or config.timeout_s)
            for view, verdict, stored in zip(group.views, verdicts, group.rewards, strict=True):
                trial.cases.append(_case(group.step, view, verdict, stored))
    finally:
        pool.close()
    if not trial.cases:
        raise UserError("there are no rollouts to score")
    return trial


def _case(step: int, view: Scored, verdict: Verdict, stored: Reward) -> Case:
    score = verdict.score
    return Case(
        step=step,
        id=view.trajectory.id,
        problem_id=view.problem.id,
        question=view.question,
        content=view.content,
        # what the task was worth before a length rule replaced it, where one did
        stored=stored.components.get("task", stored.total),
        value=score.value if score else None,
        outcome=str(verdict.outcome),
        components=score.components if score else {},
        explanation=verdict.explanation,
        seconds_s=verdict.seconds_s,
    )
