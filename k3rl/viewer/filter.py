"""The filter language, and its translation to SQL with parameters.

    reward < 0.2 and effort = "max" and text ~ "foo"
    not (stop_reason in (repetition, max_tokens)) or component.task is null
    "any words"                                          the same as text ~ "any words"

Comparisons: ``= != < <= > >=``; ``~`` contains (case does not matter), ``=~`` matches a regular expression;
``in (...)``, ``is null``, ``is not null``. ``and``, ``or``, ``not``, brackets. Words need quotes only where they hold
anything but letters, digits and ``_ . : / -``. A column with a strange name is written in backquotes. A number may be
compared with another number column: ``thinking_tokens > budget_tokens``.
``!=`` and ``not`` keep rows where the column is empty out of comparisons only as SQL does: ``!=`` counts empty as
different, ``not (x < 1)`` needs a value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import duckdb

from k3rl.errors import UserError, nearest
from k3rl.viewer.columns import Column, quoted

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.]))
    | (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    | (?P<name>`[^`]+`|[^\W\d][\w./:-]*)
    | (?P<op><=|>=|!=|!~|=~|==|=|<|>|~|\(|\)|,)
    )""",
    re.VERBOSE,
)
_KEYWORDS = {"and", "or", "not", "in", "is", "null"}
_COMPARISONS = {"=", "!=", "<", "<=", ">", ">=", "~", "!~", "=~"}
_ORDERED = {"=", "!=", "<", "<=", ">", ">="}
_DEEPEST = 60


class FilterError(UserError):
    """``position`` is where in the text the trouble is."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position


class Bare(str):
    """A value that was written without quotes: beside a number it may name another column."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Token:
    kind: str
    text: str
    position: int

    @property
    def word(self) -> str:
        """A keyword or operator in lower case; empty for values."""
        return self.text.lower() if self.kind == "op" or (self.kind == "name" and self.is_keyword) else ""

    @property
    def is_keyword(self) -> bool:
        return self.kind == "name" and self.text.lower() in _KEYWORDS

    @property
    def value(self) -> float | str:
        if self.kind == "number":
            return float(self.text)
        if self.kind == "string":
            return re.sub(r"\\(.)", r"\1", self.text[1:-1], flags=re.DOTALL)
        return Bare(self.text.strip("`"))


@dataclass(frozen=True, slots=True)
class Node:
    """``kind``: and, or, not (over ``parts``), or a comparison of ``column`` with ``values``."""

    kind: str
    parts: tuple[Node, ...] = ()
    column: str = ""
    values: tuple[Any, ...] = ()
    position: int = 0


@dataclass(frozen=True, slots=True)
class TextPredicate:
    """A search in columns that stay in the files. ``sql`` has one parameter, ``value``, per column."""

    columns: tuple[str, ...]
    regular: bool
    value: str


@dataclass(slots=True)
class Compiled:
    """``sql`` is a condition on ``r`` (rollouts), ``d`` (derived), ``n`` (notes). ``bound``: the same with every
    text search left out, true wherever ``sql`` is."""

    sql: str = "true"
    parameters: list[Any] = field(default_factory=list)
    needs: set[str] = field(default_factory=set)
    texts: list[TextPredicate] = field(default_factory=list)
    bound: str = "true"
    bound_parameters: list[Any] = field(default_factory=list)


def tokens_of(text: str) -> list[Token]:
    found, at = [], 0
    while at < len(text.rstrip()):
        match = _TOKEN.match(text, at)
        if match is None:
            start = at + len(text[at:]) - len(text[at:].lstrip())
            raise FilterError(f"filter: cannot read '{text[start : start + 12]}'", start)
        kind = match.lastgroup or ""
        found.append(Token(kind, match.group(kind), match.start(kind)))
        at = match.end()
    return found


def parse(text: str) -> Node | None:
    """The filter as a tree; None where it is empty. Raises `FilterError`."""
    parser = _Parser(tokens_of(text), len(text))
    if not parser.tokens:
        return None
    node = parser.either(0)
    if parser.peek:
        raise FilterError(
            f"filter: '{parser.peek.text}' is not expected here; is an 'and' missing?", parser.peek.position
        )
    return node


