"""The keyboard walk: a task for very small models in which thinking pays, and demonstrations of it.

The question ``EP>3`` asks where two fingers are that start at E and P and take three steps along the keyboard, each
key to its right-hand neighbour, the last one of all to the first: ``YD``. One step is one of 26 facts; three in one
go, for two fingers, is one of 676 x 5 answers. So a model that walks in its thoughts is right where one that guesses
is not, and how finely it walks is what effort means:

    low   EP>3   2:RA0:YD               two steps at a time, an odd one first; steps that are left before each pair
    high  EP>3   2:RA1:TS0:YD           step by step
    max   EP>3   2:ER1:RT0:TY;2:PA1:AS0:SD   one finger after the other, from and to

The same walk along other rings of characters (`RINGS`) is other facts to learn. `shell_walk` has it behind tools in a
sandbox, `cipher_programs` as what must be worked out before a program can be written.

Everything is a function of its arguments. A tenth of all problems is held out, by a hash of the question.

    problems = keyboard_walk(part="train")                      # for reinforcement learning
    conversations = keyboard_walk_demonstrations(size=9600)     # for the cold start
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Literal

from k3rl.data.conversations import Conversation
from k3rl.errors import UserError, nearest
from k3rl.types import Effort, Message, Problem

KEYS = "QWERTYUIOPASDFGHJKLZXCVBNM"
RINGS = {
    "keyboard": KEYS,
    "alphabet": "zyxwvutsrqponmlkjihgfedcba",
    "punctuation": "!#$%&()*+-./=?@[]^_{|}~<,'",
}
"""Characters in the order of their steps, each one token of the nano tokenizer; the last is followed by the first."""
DIGITS = "0123456789"
EFFORTS = (Effort.LOW, Effort.HIGH, Effort.MAX)
Part = Literal["train", "held_out"]


def step(keys: str, count: int = 1, *rings: str) -> str:
    """Every finger ``count`` keys further, along the ring that its key is on (default: the keyboard)."""
    return "".join(_further(key, count, rings or (KEYS,)) for key in keys)


def _further(key: str, count: int, rings: Sequence[str]) -> str:
    ring = next(r for r in rings if key in r)
    return ring[(ring.index(key) + count) % len(ring)]


def thoughts(start: str, steps: int, effort: Effort | None, *rings: str, counted: str = DIGITS) -> str:
    """What the think channel should hold (see the module's docstring); without an effort, as at high. ``counted``: what
    the steps that are left are called."""
    if effort is Effort.MAX:
        return ";".join(_fine(finger, steps, rings, counted) for finger in start)
    left = range(steps - 1, -1, -1) if effort is not Effort.LOW else range((steps - 1) // 2 * 2, -1, -2)
    return "".join(f"{counted[n]}:{step(start, steps - n, *rings)}" for n in left)


def _fine(key: str, steps: int, rings: Sequence[str], counted: str) -> str:
    return "".join(
        f"{counted[n]}:{step(key, steps - n - 1, *rings)}{step(key, steps - n, *rings)}"
        for n in range(steps - 1, -1, -1)
    )


def careless(
    rng: random.Random, thought: str, answer: str, guess: Callable[[], str], skipped: float, cut: float
) -> tuple[str, str]:
    """Thoughts and answer of a demonstration: as they should be; or, with these shares, without thoughts or with
    thoughts that end early, and then the answer is the guess."""
    if not (skipped >= 0 and cut >= 0 and skipped + cut <= 1):
        raise UserError(
            f"the shares skipped={skipped} and cut={cut} must be at least 0 and at most 1 together"
        )
    fate = rng.random()
    if fate >= skipped + cut:
        return thought, answer
    return "" if fate < skipped else thought[: rng.randrange(len(thought))], guess()


def said(content: str, thought: str, **more: Any) -> Message:
    """The policy's message, with its thoughts where it has some."""
    message: Message = {"role": "assistant", "content": content, **more}
    if thought:
        message["reasoning_content"] = thought
    return message


def keyboard_walk(
    part: Part = "train",
    min_steps: int = 2,
    max_steps: int = 6,
    domain: str = "general",
    ring: str = "keyboard",
) -> list[Problem]:
    """Every problem of a part, in a fixed shuffled order. ``budget_tokens`` (b0) is the length of the thoughts at high
    effort; one character is one token of the nano tokenizer."""
    keys = ring_of(ring)
    return [
        Problem(
            id=f"{ring}-walk-{start}-{steps}",
            domain=domain,
            messages=[{"role": "user", "content": _question(start, steps)}],
            reward={"name": "exact", "answer": step(start, steps, keys)},
            budget_tokens=len(thoughts(start, steps, Effort.HIGH, keys)),
            metadata={"steps": steps},
        )
        for start, steps in questions(part, min_steps, max_steps, keys)
    ]


def keyboard_walk_demonstrations(
    size: int = 9600,
    seed: int = 1,
    min_steps: int = 2,
    max_steps: int = 6,
    skipped: float = 0.3,
    cut: float = 0.2,
    domain: str = "general",
    ring: str = "keyboard",
) -> list[Conversation]:
    """Demonstrations over the train part, a third each at low, high and max effort.

    A share of ``skipped`` has no thoughts and a share of ``cut`` ends them early; the answer is then a guess, so that
    the cold start knows how to think but not that it pays: that is left to reinforcement learning.
    """
    keys = ring_of(ring)
    asked = questions("train", min_steps, max_steps, keys)
    rng = random.Random(f"{ring} walk {seed}")
    made = (_demonstration(rng, *rng.choice(asked), index, skipped, cut, keys) for index in range(size))
    return [replace(c, id=f"{ring}-walk-demonstration-{i}", domain=domain) for i, c in enumerate(made)]


def _demonstration(
    rng: random.Random, start: str, steps: int, index: int, skipped: float, cut: float, ring: str
) -> Conversation:
    effort = EFFORTS[index % len(EFFORTS)]
    thought, answer = thoughts(start, steps, effort, ring), step(start, steps, ring)
    thought, answer = careless(
        rng, thought, answer, lambda: "".join(rng.choices(ring, k=len(start))), skipped, cut
    )
    return Conversation(
        id=str(index),
        messages=[{"role": "user", "content": _question(start, steps)}, said(answer, thought)],
        effort=effort,
    )


def _question(start: str, steps: int) -> str:
    return f"{start}>{steps}"


def ring_of(name: str) -> str:
    """Characters of one of the `RINGS`. Raises `UserError` for another name."""
    if name not in RINGS:
        raise UserError(f"there is no ring '{name}' to walk along{nearest(name, RINGS)}")
    return RINGS[name]


def questions(part: Part, min_steps: int, max_steps: int, ring: str) -> list[tuple[str, int]]:
    """Start and number of steps, ordered by a hash of the question, of which the first tenth is held out."""
    if part not in ("train", "held_out"):
        raise UserError(f"a keyboard walk's part is 'train' or 'held_out', not '{part}'")
    if not 1 <= min_steps <= max_steps <= 9:
        raise UserError(
            f"keyboard walks need 1 <= min_steps <= max_steps <= 9, not {min_steps} and {max_steps}"
        )
    everything = [(a + b, n) for a, b, n in product(ring, ring, range(min_steps, max_steps + 1))]
    everything.sort(key=lambda q: hashlib.blake2b(_question(*q).encode()).digest())
    border = len(everything) // 10
    return everything[:border] if part == "held_out" else everything[border:]
