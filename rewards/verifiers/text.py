"""Answers that are texts: equal, containing, or matching a pattern."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from rewards.api import Scored, reward
from rewards.verifiers.extract import Extract, extract


def normalised(text: str, case_sensitive: bool, punctuation: bool) -> str:
    """Unicode in its composed form, runs of white space as one space, ends trimmed."""
    text = " ".join(unicodedata.normalize("NFKC", text).split())
    if not case_sensitive:
        text = text.casefold()
    if not punctuation:
        text = " ".join("".join(" " if unicodedata.category(c).startswith("P") else c for c in text).split())
    return text


def _answers(answer: str | int | float | Sequence[str]) -> list[str]:
    return [str(a) for a in answer] if isinstance(answer, list | tuple) else [str(answer)]


@reward(name="exact", depends="content", trusted=True, deterministic=True)
def exact(
    scored: Scored,
    answer: str | int | float | list[str],
    extract_from: Extract = "whole",
    case_sensitive: bool = True,
    punctuation: bool = True,
) -> float:
    """1 where the response is the answer, or one of the answers, but for white space.

    ``extract_from`` says which part of the response counts; ``punctuation=False`` ignores punctuation.
    """
    found = extract(scored.content, extract_from)
    if not found:
        return 0.0
    text = normalised(found, case_sensitive, punctuation)
    return float(any(text == normalised(a, case_sensitive, punctuation) for a in _answers(answer)))


@reward(name="contains", depends="content", trusted=True, deterministic=True)
def contains(scored: Scored, answer: str | int | float | list[str], case_sensitive: bool = False) -> float:
    """Share of the answers that stand in the response as whole words."""
    text = normalised(scored.content, case_sensitive, True)
    found = 0
    answers = _answers(answer)
    for one in answers:
        word = re.escape(normalised(one, case_sensitive, True))
        found += re.search(rf"(?<!\w){word}(?!\w)", text) is not None
    return found / len(answers) if answers else 0.0


@reward(name="regex", depends="content", deterministic=True)
def regex(scored: Scored, pattern: str, whole: bool = False, ignore_case: bool = False) -> float:
    """1 where the pattern is found in the response (``whole``: matches all of it). Runs in a killable
    process: patterns can take exponential time."""
    flags = re.DOTALL | (re.IGNORECASE if ignore_case else 0)
    search = re.fullmatch if whole else re.search
    return float(search(pattern, scored.content.strip(), flags) is not None)
