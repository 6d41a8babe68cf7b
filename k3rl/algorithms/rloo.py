"""RLOO: REINFORCE whose baseline is the mean reward of the group's other responses, so that it stays
unbiased.
"""

from __future__ import annotations

from typing import Literal

from k3rl.algorithms.advantages import Baseline
from k3rl.algorithms.objective import CorrectedConfig, objective
from k3rl.algorithms.reinforce import reinforce


class RlooConfig(CorrectedConfig):
    type: Literal["rloo"] = "rloo"
    baseline: Baseline = "leave-one-out"
    """How a group's rewards become advantages."""


objective("rloo")(reinforce)
