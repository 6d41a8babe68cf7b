"""The agentic judge: see `rewards.grm.protocol` for what it must do, `rewards.grm.reward` for its use as a reward."""

from rewards.grm.protocol import Criterion, JudgeSession, Stage
from rewards.grm.ratings import bradley_terry, rewards_of
from rewards.grm.tournament import Pair, Result, play

__all__ = ["Criterion", "JudgeSession", "Pair", "Result", "Stage", "bradley_terry", "play", "rewards_of"]
