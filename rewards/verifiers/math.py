"""Mathematical answers.

Reads the answer from the response (a box, an answer phrase, the last formula or line), reads both it and the
gold answer into what they are, and compares like with like. Expressions that the reader does not know are
left to math-verify, without its time limits, which work in the main thread only: this runs in a process that
is killed.
"""

from __future__ import annotations

import logging
import re
from fractions import Fraction

import sympy

from rewards.api import GraderError, Score, Scored, reward
from rewards.verifiers.math_answer import (
    Answer,
    Matrix,
    Ratio,
    Relation,
    Sequence,
    Time,
    Union,
    Value,
    Words,
    clean,
    read_answer,
)
from rewards.verifiers.math_compare import (
    constant_ratio,
    equal_expressions,
    equal_numbers,
    same_zeros,
)
from rewards.verifiers.math_extract import boxes, candidates
from rewards.verifiers.math_parse import TooLarge, Unreadable, parse_expression

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the time limits that we do without

FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!=", "in": "in"}


@reward(name="math", depends="content", deterministic=True)
def math(scored: Scored, answer: str | int | float | list[str]) -> Score:
    """1 where the response's answer equals the right one; ``answer`` may list several right ones."""
    golds = answer if isinstance(answer, list) else [answer]
    if not golds:
        raise GraderError("there is no right answer to compare with")
    for gold in golds:
        found, right = judge(str(gold), scored.content)
        if right:
            return Score(1.0, {}, f"read {found!r}")
    return Score(0.0, {}, f"read {found!r}" if found is not None else "no answer found")


def judge(gold: str, response: str) -> tuple[str | None, bool]:
    """The answer that was read from the response (`None`: there is none), and whether it is right."""
    boxed = boxes(gold)
    right = read_answer(boxed[-1] if boxed else gold)
    parts = (
        len(right.items)
        if isinstance(right, Sequence)
        else len(right.parts)
        if isinstance(right, Union)
        else 1
    )
    found = candidates(response, parts)
    for position, text in enumerate(found):
        read = read_answer(text)
        if equal_answers(right, read, gold, text):
            return text, True
        spread = parts > 1 and position == 0 and len(found) > 1
        if not spread and not has_words(read):
            return text, False
    return (found[-1] if found else None), False


def has_words(answer: Answer) -> bool:
    """Is some of it not mathematics?"""
    match answer:
        case Words():
            return answer.text != "ldots"
        case Sequence():
            return any(map(has_words, answer.items))
        case Union():
            return any(map(has_words, answer.parts))
        case Relation():
            return any(map(has_words, answer.sides))
        case _:
            return False


def equal_answers(gold: Answer, answer: Answer, gold_text: str, answer_text: str) -> bool:
    """Are they equal? What our reader does not know goes to math-verify."""
    if same(gold, answer) or _same_word(gold_text, answer_text):
        return True
    if has_words(gold) or has_words(answer):
        return _by_math_verify(gold_text, answer_text)
    return False


def _same_word(gold: str, answer: str) -> bool:
    """One word, whatever its case; or a choice's letter, that the choice's text may follow."""
    gold, answer = clean(gold), clean(answer)
    letter = re.fullmatch(r"\(?([A-E])\)?", gold)
    if letter:
        chosen = re.match(r"\(?([A-Ea-e])(?:\)|[.:]|$)", answer)
        return chosen is not None and chosen[1].upper() == letter[1]
    return re.fullmatch(r"[A-Za-z]{2,}", gold) is not None and gold.lower() == answer.lower()


def same(gold: Answer, answer: Answer) -> bool:
    """Structural equality with the liberties that people take in writing."""
    gold, answer = _bare(gold, answer), _bare(answer, gold)
    match gold, answer:
        case Value(), Value():
            return same_values(gold, answer)
        case Words(), Words():
            return gold.text == answer.text != ""
        case Time(), Time():
            return _same_time(gold, answer)
        case Ratio(), Ratio():
            return _same_ratio(gold, answer)
        case (Ratio(), Value()) | (Value(), Ratio()):
            return _ratio_is_value(gold, answer)
        case Matrix(), Matrix():
            return _same_matrix(gold, answer)
        case (Matrix(), Sequence(kind="tuple")) | (Sequence(kind="tuple"), Matrix()):
            return _same_vector(gold, answer)
        case Union(), Union():
            return _any_order(gold.parts, answer.parts)
        case Sequence(), Sequence():
            return _same_sequence(gold, answer)
        case Relation(), Relation():
            return _same_relation(gold, answer)
        case _:
            return False


