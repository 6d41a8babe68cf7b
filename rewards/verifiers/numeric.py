"""Answers that are plain numbers, compared exactly or within a tolerance."""

from __future__ import annotations

import re
from fractions import Fraction

from rewards.api import GraderError, Scored, reward
from rewards.verifiers.extract import Extract, extract

NUMBER = re.compile(
    r"(?P<sign>[-+]?)(?P<number>(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:[eE](?P<exponent>[-+]?\d{1,4}))?"
)
MAX_CHARACTERS = 1000


def as_number(text: str | int | float) -> Fraction | None:
    """An exact number: ``1,234.5``, ``-3/4``, ``2 1/2``, ``12%``, ``1.5e-3``; `None` for anything else."""
    if isinstance(text, bool):
        return None
    if isinstance(text, int):
        return Fraction(text)
    if isinstance(text, float):
        return Fraction(repr(text)) if text == text and abs(text) != float("inf") else None
    if len(text) > MAX_CHARACTERS:
        return None
    text = text.strip().replace("\u2212", "-").strip("$€£ ")
    percent = text.endswith("%")
    text = text.removesuffix("%").strip()
    value: Fraction | None
    if "/" in text:
        value = _fraction(text)
    else:
        value = _decimal(text)
    return value / 100 if percent and value is not None else value


def _decimal(text: str) -> Fraction | None:
    match = NUMBER.fullmatch(text)
    if match is None:
        return None
    digits = match["number"].replace(",", "")
    value = Fraction(digits if not digits.startswith(".") else "0" + digits) * Fraction(10) ** int(
        match["exponent"] or 0
    )
    return -value if match["sign"] == "-" else value


def _fraction(text: str) -> Fraction | None:
    above, _, below = text.rpartition("/")
    whole, _, above = above.strip().rpartition(" ")
    numerator, denominator = _decimal(above.strip()), _decimal(below.strip())
    if numerator is None or not denominator:
        return None
    value = numerator / denominator
    if not whole.strip():
        return value
    number = _decimal(whole.strip())
    if number is None:
        return None
    return number - value if whole.strip().startswith("-") else number + value


@reward(name="numeric", depends="content", trusted=True, deterministic=True)
def numeric(
    scored: Scored,
    answer: str | int | float,
    extract_from: Extract = "last_number",
    relative: float = 0.0,
    absolute: float = 0.0,
) -> float:
    """1 where the response's number is the answer: exactly, or within ``absolute + relative * |answer|``."""
    wanted = as_number(answer)
    if wanted is None:
        raise GraderError(f"the answer {answer!r} is not a number")
    text = extract(scored.content, extract_from)
    found = as_number(text) if text is not None else None
    if found is None:
        return 0.0
    return float(abs(found - wanted) <= Fraction(absolute) + Fraction(relative) * abs(wanted))
