"""Rules that can sit in a judge's place, and what they say of one answer alone."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from itertools import pairwise

from k3rl.errors import UserError
from rewards.api import Scored, reward
from rewards.grm.judges import Rule

VOWELS = frozenset("AEIOU")


def find_rule(path: str) -> Rule:
    """``package.module:function`` of (question, answer) to scores by criterion."""
    module, colon, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name if colon else "")
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"grm.judge.function: '{path}': {error}") from None


def pronounceable(question: str, answer: str) -> Mapping[str, float]:
    """How much an answer is like a word: vowels and consonants in turn, and many different letters. More letters show
    more of both, so a judge of this kind is bought with length, as judges are."""
    letters = [c for c in answer if c.isalpha()]
    if not letters:
        return {"sound": 0.0, "variety": 0.0}
    turns = sum((a in VOWELS) != (b in VOWELS) for a, b in pairwise(letters))
    return {"sound": min(10.0, turns / 1.6), "variety": min(10.0, len(set(letters)) / 1.6)}


@reward(name="judged_quality", depends="content", deterministic=True)
def judged_quality(scored: Scored, function: str) -> dict[str, float]:
    """What a rule says of one answer by itself, 0 to 1: its criteria's mean. To measure with, beside a tournament."""
    found = find_rule(function)(scored.question, scored.content)
    return {name: value / 10 / len(found) for name, value in found.items()}
