"""Rows to `Problem`, with the schema checked; and the sources that `load_problems` gives."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Protocol

from k3rl.chat.messages import check_messages
from k3rl.data.config import Columns, DataConfig, MixData, ReasoningGymData, RowsConfig, SourceConfig, Split
from k3rl.data.rows import Rows, open_rows
from k3rl.errors import UserError, nearest
from k3rl.types import Effort, Message, Problem


class ProblemSource(Protocol):
    """Problems with random access. ``source[i]`` is the same problem whenever and wherever it is asked
    for."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Problem: ...

    def efforts(self, index: int) -> Mapping[Effort, float]:
        """Shares of efforts for a problem that has none of its own; empty: it is drawn without an effort."""

    def fingerprint(self) -> str:
        """Changes when the problems or their order change."""


def read_problem(row: Any, where: str, default_id: str, config: SourceConfig, columns: Columns) -> Problem:
    """One row as a `Problem`. Raises `UserError` that names ``where`` and the column."""
    if isinstance(row, Problem):
        return _with_defaults(row, config)
    if not isinstance(row, Mapping):
        raise UserError(f"{where}: a row is a mapping of columns, not a {type(row).__name__}")
    effort = row.get(columns.effort)
    if effort is not None and effort not in set(Effort):
        raise UserError(
            f"{where}: '{columns.effort}' is {effort!r}, not an effort{nearest(str(effort), Effort)}"
        )
    problem = Problem(
        id=_text(row, columns.id, where, default_id),
        domain=_text(row, columns.domain, where, config.domain),
        messages=read_messages(row, where, columns),
        reward=_reward(row, where, config, columns),
        effort=Effort(effort) if effort is not None else None,
        tools=_json_list(row.get(columns.tools), where, columns.tools),
        budget_tokens=_count(row.get(columns.budget_tokens), where, columns.budget_tokens),
        reference_length=_count(row.get(columns.reference_length), where, columns.reference_length),
        metadata={name: row[name] for name in columns.metadata if name in row},
    )
    return _with_defaults(problem, config)


def _with_defaults(problem: Problem, config: SourceConfig) -> Problem:
    if config.environment is not None and "environment" not in problem.metadata:
        problem = replace(problem, metadata={**problem.metadata, "environment": config.environment})
    if config.system is not None and not any(m.get("role") == "system" for m in problem.messages):
        return replace(problem, messages=[{"role": "system", "content": config.system}, *problem.messages])
    return problem


def _text(row: Mapping[str, Any], column: str, where: str, default: str) -> str:
    value = row.get(column)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise UserError(f"{where}: '{column}' is a {type(value).__name__}, not text")
    return str(value)