def _bare(one: Answer, other: Answer) -> Answer:
    """Take off what the other does not have: a name before ``=``, brackets around one item; inequalities
    become intervals."""
    if isinstance(one, Relation):
        interval = as_intervals(one)
        if interval is not None and not isinstance(other, Relation):
            return interval
        if set(one.signs) <= {"=", "in"} and not isinstance(other, Relation):
            return one.sides[-1]
        if len(one.signs) > 1 and set(one.signs) == {"="} and isinstance(other, Relation):
            return Relation((one.sides[0], one.sides[-1]), ("=",))
    if isinstance(one, Sequence) and len(one.items) == 1 and one.kind in ("list", "set"):
        if not (isinstance(other, Sequence) and len(other.items) == 1):
            return _bare(one.items[0], other)
    if isinstance(one, Sequence) and one.kind == "list" and isinstance(other, Union):
        intervals = [as_intervals(i) if isinstance(i, Relation) else i for i in one.items]
        if all(i is not None for i in intervals):
            return Union(tuple(i for i in intervals if i is not None))
    if isinstance(one, Sequence) and one.kind == "list" and not isinstance(other, Relation):
        named = _named_values(one)
        if named is not None and not (isinstance(other, Sequence) and _named_values(other) is not None):
            return named
    return one


def _named_values(one: Sequence) -> Sequence | None:
    """``x = 1, y = 2`` as ``(1, 2)``, and ``x = 1 or x = 2`` as ``1, 2``."""
    relations = [i for i in one.items if isinstance(i, Relation) and i.signs == ("=",)]
    if len(relations) != len(one.items) or not relations:
        return None
    names = [_symbol(r.sides[0]) for r in relations]
    if None in names:
        return None
    values = tuple(r.sides[1] for r in relations)
    if len(set(names)) == 1:
        return Sequence("list", values)
    return Sequence("tuple", values, "(", ")") if len(set(names)) == len(names) else None


def _symbol(answer: Answer) -> sympy.Symbol | None:
    return answer.expression if isinstance(answer, Value) and answer.expression.is_Symbol else None


def same_values(gold: Value, answer: Value) -> bool:
    """Values with units, percent signs and bases."""
    if gold.base is not None or answer.base is not None:
        if gold.base is not None and answer.base is not None and gold.base != answer.base:
            return False
        digits = [
            int(str(v.expression)) if v.base is None else int(v.expression)
            for v in (gold, answer)
            if v.expression.is_Integer
        ]
        if len(digits) != 2:
            return False
        plain = [
            sympy.Integer(int(str(v.expression), 36)) if v.base is None else v.expression
            for v in (gold, answer)
        ]
        return plain[0] == plain[1]
    a, b = gold.expression, answer.expression
    if gold.unit and answer.unit and gold.unit.name != answer.unit.name:
        if gold.unit.kind != answer.unit.kind or not gold.unit.kind:
            return (
                not gold.unit.kind
                and not answer.unit.kind
                and equal_numbers(a, gold.decimal, b, answer.decimal)
            )
        factor = answer.unit.factor / gold.unit.factor
        return equal_expressions(a, b * sympy.Rational(factor.numerator, factor.denominator))
    if equal_numbers(a, gold.decimal, b, answer.decimal):
        return True
    if gold.percent != answer.percent:
        scaled = (a / 100, b) if gold.percent else (a, b / 100)
        return equal_numbers(scaled[0], None, scaled[1], None)
    angles = [v.unit is not None and v.unit.kind == "angle" for v in (gold, answer)]
    if angles[0] != angles[1] and not (gold.unit and answer.unit):
        radians = [v * sympy.pi / 180 if is_angle else v for v, is_angle in zip((a, b), angles, strict=True)]
        return not any(v.is_Rational and v != 0 for v in radians) and equal_expressions(*radians)
    return False


def _same_time(gold: Time, answer: Time) -> bool:
    if gold.half and answer.half and gold.half != answer.half:
        return False
    if gold.half == "pm" and not answer.half and answer.minutes >= 780:
        return answer.minutes - 720 == gold.minutes
    return gold.minutes == answer.minutes


