"""Running sums: a task for very small models in which thinking longer helps, and demonstrations of it.

``3+5-2+7=`` is answered by the last digit of the result: ``3``. Read left to right, digit by digit, each
step is one of 200 facts; in one go, a chain of eight terms is one of 10^8 x 2^7. So a model that writes
running totals is right far more often than one that guesses. Everything is a function of (seed, index).

    problems = running_sum(seed=0, size=2000)                      # for reinforcement learning
    conversations = running_sum_demonstrations(seed=1, size=4000)  # for the cold start
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from k3rl.data.conversations import Conversation
from k3rl.errors import UserError
from k3rl.types import Effort, Message, Problem

THINKING_EFFORTS = (Effort.LOW, Effort.HIGH, Effort.MAX)


@dataclass(frozen=True, slots=True)
class Chain:
    """Digits and the signs between them."""

    digits: tuple[int, ...]
    signs: tuple[str, ...]

    @property
    def text(self) -> str:
        rest = "".join(s + str(d) for s, d in zip(self.signs, self.digits[1:], strict=True))
        return f"{self.digits[0]}{rest}="

    @property
    def totals(self) -> list[int]:
        """Running totals modulo 10, the first after two terms."""
        total, totals = self.digits[0], []
        for sign, digit in zip(self.signs, self.digits[1:], strict=True):
            total = (total + digit if sign == "+" else total - digit) % 10
            totals.append(total)
        return totals


def _random(kind: str, seed: int, index: int) -> random.Random:
    digest = hashlib.blake2b(f"{kind}\x1f{seed}\x1f{index}".encode(), digest_size=8).digest()
    return random.Random(int.from_bytes(digest, "little"))


def make_chain(rng: random.Random, min_terms: int, max_terms: int) -> Chain:
    terms = rng.randint(min_terms, max_terms)
    digits = tuple(rng.randrange(10) for _ in range(terms))
    return Chain(digits, tuple(rng.choice("+-") for _ in range(terms - 1)))


def thoughts(chain: Chain, effort: Effort | None) -> str:
    """What the think channel should hold: one digit a total.

    low: every second total, counted back from the last (which it always has). high: every total.
    max: every total, ``=``, and every total again as a check.
    """
    every = "".join(map(str, chain.totals))
    if effort is Effort.LOW:
        return every[::-1][::2][::-1]
    if effort is Effort.MAX:
        return f"{every}={every}"
    return every


class RunningSums(Sequence[Problem]):
    """Problems made when asked for."""

    def __init__(self, seed: int, size: int, min_terms: int, max_terms: int, reward: str) -> None:
        self.seed, self.size, self.reward = seed, size, reward
        self.min_terms, self.max_terms = min_terms, max_terms

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> list[Problem]: ...
    def __getitem__(self, index: int | slice) -> Problem | list[Problem]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self.size))]
        if not 0 <= index < self.size:
            raise IndexError(index)
        chain = make_chain(_random("problem", self.seed, index), self.min_terms, self.max_terms)
        return Problem(
            id=f"running-sum-{self.seed}-{index}",
            domain="general",
            messages=[{"role": "user", "content": chain.text}],
            reward={"name": self.reward, "answer": str(chain.totals[-1])},
            metadata={"terms": len(chain.digits)},
        )


def running_sum(
    seed: int = 0, size: int = 2000, min_terms: int = 2, max_terms: int = 8, reward: str = "exact"
) -> RunningSums:
    """Problems: chains of ``min_terms`` to ``max_terms`` one-digit numbers, to be computed modulo 10."""
    _check_terms(min_terms, max_terms)
    return RunningSums(seed, size, min_terms, max_terms, reward)


def running_sum_demonstrations(
    seed: int = 1,
    size: int = 4000,
    min_terms: int = 2,
    max_terms: int = 8,
    skipped: float = 0.3,
    cut: float = 0.2,
) -> list[Conversation]:
    """Demonstrations for the cold start, a third each at low, high and max effort.

    A share of ``skipped`` has no thoughts and a share of ``cut`` ends them early; the answer is then a guess
    (any digit), so that the cold start knows how to think but not that it pays: that is left to
    reinforcement learning.
    """
    _check_terms(min_terms, max_terms)
    if not (skipped >= 0 and cut >= 0 and skipped + cut <= 1):
        raise UserError(
            f"the shares skipped={skipped} and cut={cut} must be at least 0 and at most 1 together"
        )
    return list(_demonstrations(seed, size, min_terms, max_terms, skipped, cut))


def _demonstrations(
    seed: int, size: int, min_terms: int, max_terms: int, skipped: float, cut: float
) -> Iterator[Conversation]:
    for index in range(size):
        rng = _random("demonstration", seed, index)
        chain = make_chain(rng, min_terms, max_terms)
        effort = THINKING_EFFORTS[index % len(THINKING_EFFORTS)]
        thought, answer = thoughts(chain, effort), str(chain.totals[-1])
        fate = rng.random()
        if fate < skipped:
            thought, answer = "", str(rng.randrange(10))
        elif fate < skipped + cut:
            thought, answer = thought[: rng.randrange(len(thought))], str(rng.randrange(10))
        reply: Message = {"role": "assistant", "content": answer}
        if thought:
            reply["reasoning_content"] = thought
        yield Conversation(
            id=f"running-sum-demonstration-{seed}-{index}",
            messages=[{"role": "user", "content": chain.text}, reply],
            effort=effort,
        )


def _check_terms(min_terms: int, max_terms: int) -> None:
    if not 2 <= min_terms <= max_terms:
        raise UserError(f"running sums need 2 <= min_terms <= max_terms, not {min_terms} and {max_terms}")