@dataclass(slots=True)
class _Parser:
    tokens: list[Token]
    end: int
    at: int = 0

    @property
    def peek(self) -> Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def next(self, what: str) -> Token:
        token = self.peek
        if token is None:
            raise FilterError(f"filter: it ends where {what} should come", self.end)
        self.at += 1
        return token

    def take(self, word: str) -> bool:
        if self.peek and self.peek.word == word:
            self.at += 1
            return True
        return False

    def expect(self, word: str) -> None:
        token = self.next(f"'{word}'")
        if token.word != word:
            raise FilterError(f"filter: '{word}' should come instead of '{token.text}'", token.position)

    def either(self, depth: int) -> Node:
        parts = [self.both(depth)]
        while self.take("or"):
            parts.append(self.both(depth))
        return parts[0] if len(parts) == 1 else Node("or", tuple(parts))

    def both(self, depth: int) -> Node:
        parts = [self.one(depth)]
        while self.take("and"):
            parts.append(self.one(depth))
        return parts[0] if len(parts) == 1 else Node("and", tuple(parts))

    def one(self, depth: int) -> Node:
        if depth > _DEEPEST:
            raise FilterError("filter: too many brackets inside each other", self.end)
        if self.take("not"):
            return Node("not", (self.one(depth + 1),))
        if self.take("("):
            node = self.either(depth + 1)
            self.expect(")")
            return node
        return self.comparison()

    def comparison(self) -> Node:
        token = self.next("a column")
        follows = self.peek
        if token.kind == "string" and not (
            follows and (follows.word in _COMPARISONS or follows.word in ("in", "is"))
        ):
            return Node("~", column="text", values=(token.value,), position=token.position)
        if token.kind not in ("name", "string") or token.is_keyword:
            raise FilterError(f"filter: '{token.text}' is not the name of a column", token.position)
        column = str(token.value)
        operator = self.next(f"a comparison for '{column}'")
        word = "=" if operator.word == "==" else operator.word
        if word == "is":
            negated = self.take("not")
            self.expect("null")
            node = Node("null", column=column, position=token.position)
            return Node("not", (node,)) if negated else node
        if word == "not":
            self.expect("in")
            return Node("not", (self.members(column, token.position),))
        if word == "in":
            return self.members(column, token.position)
        if word not in _COMPARISONS:
            raise FilterError(
                f"filter: after '{column}' comes a comparison such as = < ~, not '{operator.text}'",
                operator.position,
            )
        value = self.value(f"a value for '{column}'")
        if word == "!~":
            return Node("not", (Node("~", column=column, values=(value,), position=token.position),))
        return Node(word, column=column, values=(value,), position=token.position)

    def members(self, column: str, position: int) -> Node:
        self.expect("(")
        values = [self.value("a value")]
        while self.take(","):
            values.append(self.value("a value"))
        self.expect(")")
        return Node("in", column=column, values=tuple(values), position=position)

    def value(self, what: str) -> Any:
        token = self.next(what)
        if token.kind == "op" or token.is_keyword:
            raise FilterError(f"filter: '{token.text}' stands where {what} should", token.position)
        return token.value


# -- to SQL ------------------------------------------------------------------------------------------------


def compile_filter(
    text: str, columns: Mapping[str, Column], predicate_id: Callable[[TextPredicate], int]
) -> Compiled:
    """``predicate_id`` numbers text searches as the table ``hits`` does. Raises `FilterError`."""
    compiled = Compiled()
    tree = parse(text)
    if tree is not None:
        translate = _Translation(columns, predicate_id, compiled)
        compiled.sql = translate.node(tree, False, compiled.parameters, False)
        compiled.bound = translate.node(tree, False, compiled.bound_parameters, True)
    return compiled


