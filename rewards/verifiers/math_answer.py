"""An answer's text read into what it is: a value with a unit, a list, set, tuple or interval, a relation, a
ratio, a time, a matrix, or words."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fractions import Fraction

import sympy
from sympy import Expr

from rewards.verifiers.math_clean import clean
from rewards.verifiers.math_parse import Unreadable, parse_expression
from rewards.verifiers.math_units import UNITS, Unit

RELATIONS = {
    "\\leq": "<=", "\\le": "<=", "\\geq": ">=", "\\ge": ">=", "\\leqslant": "<=", "\\geqslant": ">=", "\\lt": "<",
    "\\gt": ">", "<=": "<=", ">=": ">=", "<": "<", ">": ">", "=": "=", "\\neq": "!=", "\\ne": "!=", "!=": "!=",
    "\\approx": "=", "\\equiv": "=", "\\in": "in", "\\implies": "=", "\\sim": "=",
}  # fmt: skip
SIGNS = sorted(RELATIONS, key=len, reverse=True)
RELATION = re.compile(
    "(" + "|".join(re.escape(s) + r"(?![a-zA-Z])" * s.startswith("\\") for s in SIGNS) + ")"
)
NOTHING = {"no solution", "no solutions", "none", "does not exist", "dne", "undefined", "\\emptyset", "\\varnothing",
           "empty set", "the empty set", "no real solution", "no real solutions", "\\{\\}"}  # fmt: skip
EVERYTHING = {
    "all real numbers",
    "all reals",
    "all real x",
    "every real number",
    "\\mathbb{r}",
    "the real numbers",
}
OPEN, CLOSE = "([{", ")]}"


@dataclass(frozen=True, slots=True)
class Value:
    expression: Expr
    decimal: str | None = None  # how it was written, where that was a decimal
    unit: Unit | None = None
    percent: bool = False
    base: int | None = None  # written with a base as subscript; the expression is then its digits


@dataclass(frozen=True, slots=True)
class Words:
    text: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """``kind``: list (no brackets), set, or tuple (which an interval is too, of two ends)."""

    kind: str
    items: tuple[Answer, ...]
    left: str = ""
    right: str = ""


@dataclass(frozen=True, slots=True)
class Union:
    parts: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """``sides[0] signs[0] sides[1] signs[1] ...``"""

    sides: tuple[Answer, ...]
    signs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ratio:
    items: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Time:
    minutes: int
    half: str = ""  # am, pm, or not said


@dataclass(frozen=True, slots=True)
class Matrix:
    rows: tuple[tuple[Answer, ...], ...] = field(default=())


Answer = Value | Words | Sequence | Union | Relation | Ratio | Time | Matrix


def split_top(text: str, separator: re.Pattern[str]) -> list[str]:
    """Split where the separator stands outside all brackets. An interval's ``[0,1)`` is one pair of brackets
    too."""
    parts, depth, start, at = [], 0, 0, 0
    while at < len(text):
        if text[at] in OPEN:
            depth += 1
        elif text[at] in CLOSE:
            depth = max(0, depth - 1)
        elif depth == 0 and (match := separator.match(text, at)) and match.end() > at:
            parts.append(text[start:at])
            start = at = match.end()
            continue
        at += 1
    return [p.strip() for p in [*parts, text[start:]]]


LIST = re.compile(
    r"\s*(?:,\s*(?:and|or)\b|[,;]|(?<![a-zA-Z])(?:and|or)(?![a-zA-Z])|\\(?:land|lor|text\s*\{\s*(?:and|or)\s*\}))\s*"
)
CUP = re.compile(r"\s*(?:\\cup(?![a-zA-Z])|(?<![a-zA-Z])U(?![a-zA-Z]))\s*")
PM = re.compile(r"\\pm(?![a-zA-Z])|\\mp(?![a-zA-Z])|\+/-|\+-")
TIME = re.compile(r"(\d{1,2}):([0-5]\d)(?::00)?\s*(a\.?m\.?|p\.?m\.?)?", re.IGNORECASE)
MATRIX = re.compile(r"\\begin\{([pbvBV]?matrix|array)\}(?:\{[^}]*\})?(.*?)\\end\{\1\}", re.DOTALL)


def read_answer(text: str) -> Answer:
    """What a text says. Never fails: what is nothing else is `Words`."""
    return _read(clean(text), 0)


def _read(text: str, depth: int) -> Answer:
    plain = text.strip()
    if not plain or depth > 8:
        return Words(plain.lower())
    said = re.sub(r"^there\s+(?:is|are|exists?)\s+", "", plain.lower())
    if said in NOTHING:
        return Sequence("set", (), "{", "}")
    if said in EVERYTHING:
        return Sequence("tuple", (Value(-sympy.oo), Value(sympy.oo)), "(", ")")
    if (match := MATRIX.search(plain)) and len(plain) - len(match[0]) <= 4 and not plain.startswith("|"):
        return _matrix(match[2], depth)
    union = split_top(plain, CUP)
    if len(union) > 1:
        return Union(tuple(_read(p, depth + 1) for p in union))
    if compound := _compound(plain):
        return compound
    parts = split_top(plain, LIST)
    if len(parts) > 1 and all(parts):
        return _list(parts, depth)
    if bracketed := _bracketed(plain, depth):
        return bracketed
    sides = RELATION.split(plain)
    if len(sides) > 1 and all(s.strip() for s in sides):
        return _relation(sides, depth)
    if PM.search(plain):
        both = [_read(PM.sub(sign, plain, count=1), depth + 1) for sign in "+-"]
        return Sequence("list", tuple(both))
    if match := TIME.fullmatch(plain):
        return Time(int(match[1]) * 60 + int(match[2]), (match[3] or "").lower().replace(".", ""))
    ratio = split_top(plain, re.compile(r"\s*(?::|\\colon)\s*"))
    if len(ratio) > 1:
        try:
            return Ratio(tuple(parse_expression(r) for r in ratio))
        except Unreadable:
            return Words(_words(plain))
    return read_value(plain) or Words(_words(plain))


PIECE = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?)\s*([a-zA-Z]+)")


def _compound(text: str) -> Value | None:
    """``3 hours 20 minutes``, ``5 feet, 2 inches``: one value in its last unit."""
    pieces = PIECE.findall(text)
    rest = re.sub(r"[\s,]|\band\b", "", PIECE.sub("", text))
    units = [UNITS.get(name.lower()) or UNITS.get(name.lower().removesuffix("s")) for _, name in pieces]
    if len(pieces) < 2 or rest or any(u is None or not u.kind or u.kind != units[0].kind for u in units):
        return None
    factors = [u.factor for u in units if u is not None]
    if factors != sorted(factors, reverse=True) or len(set(factors)) != len(factors):
        return None  # 3 m and 4 m are two lengths
    total = sum((Fraction(number) * factor for (number, _), factor in zip(pieces, factors)), Fraction(0))
    last = total / factors[-1]
    return Value(sympy.Rational(last.numerator, last.denominator), None, units[-1])


def _words(text: str) -> str:
    """Words compare without case, brackets, spaces around them and the word for what they are about."""
    text = re.sub(r"(?<=\w)\s+(?:real\s+)?(?:solutions?|answers?|roots?)$", "", text)
    text = re.sub(r"\\(?:text|mathrm)?\s*", "", text)
    return re.sub(r"[\s(){}\[\]\"'.$]+", " ", text).strip().lower()


def _list(parts: list[str], depth: int) -> Answer:
    items = [_read(p, depth + 1) for p in parts]
    first = items[0]
    if (
        isinstance(first, Relation)
        and first.signs == ("=",)
        and not any(isinstance(i, Relation) for i in items[1:])
    ):
        items[0] = first.sides[-1]  # n = 2, 3, 4
        return Sequence("list", tuple(items))
    if isinstance(first, Relation) and first.signs == ("in",):
        items[0] = first.sides[-1]
    return Sequence("list", tuple(items))


def _bracketed(text: str, depth: int) -> Answer | None:
    is_set = (text.startswith("\\{") and text.endswith("\\}")) or (
        text.startswith("{") and text.endswith("}")
    )
    inner = text
    left, right = text[0], text[-1]
    if text.startswith("\\{"):
        left, inner = "{", "{" + text[2:]
    if text.endswith("\\}"):
        right, inner = "}", inner[:-2] + "}"
    if left not in OPEN + "]" or right not in CLOSE + "[" or not _one_pair(inner):
        return None
    body = inner[1:-1].strip()
    if is_set:
        if builder := re.fullmatch(r"\s*\w+\s*(?:\\in\s*\\?R\s*)?(?:\||\\mid|:)\s*(.+)", body):
            return _read(builder[1], depth + 1)
        items = [p for p in split_top(body, LIST) if p]
        return Sequence("set", tuple(_read(p, depth + 1) for p in items), "{", "}")
    items = split_top(body, re.compile(r"\s*[,;]\s*"))
    if len(items) > 1 and all(items):
        return Sequence("tuple", tuple(_read(p, depth + 1) for p in items), left, right)
    if len(items) == 1 and not re.search(r"[a-zA-Z]{2,}", body.replace("\\", "")) and left == "(":
        return _read(body, depth + 1)
    if left == "(" and re.fullmatch(r"[A-Za-z]", body):
        return Words(body.lower())
    return None


def _one_pair(text: str) -> bool:
    """Do the first and last brackets belong together?"""
    depth = 0
    for at, character in enumerate(text):
        if character in OPEN or (at == 0 and character == "]"):
            depth += 1
        elif character in CLOSE or (at == len(text) - 1 and character == "["):
            depth -= 1
            if depth <= 0:
                return at == len(text) - 1
    return False


def _relation(pieces: list[str], depth: int) -> Answer:
    sides = tuple(_read(p, depth + 1) for p in pieces[::2])
    signs = tuple(RELATIONS[p] for p in pieces[1::2])
    return Relation(sides, signs)


def _matrix(body: str, depth: int) -> Matrix:
    rows = [r for r in re.split(r"\\cr\b(?:\s*\[[^\]]*\])?", body) if r.strip() and r.strip() != "\\hline"]
    return Matrix(tuple(tuple(_read(clean(c), depth + 1) for c in row.split("&")) for row in rows))


DECIMAL = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+|\d+)")
BASE = re.compile(r"([0-9A-Fa-f]+)_(?:\{\s*(\d+)\s*\}|(\d+))")
CURRENCY = re.compile(r"^[-+]?\s*(?:US|CA|AU)?\s*(?:[$€£¥₹]|\\pounds|\\euro|\\yen|USD|EUR|GBP)\s*")


def read_value(text: str) -> Value | None:
    """A number or expression with its unit; `None` where it is neither."""
    negative = text.startswith("-")
    money = CURRENCY.match(text)
    if money and money[0].strip("-+ "):
        text = ("-" if negative else "") + text[money.end() :]
        inner = read_value(text)
        return (
            Value(inner.expression, inner.decimal, UNITS["dollar"]) if inner and inner.unit is None else inner
        )
    if match := BASE.fullmatch(text):
        return Value(sympy.Integer(int(match[1], 36)), None, None, False, int(match[2] or match[3]))
    text, unit, percent = _take_unit(text)
    text = re.sub(r"(?<=\d)\s+(\d+)\s*/\s*(\d+)$", r"+\1/\2" if not text.startswith("-") else r"-\1/\2", text)
    if re.fullmatch(r"-\d+\\frac\{?\d+\}?\{?\d+\}?", text):
        text = f"-({text[1:]})"
    if re.search(r"(?<![_^\d.])\d[\d.]* \d", text):
        return None
    try:
        expression = parse_expression(text)
    except Unreadable:
        return None
    decimal = text.lstrip("+") if DECIMAL.fullmatch(text) and "." in text else None
    return Value(expression, decimal, unit, percent)


NUMBER_AND_UNIT = re.compile(
    r"(?P<number>-?\d*\s*(?:\\sqrt\{?\d+\}?|\\pi|sqrt\(\d+\)|pi)|-?\d*\s*\\frac\{?\d+\}?\s*\{?\d+\}?|-?\d+\s+\d+/\d+"
    r"|-?\d+\s*/\s*\d+|[-+]?[\d.,]+(?:\s*(?:\\cdot|\*|\\times)\s*10\^\{?-?\d+\}?)?)"
    r"\s*(?P<unit>[a-zA-Zµ\\][a-zA-Zµ .\\/^{}\d²³-]*)"
)


def _take_unit(text: str) -> tuple[str, Unit | None, bool]:
    if text.endswith("%"):
        return text[:-1].strip(), None, True
    if match := re.fullmatch(r"(.+?)\s*(?:percentage points?|percent|per cent|pct)", text, re.IGNORECASE):
        return match[1], None, True
    if match := re.fullmatch(r"(.+?)\s*(?:°|\s*degrees?)\s*([CF])?", text):
        return match[1], UNITS["°" + (match[2] or "")], False
    if not re.search(r"[a-zA-Z°]", text):
        return text, None, False
    match = NUMBER_AND_UNIT.fullmatch(text)
    if match is None:
        return text, None, False
    name = (
        " ".join(match["unit"].replace("\\", "").replace("{", "").replace("}", "").split())
        .replace(" ^", "^")
        .lower()
        .rstrip(". ")
    )
    known = UNITS.get(name) or UNITS.get(name.removesuffix("s")) or UNITS.get(name.removesuffix("es"))
    if known is not None and not (len(name) == 1 and name not in "mgls"):
        return match["number"].rstrip(" ,"), known, False
    if re.fullmatch(r"[a-z]{4,}(?:[ /-][a-z]+)*", name) and not _is_mathematics(name):
        return match["number"].rstrip(" ,"), Unit(name.removesuffix("s"), "", Fraction(1)), False
    return text, None, False


def _is_mathematics(name: str) -> bool:
    try:
        parse_expression(name)
    except Unreadable:
        return False
    return True