def _count(value: Any, where: str, column: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value <= 0:
        raise UserError(f"{where}: '{column}' is {value!r}, not a number of tokens above 0")
    return int(value)


def _json_list(value: Any, where: str, column: str) -> list[Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else []
        except ValueError as error:
            raise UserError(f"{where}: '{column}' is text but not JSON ({error})") from error
    if value is None:
        return []
    if not isinstance(value, list):
        raise UserError(f"{where}: '{column}' is a {type(value).__name__}, not a list")
    return [without_nulls(v) for v in value]


def without_nulls(value: Any) -> Any:
    """Arrow fills absent keys of a struct with null: take them out again."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [without_nulls(v) for v in value]
    return value


def read_messages(row: Mapping[str, Any], where: str, columns: Columns) -> list[Message]:
    """The conversation of a row: its ``messages``, else its ``prompt``."""
    column = columns.messages if row.get(columns.messages) is not None else columns.prompt
    value = row.get(column)
    if value is None:
        raise UserError(
            f"{where}: neither '{columns.messages}' nor '{columns.prompt}' is given"
            f"{nearest(columns.prompt, [str(k) for k in row])}"
        )
    if isinstance(value, str) and column == columns.prompt:
        messages: list[Message] = [{"role": "user", "content": value}]
    else:
        messages = _json_list(value, where, column)
    if not messages:
        raise UserError(f"{where}: '{column}' is empty")
    try:
        check_messages(messages)
    except UserError as error:
        raise UserError(f"{where}: '{column}': {error}") from error
    return messages


def _reward(row: Mapping[str, Any], where: str, config: SourceConfig, columns: Columns) -> dict[str, Any]:
    value = row.get(columns.reward)
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise UserError(f"{where}: '{columns.reward}' is not JSON ({error})") from error
    value = without_nulls(value) if value is not None else config.reward
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise UserError(
            f"{where}: no reward: name one in the source's 'reward', or give a column '{columns.reward}' "
            "that holds a name or a mapping with 'name'"
        )
    answer = row.get(columns.answer)
    return value if answer is None or "answer" in value else {**value, "answer": answer}


def content_digest(problem: Problem) -> bytes:
    """Eight bytes that depend on what is asked, not on the problem's id."""
    text = json.dumps([problem.messages, problem.tools], sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


class RowProblems:
    """Problems of a table. Every row is read and checked when the source is opened; problems are made when
    asked for."""

    def __init__(self, config: RowsConfig, rows: Rows | None = None) -> None:
        self.config = config
        self.rows = rows if rows is not None else open_rows(config)
        self._check_columns()
        total = min(len(self.rows), config.limit or len(self.rows))
        seen: dict[str, int] = {}
        digest = hashlib.blake2b(digest_size=16)
        for index in range(total):
            problem = self[index]
            if problem.id in seen:
                raise UserError(
                    f"{self.rows.where(index)}: the id '{problem.id}' is that of "
                    f"{self.rows.where(seen[problem.id])} too"
                )
            seen[problem.id] = index
            digest.update(problem.id.encode() + b"\0" + content_digest(problem))
        self._total, self._digest = total, digest.hexdigest()

    def _check_columns(self) -> None:
        known = self.rows.columns()
        if known is None:
            return
        columns = self.config.columns
        named = [getattr(columns, f) for f in columns.model_fields_set if f != "metadata"]
        for column in [*named, *columns.metadata]:
            if column not in known:
                raise UserError(
                    f"{self.rows.where(0)}: there is no column '{column}'{nearest(column, known)}"
                )

    def __len__(self) -> int:
        return self._total

    def __getitem__(self, index: int) -> Problem:
        return read_problem(
            self.rows.row(index),
            self.rows.where(index),
            f"{self.rows.name}-{index}",
            self.config,
            self.config.columns,
        )

    def efforts(self, index: int) -> Mapping[Effort, float]:
        return self.config.efforts

    def fingerprint(self) -> str:
        return self._digest


class Subset:
    """Some problems of a source, by index."""

    def __init__(self, source: ProblemSource, indices: Sequence[int], label: str) -> None:
        self.source, self.indices, self.label = source, indices, label

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Problem:
        return self.source[self.indices[index]]

    def efforts(self, index: int) -> Mapping[Effort, float]:
        return self.source.efforts(self.indices[index])

    def fingerprint(self) -> str:
        return f"{self.source.fingerprint()}/{self.label}"


class Mixed:
    """Several sources in a row."""

    def __init__(self, sources: Sequence[ProblemSource]) -> None:
        self.sources = list(sources)
        self.ends = list(accumulate(len(s) for s in self.sources))

    def _at(self, index: int) -> tuple[ProblemSource, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        which = bisect_right(self.ends, index)
        return self.sources[which], index - (self.ends[which - 1] if which else 0)

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> Problem:
        source, local = self._at(index)
        return source[local]

    def efforts(self, index: int) -> Mapping[Effort, float]:
        source, local = self._at(index)
        return source.efforts(local)

    def fingerprint(self) -> str:
        return "+".join(s.fingerprint() for s in self.sources)


def split_indices(source: ProblemSource, split: Split) -> list[int]:
    """Indices of the part that ``split`` asks for. Raises `UserError` where it is empty."""
    total = len(source)
    if split.rule == "last":
        border = total - max(1, round(total * split.held_out))
        held = [index >= border for index in range(total)]
    else:
        held = [_is_held_out(source[index], split) for index in range(total)]
    indices = [i for i, h in enumerate(held) if h == (split.part == "held_out")]
    if not indices:
        raise UserError(
            f"the {split.part} part ({split.rule}, held_out={split.held_out}) of {total} problems is empty"
        )
    return indices


def _is_held_out(problem: Problem, split: Split) -> bool:
    key = content_digest(problem) if split.rule == "content" else problem.id.encode()
    digest = hashlib.blake2b(f"{split.seed}\x1f".encode() + key, digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64 < split.held_out


def load_problems(config: DataConfig) -> ProblemSource:
    """Open a source of problems, checked row by row. Raises `UserError` that names file and row."""
    if isinstance(config, MixData):
        source = Mixed([load_problems(c) for c in config.sources])
        _unique(source)
        return source
    opened: ProblemSource
    if isinstance(config, ReasoningGymData):
        from k3rl.data.gym import GymProblems

        opened = GymProblems(config)
    else:
        opened = RowProblems(config)
    if config.split is None:
        return opened
    return Subset(opened, split_indices(opened, config.split), config.split.model_dump_json())


def _unique(source: Mixed) -> None:
    owner: dict[str, int] = {}
    for number, part in enumerate(source.sources):
        for index in range(len(part)):
            name = part[index].id
            if owner.setdefault(name, number) != number:
                raise UserError(
                    f"sources {owner[name] + 1} and {number + 1} of the mix both have the problem '{name}'"
                )


def every_effort(source: ProblemSource) -> Iterator[Problem]:
    """Each problem once at each effort it may be drawn at, in order: what an evaluation goes through."""
    for index in range(len(source)):
        problem = source[index]
        efforts = [e for e, weight in source.efforts(index).items() if weight > 0]
        if problem.effort is not None or not efforts:
            yield problem
        else:
            yield from (replace(problem, effort=effort) for effort in efforts)