@dataclass(slots=True)
class _Translation:
    columns: Mapping[str, Column]
    predicate_id: Callable[[TextPredicate], int]
    compiled: Compiled

    def node(self, node: Node, negated: bool, parameters: list[Any], relaxed: bool) -> str:
        """``negated`` pushes "not" down to comparisons, so that ``relaxed`` can make searches true on either side."""
        if node.kind == "not":
            return self.node(node.parts[0], not negated, parameters, relaxed)
        if node.kind in ("and", "or"):
            word = {"and": "or", "or": "and"}[node.kind] if negated else node.kind
            return (
                "(" + f" {word} ".join(self.node(p, negated, parameters, relaxed) for p in node.parts) + ")"
            )
        column, sql = column_sql(node.column, self.columns, node.position)
        if column.place == "file":
            if relaxed:
                return "true"
            condition = self.search(node, column)
        else:
            self.compiled.needs.add(column.place)
            condition = _comparison(node, column, sql, parameters, self.other_column(node, column))
        return f"(not {condition})" if negated else condition

    def other_column(self, node: Node, column: Column) -> str | None:
        """The SQL of the number column that a number is compared with; None where it is compared with a value."""
        name = node.values[0] if node.values else None
        if column.kind != "number" or not isinstance(name, Bare) or node.kind not in _ORDERED:
            return None
        if name not in self.columns and not name.startswith("component."):
            return None
        other, sql = column_sql(name, self.columns, node.position)
        if other.kind != "number" or other.place == "file":
            raise FilterError(f"filter: '{column.name}' is a number, '{name}' is not", node.position)
        self.compiled.needs.add(other.place)
        return sql

    def search(self, node: Node, column: Column) -> str:
        if node.kind not in ("~", "=~") or not isinstance(node.values[0], str | float):
            raise FilterError(f"filter: '{column.name}' is searched with ~ or =~", node.position)
        names = ("prompt_text", "response_text") if column.name == "text" else (column.name,)
        value = node.values[0] if isinstance(node.values[0], str) else f"{node.values[0]:g}"
        if node.kind == "=~":
            _check_regular(value, node.position)
        predicate = TextPredicate(names, node.kind == "=~", value)
        if predicate not in self.compiled.texts:
            self.compiled.texts.append(predicate)
        return f"(r.rid in (select rid from hits where predicate = {int(self.predicate_id(predicate))}))"


def column_sql(name: str, columns: Mapping[str, Column], position: int = 0) -> tuple[Column, str]:
    """A column as the query's tables name it; ``component.NAME`` is a part of the reward. Raises `FilterError`."""
    if name.startswith("component."):
        key = name.removeprefix("component.").replace("'", "''")
        return Column(
            name, "number", "index"
        ), f"list_filter(r.reward_components, lambda c: c.name = '{key}')[1].value"
    column = columns.get(name) or columns.get(name.lower())
    if column is None:
        raise FilterError(f"filter: there is no column '{name}'{nearest(name, columns)}", position)
    if column.name == "reward_components":
        return column, "CAST(r.reward_components AS VARCHAR)"
    table = {"index": "r", "derived": "d", "notes": "n", "file": "f"}[column.place]
    return column, f"{table}.{quoted(column.name)}"


def word_of(value: str) -> str:
    """A value as the language writes it, quoted and escaped."""
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _comparison(node: Node, column: Column, sql: str, parameters: list[Any], other: str | None) -> str:
    if node.kind == "null":
        return f"({sql} is null)"
    if other is not None:
        return f"({sql} {'is distinct from' if node.kind == '!=' else node.kind} {other})"
    values = [_typed(v, column, node) for v in node.values]
    parameters.extend(values)
    if node.kind == "in":
        return f"({sql} in ({', '.join('?' * len(values))}))"
    if node.kind == "~":
        return f"contains(lower(CAST({sql} AS VARCHAR)), lower(?))"
    if node.kind == "=~":
        _check_regular(values[0], node.position)
        return f"regexp_matches(CAST({sql} AS VARCHAR), ?)"
    if node.kind == "!=":
        return f"({sql} is distinct from ?)"
    return f"({sql} {node.kind} ?)"


def _typed(value: Any, column: Column, node: Node) -> Any:
    if node.kind in ("~", "=~"):
        return value if isinstance(value, str) else f"{value:g}"
    if column.kind == "number":
        if isinstance(value, float):
            return value
        if value.lower() in ("nan", "infinity", "inf"):
            return float(value)
        raise FilterError(f"filter: '{column.name}' is a number, '{value}' is not", node.position)
    if column.kind == "flag":
        if str(value).lower() in ("true", "false"):
            return str(value).lower() == "true"
        raise FilterError(f"filter: '{column.name}' is true or false, not '{value}'", node.position)
    return value if isinstance(value, str) else f"{value:g}"


def _check_regular(pattern: str, position: int) -> None:
    """The pattern itself runs in DuckDB's linear-time engine, which says no more than that it is bad."""
    try:
        with duckdb.connect() as connection:
            connection.execute("select regexp_matches('', ?)", [pattern])
    except duckdb.Error as error:
        raise FilterError(
            f"filter: '{pattern}' is not a regular expression: {error}".split("\n")[0], position
        ) from None
