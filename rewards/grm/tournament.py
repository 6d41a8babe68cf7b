"""Who is judged against whom: all pairs, Swiss rounds, or single elimination, each pair in both orders.

A judge that prefers whoever stands first is found out by showing it each pair twice: verdicts that turn with the seats
cancel to a tie, and their share is a metric. What a judgement without a record leaves is void: the pair counts by its
other order, or not at all.

    result = await play(KIND, count, judge_pair)        # judge_pair(i, j): i sits first; > 0 where i is better
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from k3rl.errors import UserError, nearest
from rewards.grm.ratings import Played, bradley_terry

KINDS = ("all_pairs", "swiss", "elimination")
JudgePair = Callable[[int, int], Awaitable[float | None]]
"""Margin of the first over the second; 0 is a tie, None a void judgement."""


@dataclass(slots=True)
class Pair:
    """Both orders of one pair: margins of ``i`` over ``j``, with i seated first and second; None: void."""

    i: int
    j: int
    first: float | None
    second: float | None

    @property
    def margins(self) -> list[float]:
        return [m for m in (self.first, self.second) if m is not None]

    @property
    def won(self) -> float | None:
        """How much of the game i won; None where no judgement stands."""
        if not self.margins:
            return None
        return sum(0.5 if m == 0 else float(m > 0) for m in self.margins) / len(self.margins)

    @property
    def turned(self) -> bool:
        """The verdict went with the seat."""
        return self.first is not None and self.second is not None and self.first * self.second < 0


@dataclass(slots=True)
class Result:
    """What a tournament found. ``judgements`` counts calls of the judge, void ones too."""

    count: int
    pairs: list[Pair] = field(default_factory=list)
    given: list[Played] = field(default_factory=list)
    """Games decided without a judge: the length guard's."""

    @property
    def played(self) -> list[Played]:
        return [(p.i, p.j, won) for p in self.pairs if (won := p.won) is not None] + self.given

    @property
    def judgements(self) -> int:
        return 2 * len(self.pairs)

    def health(self) -> dict[str, float]:
        """``void_rate`` of judgements, ``order_bias_rate`` and ``agreement`` of pairs with two judgements,
        ``first_seat_rate``: how often the first seat won, 0.5 where seats do not matter."""
        margins = [m for p in self.pairs for m in (p.first, p.second)]
        both = [p for p in self.pairs if len(p.margins) == 2]
        seats = [s for p in self.pairs for s in (p.first, None if p.second is None else -p.second) if s]
        out = {"judgements": float(len(margins)), "pairs": float(len(self.pairs))}
        if margins:
            out["void_rate"] = sum(m is None for m in margins) / len(margins)
        if both:
            out["order_bias_rate"] = sum(p.turned for p in both) / len(both)
            out["agreement"] = sum(
                (p.first or 0) * (p.second or 0) > 0 or p.first == p.second for p in both
            ) / len(both)
        if seats:
            out["first_seat_rate"] = sum(s > 0 for s in seats) / len(seats)
        return out


BOTH_OVER = ("tie", "shorter", "unplayed")


async def play(
    kind: str,
    count: int,
    judge_pair: JudgePair,
    rounds: int | None = None,
    over: Sequence[float] = (),
    both_over: str = "tie",
) -> Result:
    """``rounds``: of Swiss, else `swiss_rounds`. ``over``: tokens beyond the length limit, 0 for those within. Who is
    over loses to all within; two that are over tie (``both_over``), or the ``shorter`` wins, or they do not meet.
    No judgement is spent on them."""
    if kind not in KINDS:
        raise UserError(f"grm: no tournament '{kind}'{nearest(kind, KINDS)}")
    result = Result(count)
    out = list(over) or [0.0] * count
    inside = [i for i in range(count) if not out[i]]
    for i in range(count):
        for j in range(i + 1, count):
            if not out[i] or not out[j]:
                if out[i] or out[j]:
                    result.given.append((i, j, float(bool(out[j]))))
            elif both_over == "tie" or (both_over == "shorter" and out[i] == out[j]):
                result.given.append((i, j, 0.5))
            elif both_over == "shorter":
                result.given.append((i, j, float(out[i] < out[j])))
    if kind == "all_pairs":
        await _judge(result, [(i, j) for n, i in enumerate(inside) for j in inside[n + 1 :]], judge_pair)
    elif kind == "swiss":
        for _ in range(rounds or swiss_rounds(len(inside))):
            if not (pairs := _swiss_pairs(result, inside)):
                break
            await _judge(result, pairs, judge_pair)
    else:
        await _elimination(result, inside, judge_pair)
    return result


def swiss_rounds(count: int) -> int:
    """Enough to order a field about as all pairs do: 7 for 16 candidates, where all pairs need 15."""
    return 0 if count < 2 else min(count - 1, math.ceil(math.log2(count)) + 3)


async def _judge(result: Result, pairs: Sequence[tuple[int, int]], judge_pair: JudgePair) -> None:
    """Both orders of all pairs at once."""
    calls = [judge_pair(*seats) for i, j in pairs for seats in ((i, j), (j, i))]
    margins = await asyncio.gather(*calls)
    for n, (i, j) in enumerate(pairs):
        back = margins[2 * n + 1]
        result.pairs.append(Pair(i, j, margins[2 * n], None if back is None else -back))


def _swiss_pairs(result: Result, inside: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbours in the present ratings who have not met. Who is left over rests, which costs nothing."""
    met = {frozenset((p.i, p.j)) for p in result.pairs}
    ratings = bradley_terry(result.count, result.played)
    waiting = sorted(inside, key=lambda c: (-ratings[c], c))
    pairs = []
    while len(waiting) > 1:
        first = waiting.pop(0)
        partner = next((c for c in waiting if frozenset((first, c)) not in met), None)
        if partner is not None:
            waiting.remove(partner)
            pairs.append((first, partner))
    return pairs


async def _elimination(result: Result, inside: Sequence[int], judge_pair: JudgePair) -> None:
    """Single elimination in seeded order (first against last); the losers of the semi-finals play for third."""
    alive = list(inside)
    while len(alive) > 1:
        pairs = [(alive[n], alive[-1 - n]) for n in range(len(alive) // 2)]
        resting = alive[len(alive) // 2 : len(alive) - len(alive) // 2]
        before = len(result.pairs)
        await _judge(result, pairs, judge_pair)
        played = result.pairs[before:]
        winners = [p.i if (won := p.won) is None or won >= 0.5 else p.j for p in played]
        losers = [p.j if w == p.i else p.i for p, w in zip(played, winners, strict=True)]
        if len(pairs) == 2 and not resting:
            await _judge(result, [(losers[0], losers[1])], judge_pair)
        alive = winners + resting
