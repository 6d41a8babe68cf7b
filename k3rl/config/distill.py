"""Who teaches, and what a teacher's opinion is worth. Source: spec/03."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from k3rl.config.base import Config
from k3rl.models.config import ModelConfig
from k3rl.types import Effort


class TeacherConfig(Config):
    """One teacher and the cells it teaches."""

    name: str = ""
    """What reports call it, and what a problem's ``metadata.teacher`` may ask for; its path by default."""
    model: ModelConfig
    """The teacher. It must have the student's vocabulary and template."""
    domains: tuple[str, ...] = ()
    """Domains it teaches; empty: all."""
    efforts: tuple[Effort, ...] = ()
    """Efforts it teaches; empty: all."""
    prompt_effort: Literal["student", "none"] | Effort = "student"
    """The effort message in the teacher's prompt: the student's own, none, or a fixed level."""


class TokenRewardConfig(Config):
    """``clip(log teacher - log student, ±r_max)``, the advantage of that token."""

    r_max: Annotated[float, Field(gt=0)] = 5.0
    """Largest advantage, natural-log units."""
    outcome_weight: Annotated[float, Field(ge=0)] = 0.0
    """Adds this times the group's outcome advantage."""
    weighting: Literal["cell", "sequence", "token"] = "cell"
    """Whose gradient counts how much: every (domain, effort) cell the same, every trajectory, or every token."""
    warn_kl: Annotated[float, Field(gt=0)] = 0.15
    """Warn when the first step's mean reverse KL to a teacher, per token, is above this (spec/03 §3)."""
