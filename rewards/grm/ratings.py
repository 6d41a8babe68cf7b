"""From pair results to ratings: Bradley-Terry with a prior, and rewards by name.

P(i beats j) = 1 / (1 + exp(r_j - r_i)). The prior is ``prior`` half-won games of each candidate against one of rating
0, so that ratings stay finite for who wins all, and unplayed candidates are average. A tie is half a win for both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from k3rl.errors import UserError, nearest

Mapping = Literal["win_rate", "rating", "rank"]
MAPPINGS = ("win_rate", "rating", "rank")
Played = tuple[int, int, float]
"""(i, j, how much of the game i won: 1, 0.5 or 0)."""


def bradley_terry(count: int, played: Iterable[Played], prior: float = 1.0) -> NDArray[np.float64]:
    """Ratings [count], natural logs: the maximum of the posterior, by Newton's method on a concave function."""
    if prior <= 0:
        raise ValueError(f"the prior must be positive, it is {prior}")
    games = list(played)
    i, j = (np.array([g[k] for g in games], dtype=np.int64) for k in (0, 1))
    won = np.array([g[2] for g in games])
    ratings = np.zeros(count)
    for _ in range(100):
        p = 1 / (1 + np.exp(ratings[j] - ratings[i]))
        q = 1 / (1 + np.exp(-ratings))
        slope = prior * (0.5 - q)
        np.add.at(slope, i, won - p)
        np.add.at(slope, j, p - won)
        curvature = np.diag(prior * q * (1 - q))
        weight = p * (1 - p)
        for a, b, sign in ((i, i, 1), (j, j, 1), (i, j, -1), (j, i, -1)):
            np.add.at(curvature, (a, b), sign * weight)
        change = np.linalg.solve(curvature, slope)
        ratings = ratings + np.clip(change, -2, 2)
        if np.abs(change).max(initial=0.0) < 1e-10:
            break
    return ratings


def rewards_of(
    mapping: str, count: int, played: Iterable[Played], prior: float = 1.0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(rewards, ratings), both [count]. ``win_rate``: expected share of wins against the others, by their ratings, 0 to
    1; ``rating``: as they are; ``rank``: 0 for the last to 1 for the first, equal ratings share theirs."""
    ratings = bradley_terry(count, played, prior)
    if mapping == "rating" or count == 1:
        return ratings.copy(), ratings
    if mapping == "win_rate":
        p = 1 / (1 + np.exp(ratings[None, :] - ratings[:, None]))
        return (p.sum(1) - 0.5) / (count - 1), ratings
    if mapping == "rank":
        rounded = np.round(ratings, 9)
        below = (rounded[:, None] > rounded[None, :]).sum(1)
        equal = (rounded[:, None] == rounded[None, :]).sum(1) - 1
        return (below + equal / 2) / (count - 1), ratings
    raise UserError(f"grm: no mapping '{mapping}'{nearest(mapping, MAPPINGS)}")
