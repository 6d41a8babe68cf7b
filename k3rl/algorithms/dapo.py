"""DAPO: PPO's surrogate with a wider upper clip, a mean over all tokens, and groups that teach nothing left
out.

Its four parts: ``clip_high`` 0.28 over ``clip_low`` 0.2; ``normalisation: token``; ``zero_variance_groups:
drop`` (dynamic sampling); ``overlong`` (soft penalty, `k3rl.algorithms.overlong`), whose lengths depend on
the run and so are the user's to give.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from k3rl.algorithms.advantages import Baseline
from k3rl.algorithms.objective import objective
from k3rl.algorithms.ppo import ClipConfig, ppo_clip


class DapoConfig(ClipConfig):
    type: Literal["dapo"] = "dapo"
    baseline: Baseline = "group-mean-std"
    """How a group's rewards become advantages."""
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """The ratio isn't rewarded above 1 + clip_high."""
    zero_variance_groups: str = Field(default="drop", pattern="^(keep|drop)$")
    """A group whose rewards are all equal: `keep` or `drop` (dynamic sampling)."""


objective("dapo")(ppo_clip)