def _same_ratio(gold: Ratio, answer: Ratio) -> bool:
    if len(gold.items) != len(answer.items):
        return False
    return all(
        equal_expressions(a * answer.items[0], b * gold.items[0])
        for a, b in zip(gold.items, answer.items, strict=True)
    )


def _ratio_is_value(gold: Answer, answer: Answer) -> bool:
    ratio, value = (gold, answer) if isinstance(gold, Ratio) else (answer, gold)
    assert isinstance(ratio, Ratio)
    if not isinstance(value, Value) or len(ratio.items) != 2 or ratio.items[1] == 0:
        return False
    return equal_expressions(ratio.items[0] / ratio.items[1], value.expression)


def _same_matrix(gold: Matrix, answer: Matrix) -> bool:
    if [len(r) for r in gold.rows] != [len(r) for r in answer.rows]:
        return False
    return all(
        same(a, b) for x, y in zip(gold.rows, answer.rows, strict=True) for a, b in zip(x, y, strict=True)
    )


def _same_vector(gold: Answer, answer: Answer) -> bool:
    """A matrix of one row or column against a tuple."""
    matrix, vector = (gold, answer) if isinstance(gold, Matrix) else (answer, gold)
    assert isinstance(matrix, Matrix)
    assert isinstance(vector, Sequence)
    flat = [c for row in matrix.rows for c in row]
    if 1 not in (len(matrix.rows), max(len(r) for r in matrix.rows)) or len(flat) != len(vector.items):
        return False
    return all(same(a, b) for a, b in zip(flat, vector.items, strict=True))


def _any_order(gold: tuple[Answer, ...], answer: tuple[Answer, ...]) -> bool:
    """Each item of one has its own equal in the other."""
    if len(gold) != len(answer):
        return False
    left = list(answer)
    for item in gold:
        for position, other in enumerate(left):
            if same(item, other):
                del left[position]
                break
        else:
            return False
    return True


def _distinct(items: tuple[Answer, ...]) -> tuple[Answer, ...]:
    kept: list[Answer] = []
    for item in items:
        if not any(same(item, k) for k in kept):
            kept.append(item)
    return tuple(kept)


def _same_sequence(gold: Sequence, answer: Sequence) -> bool:
    if "tuple" in (gold.kind, answer.kind):
        both = gold.kind == answer.kind == "tuple"
        if not both and "set" in (gold.kind, answer.kind):
            return False
        if both and len(gold.items) == 2 and (gold.left, gold.right) != (answer.left, answer.right):
            return False
        if len(gold.items) != len(answer.items):
            return False
        return all(same(a, b) for a, b in zip(gold.items, answer.items, strict=True))
    if any(i == Words("ldots") for i in (*gold.items, *answer.items)):
        if len(gold.items) != len(answer.items):
            return False
        return all(same(a, b) for a, b in zip(gold.items, answer.items, strict=True))
    if "set" in (gold.kind, answer.kind):
        return _any_order(_distinct(gold.items), _distinct(answer.items))
    return _any_order(gold.items, answer.items)


def as_intervals(relation: Relation) -> Answer | None:
    """An inequality of one variable against numbers, as an interval; `None` where it is something else."""
    sides = [s.expression if isinstance(s, Value) else None for s in relation.sides]
    signs = list(relation.signs)
    if any(s is None for s in sides) or "=" in signs or "in" in signs:
        return None
    free = [len(s.free_symbols) for s in sides if s is not None]
    if len(signs) == 1 and signs[0] == "!=":
        return None
    if len(signs) == 2 and free == [0, 1, 0] and sides[1].is_Symbol:  # type: ignore[union-attr]
        low, high = relation.sides[0], relation.sides[2]
        if signs[0] in (">", ">=") and signs[1] in (">", ">="):
            low, high, signs = high, low, [FLIPPED[signs[1]], FLIPPED[signs[0]]]
        if signs[0] not in ("<", "<=") or signs[1] not in ("<", "<="):
            return None
        return Sequence(
            "tuple", (low, high), "(" if signs[0] == "<" else "[", ")" if signs[1] == "<" else "]"
        )
    if len(signs) == 1 and sorted(free) == [0, 1]:
        at = 0 if free[0] == 1 else 1
        if not sides[at].is_Symbol:  # type: ignore[union-attr]
            return None
        sign = signs[0] if at == 0 else FLIPPED[signs[0]]
        bound = relation.sides[1 - at]
        if sign in ("<", "<="):
            return Sequence("tuple", (Value(-sympy.oo), bound), "(", ")" if sign == "<" else "]")
        return Sequence("tuple", (bound, Value(sympy.oo)), "(" if sign == ">" else "[", ")")
    return None


