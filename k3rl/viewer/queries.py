"""Questions to the index: pages, neighbours, counts. Every value reaches DuckDB as a parameter."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import duckdb

from k3rl.errors import UserError
from k3rl.viewer.columns import DERIVED, quoted
from k3rl.viewer.filter import Compiled, TextPredicate, column_sql, compile_filter
from k3rl.viewer.index import Index, RolloutFile, as_json

Row = dict[str, Any]
_SEARCH_FILES = 16
_LARGEST_PAGE = 1000


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rollouts, in which order. ``sort`` empty: newest step first, then as stored."""

    runs: tuple[str, ...] = ()
    filter: str = ""
    sort: str = ""
    descending: bool = False


@dataclass(frozen=True, slots=True)
class Key:
    """What names a rollout for good, whatever the order of a list."""

    run: str
    step: int
    draw: int
    sample: int


@dataclass(slots=True)
class Searching:
    """How far a text search is, in files."""

    done: int = 0
    total: int = 0

    @property
    def finished(self) -> bool:
        return self.done >= self.total


@dataclass(slots=True)
class Queries:
    """One per viewer; its methods may be called from many threads."""

    index: Index
    search_seconds_s: float = 0.8
    _predicates: dict[TextPredicate, int] = field(default_factory=dict)
    _searched: dict[int, set[int]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def page(self, selection: Selection, offset: int = 0, limit: int = 100) -> Row:
        """Rows of the indexed columns, how many there are in all, and how far a text search is."""
        cursor = self.index.cursor()
        compiled, where, parameters, searching = self.prepared(cursor, selection)
        order, order_needs = self.order(selection)
        tables = tables_of(compiled.needs | order_needs)
        limit = max(1, min(limit, _LARGEST_PAGE))
        rids = [
            rid
            for (rid,) in cursor.execute(
                f"SELECT r.rid FROM {tables} WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?",
                [*parameters, limit, max(0, offset)],
            ).fetchall()
        ]
        total = self._count(cursor, compiled, where, parameters)
        return {
            "rows": self.rows(cursor, rids),
            "total": total,
            "offset": offset,
            "searching": {"done": searching.done, "total": searching.total},
        }

    def rids(self, selection: Selection, limit: int | None = None) -> list[int]:
        """All rids of a selection in its order, after its text searches have ended."""
        cursor = self.index.cursor()
        compiled, where, parameters, _ = self.prepared(cursor, selection, seconds_s=None)
        order, needs = self.order(selection)
        bound = f"LIMIT {int(limit)}" if limit is not None else ""
        found = cursor.execute(
            f"SELECT r.rid FROM {tables_of(compiled.needs | needs)} WHERE {where} ORDER BY {order} {bound}",
            parameters,
        )
        return [rid for (rid,) in found.fetchall()]

    def rows(self, cursor: duckdb.DuckDBPyConnection, rids: list[int]) -> list[Row]:
        """Indexed, derived and note columns of these rows, in this order."""
        if not rids:
            return []
        derived = ", ".join(f"d.{quoted(c.name)}" for c in DERIVED)
        found = cursor.execute(
            f"SELECT r.*, {derived}, n.flag, n.note FROM {tables_of({'derived', 'notes'})} WHERE r.rid IN "
            f"(SELECT unnest(?))",
            [rids],
        )
        names = [c[0] for c in found.description]
        by_rid = {values[0]: dict(zip(names, values, strict=True)) for values in found.fetchall()}
        return [as_json({**_plain_map(by_rid[r]), "rid": str(r)}) for r in rids if r in by_rid]

    def find(self, key: Key) -> int:
        """The rid of a rollout. Raises `UserError` where there is none."""
        found = (
            self.index.cursor()
            .execute(
                "SELECT rid FROM rollouts WHERE run = ? AND step = ? AND draw = ? AND sample = ?",
                [key.run, key.step, key.draw, key.sample],
            )
            .fetchone()
        )
        if found is None:
            more = (
                ""
                if self.index.progress.done >= self.index.progress.total
                else "; its file may not be read yet"
            )
            raise UserError(f"'{key.run}' holds no rollout {key.draw}.{key.sample} in step {key.step}{more}")
        return found[0]

    def group(self, run: str, step: int, draw: int) -> list[Row]:
        """The rows of a draw of a problem, by sample. Raises `UserError` where there are none."""
        cursor = self.index.cursor()
        found = cursor.execute(
            "SELECT rid FROM rollouts WHERE run = ? AND step = ? AND draw = ? ORDER BY sample",
            [run, step, draw],
        ).fetchall()
        if not found:
            raise UserError(f"'{run}' holds no group {draw} in step {step}")
        return self.rows(cursor, [rid for (rid,) in found])

    def neighbours(self, selection: Selection, rid: int) -> Row:
        """The rollouts before and after one, in a selection's order, and its place in it."""
        cursor = self.index.cursor()
        compiled, where, parameters, _ = self.prepared(cursor, selection)
        order, needs = self.order(selection)
        found = cursor.execute(
            f"WITH ordered AS (SELECT r.rid, row_number() OVER (ORDER BY {order}) AS place "
            f"FROM {tables_of(compiled.needs | needs)} WHERE {where}) "
            "SELECT o.rid, o.place FROM ordered o, (SELECT place FROM ordered WHERE rid = ?) here "
            "WHERE o.place BETWEEN here.place - 1 AND here.place + 1 ORDER BY o.place",
            [*parameters, rid],
        ).fetchall()
        place = next((p for r, p in found if r == rid), None)
        before = [r for r, p in found if place is not None and p < place]
        after = [r for r, p in found if place is not None and p > place]
        keys = {r["rid"]: r for r in self.rows(cursor, before + after)}
        return {
            "place": place,
            "previous": _key(keys.get(str(before[0]))) if before else None,
            "next": _key(keys.get(str(after[0]))) if after else None,
        }

    # -- parts of statements -------------------------------------------------------------------------------

    def prepared(
        self, cursor: duckdb.DuckDBPyConnection, selection: Selection, seconds_s: float | None = -1.0
    ) -> tuple[Compiled, str, list[Any], Searching]:
        """The condition of a selection, with its text searches as far as the time allows (None: to the end)."""
        compiled = compile_filter(selection.filter, self.index.columns, self._predicate)
        where, parameters = compiled.sql, list(compiled.parameters)
        bound, bound_parameters = compiled.bound, list(compiled.bound_parameters)
        if selection.runs:
            unknown = [r for r in selection.runs if r not in self.index.runs]
            if unknown:
                raise UserError(
                    f"there is no run '{unknown[0]}'; known: {', '.join(self.index.runs) or 'none'}"
                )
            where, bound = f"list_contains(?, r.run) AND {where}", f"list_contains(?, r.run) AND {bound}"
            parameters, bound_parameters = (
                [list(selection.runs), *parameters],
                [list(selection.runs), *bound_parameters],
            )
        searching = Searching()
        if compiled.texts:
            files = self._files_within(cursor, compiled, bound, bound_parameters)
            deadline = (
                None
                if seconds_s is None
                else time.monotonic() + (self.search_seconds_s if seconds_s < 0 else seconds_s)
            )
            for predicate in compiled.texts:
                done = self._search(predicate, files, deadline)
                searching.done += done
                searching.total += len(files)
        return compiled, where, parameters, searching

    def order(self, selection: Selection) -> tuple[str, set[str]]:
        """Ties are broken by rid, so that pages and neighbours agree."""
        direction = "DESC" if selection.descending else "ASC"
        if not selection.sort:
            return "r.step DESC, r.draw, r.sample, r.rid", set()
        column, sql = column_sql(selection.sort, self.index.columns)
        if column.place == "file":
            raise UserError(f"'{column.name}' is kept in the files and cannot be sorted by")
        return f"{sql} {direction} NULLS LAST, r.rid", {column.place}

    def _count(
        self, cursor: duckdb.DuckDBPyConnection, compiled: Compiled, where: str, parameters: list[Any]
    ) -> int:
        found = cursor.execute(
            f"SELECT count(*) FROM {tables_of(compiled.needs)} WHERE {where}", parameters
        ).fetchone()
        return found[0] if found else 0

    # -- text search ---------------------------------------------------------------------------------------

    def _predicate(self, predicate: TextPredicate) -> int:
        with self._lock:
            return self._predicates.setdefault(predicate, len(self._predicates))

    def _files_within(
        self, cursor: duckdb.DuckDBPyConnection, compiled: Compiled, bound: str, parameters: list[Any]
    ) -> list[RolloutFile]:
        """Files that hold any row which the rest of the filter lets through, newest first."""
        found = cursor.execute(
            f"SELECT DISTINCT r.rid >> 32 FROM {tables_of(compiled.needs)} WHERE {bound}", parameters
        ).fetchall()
        wanted = {i for (i,) in found}
        return [f for f in self.index.files_of() if f.id in wanted]

    def _search(self, predicate: TextPredicate, files: list[RolloutFile], deadline: float | None) -> int:
        """Search files that were not searched yet, until the deadline. Returns how many are done."""
        number = self._predicate(predicate)
        with self._lock:
            searched = self._searched.setdefault(number, set())
            left = [f for f in files if f.id not in searched]
            while left and (deadline is None or time.monotonic() < deadline):
                some, left = left[:_SEARCH_FILES], left[_SEARCH_FILES:]
                self._search_files(number, predicate, some)
                searched |= {f.id for f in some}
            return sum(f.id in searched for f in files)

    def _search_files(self, number: int, predicate: TextPredicate, files: list[RolloutFile]) -> None:
        """All files at once where they have the same columns, one by one else."""
        test = "regexp_matches({}, ?)" if predicate.regular else "contains(lower({}), lower(?))"
        condition = " OR ".join(test.format(quoted(c)) for c in predicate.columns)
        values = [predicate.value] * len(predicate.columns)
        cursor = self.index.cursor()
        try:
            cursor.execute(
                f"INSERT INTO hits SELECT ?, (f.id << 32) + p.file_row_number "
                f"FROM read_parquet(?, filename=true, file_row_number=true) p JOIN files f ON f.path = p.filename "
                f"WHERE {condition}",
                [number, [str(f.path) for f in files], *values],
            )
        except duckdb.Error:
            for file in files if len(files) > 1 else []:
                self._search_files(number, predicate, [file])
            # one file alone: it lacks the column or has gone, and holds no hits
        finally:
            cursor.close()


def tables_of(needs: set[str]) -> str:
    """The tables that a condition reads, joined by rid: `r`, and where needed `d` (derived) and `n` (notes)."""
    tables = "rollouts r"
    if "derived" in needs:
        tables += " LEFT JOIN derived d ON d.rid = r.rid"
    if "notes" in needs:
        tables += " LEFT JOIN notes n ON n.run = r.run AND n.step = r.step AND n.draw = r.draw AND n.sample = r.sample"
    return tables


def _plain_map(row: Row) -> Row:
    """Components as a dict, however DuckDB hands a map over."""
    parts = {part["name"]: part["value"] for part in row["reward_components"] or ()}
    return {**row, "reward_components": parts}


def _key(row: Row | None) -> Row | None:
    return None if row is None else {k: row[k] for k in ("run", "step", "draw", "sample")}
