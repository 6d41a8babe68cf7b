"""Are two answers that were read the same thing? Like with like: values with units, lists, sets, tuples,
intervals, relations, ratios, times, matrices."""

from __future__ import annotations

import sympy

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
)
from rewards.verifiers.math_compare import constant_ratio, equal_expressions, equal_numbers, same_zeros

FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!=", "in": "in"}


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
    single = isinstance(one, Sequence) and len(one.items) == 1 and one.kind in ("list", "set")
    if single and not (isinstance(other, Sequence) and len(other.items) == 1):
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
