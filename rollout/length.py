"""What is known about how long a trajectory will be: from its finished siblings, from earlier draws of its
problem, from its domain and effort.

The idea is Seer's (Moonshot AI, arXiv 2511.14617): the K samples of a group tell about one another. It is
used to start long trajectories first, so that they are not what a step waits for at its end, and to spread
load. A wrong guess costs time, never correctness.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from k3rl.types import Effort, Problem

PRIOR_WEIGHT = 0.5  # a domain's mean counts as half a trajectory of the problem
HISTORY_DECAY = 0.7  # of older draws of a problem: the policy changes
TAIL = 0.5  # past its expected end, a response is expected to grow by this fraction: a heavy tail's hazard


@dataclass(slots=True)
class _Mean:
    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float, decay: float = 1.0) -> None:
        self.total, self.weight = self.total * decay + value, self.weight * decay + 1.0

    @property
    def value(self) -> float:
        return self.total / self.weight


class LengthBook:
    """Sampled tokens of finished trajectories. ``default`` is the guess before anything is known.

    Keeps the last ``max_problems`` problems and the groups in flight; the pool says when a group is over.
    """

    def __init__(self, default: float, max_problems: int = 100_000) -> None:
        self._default, self._max_problems = default, max_problems
        self._problems: OrderedDict[str, _Mean] = OrderedDict()
        self._kinds: dict[str, _Mean] = {}
        self._groups: dict[int, _Mean] = {}

    def finished(self, problem: Problem, draw: int, sampled_tokens: int) -> None:
        """A trajectory ended by itself or by a limit; failed ones tell nothing."""
        self._groups.setdefault(draw, _Mean()).add(sampled_tokens)
        self._kinds.setdefault(_kind(problem), _Mean()).add(sampled_tokens, decay=0.999)
        key = _key(problem)
        self._problems.setdefault(key, _Mean()).add(sampled_tokens, HISTORY_DECAY)
        self._problems.move_to_end(key)
        if len(self._problems) > self._max_problems:
            self._problems.popitem(last=False)

    def group_over(self, draw: int) -> None:
        self._groups.pop(draw, None)

    def known(self, problem: Problem, draw: int) -> bool:
        """Has anything of this problem or group been seen?"""
        return draw in self._groups or _key(problem) in self._problems

    def total(self, problem: Problem, draw: int) -> float:
        """Expected sampled tokens of a trajectory of this group."""
        kind = self._kinds.get(_kind(problem))
        prior = kind.value if kind else self._default
        total, weight = prior * PRIOR_WEIGHT, PRIOR_WEIGHT
        for mean in (self._problems.get(_key(problem)), self._groups.get(draw)):
            if mean is not None:
                total, weight = total + mean.total, weight + mean.weight
        return total / weight

    def remaining(self, problem: Problem, draw: int, sampled_tokens: int) -> float:
        """Expected tokens to come, at least one."""
        return max(1.0, self.total(problem, draw) - sampled_tokens, TAIL * sampled_tokens)

    def state_dict(self) -> dict[str, Any]:
        """JSON. Of groups in flight too: their finished siblings are not told again."""

        def plain(means: Any) -> list[list[Any]]:
            return [[key, m.total, m.weight] for key, m in means.items()]

        return {"problems": plain(self._problems), "kinds": plain(self._kinds), "groups": plain(self._groups)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._problems = OrderedDict((k, _Mean(t, w)) for k, t, w in state["problems"])
        self._kinds = {k: _Mean(t, w) for k, t, w in state["kinds"]}
        self._groups = {k: _Mean(t, w) for k, t, w in state["groups"]}


def _kind(problem: Problem) -> str:
    return f"{problem.domain}\x1f{problem.effort or ''}"


def _key(problem: Problem) -> str:
    """The same problem at another effort is another length."""
    effort: Effort | str = problem.effort or ""
    return f"{problem.id}\x1f{effort}"
