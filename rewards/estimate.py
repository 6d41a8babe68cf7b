"""b0 and l0 of a problem from a cold-start model's answers (spec/02 §3). Pure.

K3 does not say how its budgets are estimated; K2.5 takes a percentile of the lengths of correct answers, and so does
the default here. A problem that was never solved gets what the solved ones of its domain would need: the same
percentile over all correct answers of the domain, or over all answers of the domain where none was right.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from k3rl.errors import UserError, nearest


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of the cold-start model. ``length`` is T(y), in tokens; ``response_tokens`` is what a reader gets to
    see, in tokens, for the verbosity guard."""

    problem_id: str
    domain: str
    length: int
    response_tokens: int
    correct: bool


@dataclass(frozen=True, slots=True)
class Budget:
    """``rule`` says where ``budget_tokens`` comes from: ``solved``, ``domain`` or ``domain_unsolved``."""

    budget_tokens: int
    reference_length: int
    rule: str
    solved: int
    answers: int


def percentile(values: Sequence[float], rho: float) -> float:
    """The rho-quantile (0 to 1), linear between the two nearest values."""
    ordered = sorted(values)
    at = rho * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


Estimator = Callable[[Sequence[int], float], float]
ESTIMATORS: dict[str, Estimator] = {
    "percentile": percentile,
    "mean": lambda lengths, _: sum(lengths) / len(lengths),
    "longest": lambda lengths, _: max(lengths),
    "shortest": lambda lengths, _: min(lengths),
}
"""By name. Only ``percentile`` looks at rho."""


def estimate(answers: Iterable[Answer], estimator: str = "percentile", rho: float = 0.9) -> dict[str, Budget]:
    """Budgets by problem. Both numbers are rounded up, and at least 1. Raises `UserError` for an unknown estimator,
    a rho outside 0 to 1, or no answers."""
    if estimator not in ESTIMATORS:
        raise UserError(f"there is no budget estimator '{estimator}'{nearest(estimator, ESTIMATORS)}")
    if not 0 <= rho <= 1:
        raise UserError(f"rho is {rho}: it is a share, from 0 to 1")
    by_problem: dict[str, list[Answer]] = defaultdict(list)
    by_domain: dict[str, list[Answer]] = defaultdict(list)
    for answer in answers:
        by_problem[answer.problem_id].append(answer)
        by_domain[answer.domain].append(answer)
    if not by_problem:
        raise UserError("there are no answers to estimate budgets from")
    rule_of = ESTIMATORS[estimator]
    budgets = {}
    for problem_id, own in by_problem.items():
        lengths, rule = [a.length for a in own if a.correct], "solved"
        if not lengths:
            domain = by_domain[own[0].domain]
            lengths, rule = [a.length for a in domain if a.correct], "domain"
            if not lengths:
                lengths, rule = [a.length for a in domain], "domain_unsolved"
        budgets[problem_id] = Budget(
            budget_tokens=max(1, math.ceil(rule_of(lengths, rho))),
            reference_length=max(1, math.ceil(percentile([a.response_tokens for a in own], 0.5))),
            rule=rule,
            solved=sum(a.correct for a in own),
            answers=len(own),
        )
    return budgets