def _same_relation(gold: Relation, answer: Relation) -> bool:
    intervals = as_intervals(gold), as_intervals(answer)
    if intervals[0] is not None and intervals[1] is not None:
        return same(intervals[0], intervals[1]) and _variables(gold) == _variables(answer)
    if len(gold.signs) != len(answer.signs):
        return False
    if len(gold.signs) == 1:
        return _same_single(gold, answer)
    for turned in (answer, Relation(answer.sides[::-1], tuple(FLIPPED[s] for s in answer.signs[::-1]))):
        if gold.signs == turned.signs and all(
            same(a, b) for a, b in zip(gold.sides, turned.sides, strict=True)
        ):
            return True
    return False


def _variables(relation: Relation) -> set[str]:
    return {str(x) for s in relation.sides if isinstance(s, Value) for x in s.expression.free_symbols}


def _same_single(gold: Relation, answer: Relation) -> bool:
    if gold.signs == answer.signs and all(same(a, b) for a, b in zip(gold.sides, answer.sides, strict=True)):
        return True
    if not all(isinstance(s, Value) for s in (*gold.sides, *answer.sides)):
        return False
    a, b = (s.expression for s in gold.sides)  # type: ignore[union-attr]
    c, d = (s.expression for s in answer.sides)  # type: ignore[union-attr]
    if gold.signs[0] in ("=", "!="):
        if gold.signs != answer.signs:
            return False
        if (
            a.is_Function
            or c.is_Function
            or (a.is_Symbol and c.is_Symbol and a != c and not (b.free_symbols or d.free_symbols))
        ):
            return False
        return same_zeros(a - b, c - d)
    ratio = constant_ratio(a - b, c - d)
    if ratio is None or not ratio.is_real:
        return False
    return gold.signs[0] == (answer.signs[0] if ratio > 0 else FLIPPED[answer.signs[0]])


def _by_math_verify(gold_text: str, answer_text: str) -> bool:
    """For what our reader does not know (sums, integrals): both sides through LaTeX's full parser. Both
    texts must be formulas, and be read as expressions: numbers picked from inside something unread prove
    nothing."""
    texts = [clean(gold_text), clean(answer_text)]
    if any(len(t) > 1000 or not re.search(r"\\[a-zA-Z]+", t) for t in texts):
        return False
    from latex2sympy2_extended.latex2sympy2 import latex2sympy
    from math_verify.grader import verify

    read = []
    for text in texts:
        try:
            parse_expression(text)
        except TooLarge:
            return False
        except Unreadable:
            pass
        try:
            read.append(latex2sympy(text, is_real=True, convert_degrees=False, normalization_config=None))
        except Exception:  # the generated parser raises many kinds; unread is unequal
            return False
    if not all(isinstance(r, sympy.Basic) for r in read):
        return False
    if not all(_all_read(t, r) for t, r in zip(texts, read, strict=True)):
        return False
    if all(isinstance(r, sympy.Expr) for r in read):
        done = [_realised(r.doit()) for r in read]
        if not any(d.has(sympy.Sum, sympy.Integral, sympy.Product, sympy.Limit) for d in done):
            return equal_expressions(done[0], done[1])
    return bool(verify(read[0], read[1], timeout_seconds=None))


def _realised(expression: sympy.Expr) -> sympy.Expr:
    return expression.subs({s: sympy.Symbol(s.name, real=True) for s in expression.free_symbols})


def _all_read(text: str, expression: sympy.Basic) -> bool:
    """Every number written in the text must be in the expression, or be part of one that was computed from
    it."""
    written = {Fraction(n) for n in re.findall(r"\d+(?:\.\d+)?", text)}
    kept = {Fraction(int(n.p), int(n.q)) for n in expression.atoms(sympy.Rational)}
    return not written or bool(kept) or not expression.free_symbols


__all__ = ["judge", "math"]
