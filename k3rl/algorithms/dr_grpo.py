"""Dr. GRPO: GRPO without its two biases, the division by the standard deviation and by each response's own
length.

Sum over tokens of PPO's clipped surrogate, divided by (sequences * constant_tokens); advantages r - mean(r).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from k3rl.algorithms.normalisation import Normalisation
from k3rl.algorithms.objective import objective
from k3rl.algorithms.ppo import ClipConfig, ppo_clip


class DrGrpoConfig(ClipConfig):
    type: Literal["dr_grpo"] = "dr_grpo"
    normalisation: Normalisation = "constant"
    """How token losses are averaged; Dr. GRPO divides by a constant."""
    constant_tokens: Annotated[int, Field(ge=0)] = 1024
    """Tokens per sequence that the sum is divided by; usually the largest response."""


objective("dr_grpo")(ppo_clip)
