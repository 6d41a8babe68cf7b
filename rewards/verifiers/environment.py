"""What the trajectory's own environment said of it. It judged where the trajectory's sandbox was."""

from __future__ import annotations

from k3rl.types import Status
from rewards.api import GraderError, Scored, reward


@reward(name="environment", depends="trajectory", trusted=True)
def environment(scored: Scored) -> float:
    """The ``score`` in the environment's state. 0 for a trajectory that a limit ended before it answered.

    Raises `GraderError` where a whole trajectory has none: its environment does not judge, or its state was not stored
    (rollouts read back from Parquet files have none).
    """
    state = scored.trajectory.environment_state.get("environment", {})
    score = state.get("score")
    if isinstance(score, int | float):
        return float(score)
    if scored.trajectory.status is Status.TRUNCATED:
        return 0.0
    raise GraderError("the trajectory's environment left no 'score' in its state")
