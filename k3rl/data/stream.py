"""The order in which problems are drawn: endless passes, each shuffled by the seed, resumable at any draw.

Draw number n is a function of (seed, n) alone: pass p = n // size goes through a permutation keyed by (seed,
p), computed one element at a time (a Feistel network with cycle walking, Black and Rogaway, CT-RSA 2002), so
that resuming costs nothing and the state is one number. The effort of draw n walks the golden-ratio
sequence, which keeps the shares of efforts right in every short window, not only on average.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from k3rl.data.problems import ProblemSource
from k3rl.errors import UserError
from k3rl.types import Effort, Problem

GOLDEN_64 = 0x9E3779B97F4A7C15  # 2**64 / golden ratio
MASK_64 = 2**64 - 1
ROUNDS = 6


def _hash_64(*parts: int | str) -> int:
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _mix(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK_64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK_64
    return value ^ (value >> 31)


def permuted(index: int, size: int, key: int) -> int:
    """Where a permutation of ``range(size)``, chosen by ``key``, sends ``index``. O(1) time and memory."""
    if not 0 <= index < size:
        raise IndexError(index)
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    value = index
    while True:  # the network permutes 4**half values, at most four times too many: walk until one is inside
        left, right = value >> half, value & mask
        for number in range(ROUNDS):
            left, right = right, left ^ (_mix(key + number * GOLDEN_64 + right & MASK_64) & mask)
        value = left << half | right
        if value < size:
            return value


def effort_of_draw(efforts: Mapping[Effort, float], seed: int, draw: int) -> Effort | None:
    """The effort of a draw, by shares; `None` where there are none."""
    if not efforts:
        return None
    position = ((_hash_64("effort", seed) + draw * GOLDEN_64) & MASK_64) / 2**64 * sum(efforts.values())
    chosen = None
    for effort, weight in efforts.items():
        if weight > 0:
            chosen = effort
            position -= weight
            if position < 0:
                break
    return chosen


class ProblemStream:
    """Endless draws from a source. ``draw`` is the number of the next one; nothing is skipped or repeated in
    a pass.

    State is the cursor alone: whoever holds problems that were drawn but not yet used keeps them, or sets the
    cursor back to the first that was not.
    """

    def __init__(self, source: ProblemSource, seed: int) -> None:
        if not len(source):
            raise UserError("a stream of problems needs at least one")
        self.source, self.seed, self.draw = source, seed, 0

    def at(self, draw: int) -> Problem:
        """The problem of any draw, past or future."""
        number, position = divmod(draw, len(self.source))
        index = permuted(position, len(self.source), _hash_64("pass", self.seed, number))
        problem = self.source[index]
        if problem.effort is None:
            effort = effort_of_draw(self.source.efforts(index), self.seed, draw)
            if effort is not None:
                problem = replace(problem, effort=effort)
        return problem

    def next(self) -> Problem:
        problem = self.at(self.draw)
        self.draw += 1
        return problem

    def state_dict(self) -> dict[str, Any]:
        return {
            "draw": self.draw,
            "seed": self.seed,
            "size": len(self.source),
            "fingerprint": self.source.fingerprint(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises `UserError` where the state is that of other problems or another seed: resuming would
        repeat some."""
        if state["seed"] != self.seed:
            raise UserError(f"the checkpoint's problem order has seed {state['seed']}, this run {self.seed}")
        if state["size"] != len(self.source) or state["fingerprint"] != self.source.fingerprint():
            raise UserError(
                f"the checkpoint was made with other problems ({state['size']} of them) than the data source "
                f"now has ({len(self.source)}): start a new run, or bring the old data back"
            )
        self.draw = int(state["draw"])
