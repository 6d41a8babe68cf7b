"""Are two mathematical expressions equal? Exact first, then by values at random points in high precision.

Two expressions that agree to 30 digits at several random points are equal for every purpose here (Schwartz
and Zippel's argument), and two that differ at one are not: faster than simplification, and it never hangs on
it.
"""

from __future__ import annotations

import random
from fractions import Fraction

import sympy
from sympy import Expr

DIGITS = 50
RELATIVE = sympy.Float("1e-30", DIGITS)
POINTS = 4
DENOMINATOR = 10_007
MAX_EXPANDED = 64
COUNTING = frozenset("nmkijpq")
MIN_DIGITS_OF_ANSWER = 4  # 0.3333 passes for 1/3, 0.333 does not
MIN_DIGITS_OF_GOLD = 3  # 33.3 stands for 100/3, 0.1 does not for 1/12


def close(a: Expr, b: Expr) -> bool:
    """Equal to 30 digits, relative to the larger."""
    if a == b:
        return True
    if a.is_infinite or b.is_infinite:
        return False
    scale = max(abs(a), abs(b))
    return bool(abs(a - b) <= RELATIVE * scale)


def value_of(expression: Expr) -> Expr | None:
    """A number in high precision, or `None`."""
    value = sympy.N(expression, DIGITS)
    if not value.is_number or value.has(sympy.nan, sympy.zoo) or not (value.is_finite or value.is_infinite):
        return None
    return value


def equal_expressions(gold: Expr, answer: Expr) -> bool:
    """Equal as numbers, or as functions of their symbols."""
    if gold == answer:
        return True
    if gold.is_Rational and answer.is_Rational:
        return False
    symbols = gold.free_symbols | answer.free_symbols
    if not symbols:
        a, b = value_of(gold), value_of(answer)
        return a is not None and b is not None and close(a, b)
    if gold.free_symbols != answer.free_symbols and not _cancels(gold, answer):
        return False
    ordered = sorted(symbols, key=str)
    verdict = _agree(gold, answer, ordered)
    if not verdict and all(str(s) in COUNTING for s in ordered):
        return _agree_on_integers(gold, answer, ordered)
    return verdict


def _cancels(gold: Expr, answer: Expr) -> bool:
    """Do symbols that only one of them has fall out when it is multiplied out?"""
    if any(
        p.exp.is_Integer and p.exp > MAX_EXPANDED for p in gold.atoms(sympy.Pow) | answer.atoms(sympy.Pow)
    ):
        return False  # a power of a sum of that degree has as many terms
    return sympy.expand(gold).free_symbols == sympy.expand(answer).free_symbols


def random_point(symbols: list[Expr], rng: random.Random, sign: int) -> dict[Expr, Expr]:
    """Between 1/4 and 9/4, as exact fractions. Their denominator is small: SymPy takes roots of that degree exactly,
    and for one in the millions it takes half a minute."""
    return {
        s: sign * sympy.Rational(rng.randrange(DENOMINATOR // 4, 9 * DENOMINATOR // 4), DENOMINATOR)
        for s in symbols
    }


def _agree(gold: Expr, answer: Expr, symbols: list[Expr]) -> bool:
    """Same values at random points. Where both leave the real numbers, a negative point says nothing."""
    rng, tested = random.Random(20_240_613), 0
    for number in range(3 * POINTS):
        sign = -1 if number % 3 == 2 else 1
        point = random_point(symbols, rng, sign)
        a, b = value_of(gold.subs(point)), value_of(answer.subs(point))
        if a is None or b is None:
            continue
        if sign < 0 and not (a.is_real or b.is_real):
            continue
        if not close(a, b):
            return False
        tested += 1
        if tested >= POINTS + 2:
            break
    return tested > 0


def _agree_on_integers(gold: Expr, answer: Expr, symbols: list[Expr]) -> bool:
    for start in range(1, 8):
        point = {s: sympy.Integer(start + offset) for offset, s in enumerate(symbols)}
        a, b = value_of(gold.subs(point)), value_of(answer.subs(point))
        if a is None or b is None or not close(a, b):
            return False
    return True


def same_zeros(gold: Expr, answer: Expr) -> bool:
    """Do ``gold = 0`` and ``answer = 0`` say the same? They do where one is a constant multiple of the
    other."""
    ratio = constant_ratio(gold, answer)
    return ratio is not None and ratio != 0


def constant_ratio(gold: Expr, answer: Expr) -> Expr | None:
    """``gold / answer`` where that is one number, else `None`."""
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    if gold.free_symbols != answer.free_symbols or not symbols:
        return None
    rng, ratio = random.Random(977), None
    for _ in range(POINTS):
        point = random_point(symbols, rng, 1)
        a, b = value_of(gold.subs(point)), value_of(answer.subs(point))
        if a is None or b is None or b == 0 or a == 0:
            return None
        if ratio is not None and not close(ratio, a / b):
            return None
        ratio = a / b
    return ratio


def significant_digits(decimal: str) -> int:
    """Digits of a written decimal, without leading zeros."""
    return len(decimal.lstrip("+-").replace(".", "").lstrip("0"))


def places(decimal: str) -> int:
    return len(decimal.partition(".")[2])


def rounds_to(exact: Expr, decimal: str) -> bool:
    """Is ``decimal`` what ``exact`` becomes when rounded (or cut) to as many places?"""
    if not exact.is_real:
        return False
    value = sympy.N(exact, DIGITS)
    scaled = Fraction(str(value)) if value.is_finite else None
    if scaled is None:
        return False
    unit = Fraction(1, 10 ** places(decimal))
    return abs(scaled - Fraction(decimal)) <= unit / 2


def equal_numbers(gold: Expr, gold_decimal: str | None, answer: Expr, answer_decimal: str | None) -> bool:
    """Equality of two values, with what their written decimals promise.

    Exactly equal; or the answer is a decimal of at least four digits that the gold value rounds to; or the
    gold is a decimal of at least three digits that the answer's value rounds to (two digits, if the answer
    is a longer decimal).
    """
    if equal_expressions(gold, answer):
        return True
    if gold.free_symbols or answer.free_symbols:
        return False
    if answer_decimal and not gold_decimal and not gold.is_Integer:
        return significant_digits(answer_decimal) >= MIN_DIGITS_OF_ANSWER and rounds_to(gold, answer_decimal)
    if gold_decimal:
        longer = answer_decimal is not None and places(answer_decimal) > places(gold_decimal)
        enough = significant_digits(gold_decimal) >= MIN_DIGITS_OF_GOLD - longer
        exact = answer_decimal is None and not answer.is_Integer
        return enough and (longer or exact) and rounds_to(answer, gold_decimal)
    return False
