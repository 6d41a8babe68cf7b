"""Invented names: a task without a right answer, for judges. The question is two initials, the answer any name.

Demonstrations are letters at random, three to six of them behind the second initial; the model learns the form, and
what makes a name good is left to the judge. ``reference_length`` (l0) is the sampled tokens of a typical demonstration.

    problems = invented_names(part="train")
    conversations = invented_name_demonstrations(size=3200)
"""

from __future__ import annotations

import hashlib
import random
from itertools import product
from typing import Literal

from k3rl.data.conversations import Conversation
from k3rl.errors import UserError
from k3rl.types import Problem

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
REFERENCE_LENGTH = 16
"""Five or six letters and the structure tokens around them."""
Part = Literal["train", "held_out"]


def invented_names(part: Part = "train", domain: str = "general", reward: str = "none") -> list[Problem]:
    """Every pair of initials of a part; a tenth is held out, by a hash of the question."""
    return [
        Problem(
            id=f"name-{initials}",
            domain=domain,
            messages=[{"role": "user", "content": initials}],
            reward={"name": reward},
            reference_length=REFERENCE_LENGTH,
        )
        for initials in _initials(part)
    ]


def invented_name_demonstrations(
    size: int = 3200, seed: int = 1, domain: str = "general"
) -> list[Conversation]:
    """Over the train part: the initials and random letters."""
    rng, initials = random.Random(f"names {seed}"), _initials("train")
    out = []
    for index in range(size):
        asked = rng.choice(initials)
        name = asked + "".join(rng.choices(LETTERS, k=rng.randint(3, 6)))
        reply = {"role": "assistant", "content": name}
        out.append(
            Conversation(
                id=f"name-demonstration-{index}",
                domain=domain,
                messages=[{"role": "user", "content": asked}, reply],
            )
        )
    return out


def _initials(part: Part) -> list[str]:
    if part not in ("train", "held_out"):
        raise UserError(f"a part of the names is 'train' or 'held_out', not '{part}'")
    everything = sorted(
        ("".join(p) for p in product(LETTERS, repeat=2)), key=lambda q: hashlib.blake2b(q.encode()).digest()
    )
    border = len(everything) // 10
    return everything[:border] if part == "held_out" else everything[border:]
