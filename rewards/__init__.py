"""Rewards: plug in a function, trust what it says. Start at `reward` and `Scored`."""

from rewards.api import GraderError, JudgeError, Score, Scored, reward

__all__ = ["GraderError", "JudgeError", "Score", "Scored", "reward"]
