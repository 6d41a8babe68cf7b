"""The viewer's table: one row per rollout of every run, its indexed columns and where its parquet row is.

The table is a DuckDB database in a folder of the viewer's own. One thread, `Index.refresh`, writes it: it looks for
files that came, changed or went, newest first, and reads the indexed columns of many files at a time. Everything else
reads through cursors of its own. The database may only read below the given paths, and its settings are locked.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from k3rl.store.run import step_of
from k3rl.viewer.columns import DERIVED, GROUP, STORED, Column, extra_columns, known_columns, quoted
from k3rl.viewer.derived import derived_columns
from k3rl.viewer.notes import Notes
from k3rl.viewer.sources import Source, Sources

_FILES_AT_ONCE = 64
_ROW_BITS = 32
_NEEDED = {"step", "draw", "sample"}


@dataclass(frozen=True, slots=True)
class RolloutFile:
    """A parquet file that was read. ``stamp`` tells whether it is still the same."""

    id: int
    run: str
    path: Path
    step: int
    rows: int
    stamp: tuple[int, int, int]


@dataclass(slots=True)
class Progress:
    """How far reading is, in files."""

    done: int = 0
    total: int = 0
    derived: int = 0


@dataclass(slots=True)
class Index:
    """See the module's docstring. `close` removes nothing: the folder belongs to the caller."""

    sources: Sources
    folder: Path
    memory_limit: str = "400MB"
    files: dict[Path, RolloutFile] = field(default_factory=dict)
    broken: dict[Path, tuple[str, str, tuple[int, int, int]]] = field(default_factory=dict)
    extra: dict[str, Column] = field(default_factory=dict)
    runs: dict[str, Source] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    version: int = 0
    notes: Notes = field(init=False)
    _db: duckdb.DuckDBPyConnection = field(init=False)
    _next_file: int = 1
    _underived: list[RolloutFile] = field(default_factory=list)
    _refreshing: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._db = duckdb.connect(
            str(self.folder / "index.duckdb"), config={"memory_limit": self.memory_limit, "threads": 2}
        )
        columns = ", ".join(f"{quoted(c.name)} {c.sql_type}" for c in (*STORED, *GROUP))
        derived = ", ".join(f"{quoted(c.name)} {c.sql_type}" for c in DERIVED)
        self._db.execute(f"CREATE TABLE rollouts (rid BIGINT, run VARCHAR, {columns})")
        self._db.execute(f"CREATE TABLE derived (rid BIGINT, {derived})")
        self._db.execute("CREATE TABLE hits (predicate INTEGER, rid BIGINT)")
        self._db.execute("CREATE TABLE files (id BIGINT, run VARCHAR, path VARCHAR)")
        self.notes = Notes(self._db.cursor())
        self._join_all()
        _lock_down(self._db, [*self.sources.roots, self.folder])

    def _join_all(self) -> None:
        """The view that people's SQL reads; made again when a file brought a column."""
        derived = ", ".join(f"d.{quoted(c.name)}" for c in DERIVED)
        self._db.execute(
            f"CREATE OR REPLACE VIEW everything AS SELECT r.*, {derived}, n.flag, n.note "
            f"FROM rollouts r LEFT JOIN derived d ON d.rid = r.rid LEFT JOIN notes n "
            f"ON n.run = r.run AND n.step = r.step AND n.draw = r.draw AND n.sample = r.sample"
        )

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """A connection for one request."""
        return self._db.cursor()

    @property
    def columns(self) -> dict[str, Column]:
        return known_columns(self.extra)

    def file_of(self, rid: int) -> tuple[RolloutFile, int]:
        """The file and the row in it. Raises `KeyError` where the file has gone."""
        wanted = rid >> _ROW_BITS
        return next(f for f in self.files.values() if f.id == wanted), rid & ((1 << _ROW_BITS) - 1)

    def files_of(self, runs: Iterable[str] | None = None) -> list[RolloutFile]:
        """Newest step first."""
        chosen = set(runs or self.runs)
        return sorted((f for f in self.files.values() if f.run in chosen), key=lambda f: -f.step)

    # -- reading -------------------------------------------------------------------------------------------

    def refresh(self) -> bool:
        """Take in what changed on disk. Returns whether anything did."""
        with self._refreshing:
            found = self.sources.find()
            changed = {s.name for s in found} != set(self.runs)
            self.runs = {s.name: s for s in found}
            there = {
                file: (source, stamp)
                for source in found
                for file in source.files()
                if (stamp := _stamp(file))
            }
            gone = [f for f in self.files.values() if there.get(f.path, (None, ()))[1] != f.stamp]
            fresh = [p for p in there if p not in self.files or self.files[p] in gone]
            fresh = [p for p in fresh if p not in self.broken or self.broken[p][2] != there[p][1]]
            self.broken = {p: b for p, b in self.broken.items() if p in there and p not in fresh}
            self.broken |= {
                file: (s.name, reason, (0, 0, 0))
                for s in found
                if s.foreign
                for file, reason in s.foreign.trouble.items()
            }
            self._forget(gone)
            self.progress.total = len(self.files) + len(fresh)
            self.progress.done = len(self.files)
            self._read([(p, *there[p]) for p in sorted(fresh, key=_newest_first)])
            changed |= self.notes.refresh(found)
            changed |= bool(gone or fresh)
            self.version += changed
            return changed

    def derive(self, most: int = 8) -> bool:
        """Compute the derived columns of some more files. Returns whether there were any."""
        with self._refreshing:
            some, self._underived = self._underived[:most], self._underived[most:]
            for file in some:
                if self.files.get(file.path) is not file:
                    continue
                try:
                    table = derived_columns(file.path, file.id << _ROW_BITS)
                except (OSError, ValueError, pa.ArrowException) as error:
                    self._break(file.path, file.run, error, file.stamp)
                    continue
                cursor = self._db.cursor()
                cursor.register("fresh_derived", table)
                names = ", ".join(quoted(n) for n in table.column_names)
                cursor.execute(f"INSERT INTO derived ({names}) SELECT {names} FROM fresh_derived")
                cursor.close()
            self.progress.derived = len(self.files) - len(self._underived)
            if some and not self._underived:
                self.version += 1
            return bool(some)

    def _forget(self, gone: list[RolloutFile]) -> None:
        for file in gone:
            low, high = file.id << _ROW_BITS, (file.id + 1) << _ROW_BITS
            for table in ("rollouts", "derived", "hits"):
                self._db.execute(f"DELETE FROM {table} WHERE rid >= ? AND rid < ?", [low, high])
            self._db.execute("DELETE FROM files WHERE id = ?", [file.id])
            self.files.pop(file.path, None)

    def _read(self, fresh: list[tuple[Path, Source, tuple[int, int, int]]]) -> None:
        """Files of one schema are read together."""
        for start in range(0, len(fresh), _FILES_AT_ONCE):
            batches: dict[str, list[RolloutFile]] = defaultdict(list)
            schemas: dict[str, pa.Schema] = {}
            for path, source, stamp in fresh[start : start + _FILES_AT_ONCE]:
                try:
                    with pq.ParquetFile(path) as parquet:
                        schema, rows = parquet.schema_arrow, parquet.metadata.num_rows
                    if lacking := sorted(_NEEDED - set(schema.names)):
                        raise ValueError(f"it lacks the columns {', '.join(lacking)}")
                except (OSError, ValueError, pa.ArrowException) as error:
                    self._break(path, source.name, error, stamp)
                    continue
                step = step_of(path) if path.name.removeprefix("step-")[:6].isdigit() else 0
                file = RolloutFile(self._next_file, source.name, path, step, rows, stamp)
                self._next_file += 1
                key = repr(schema.remove_metadata())
                batches[key].append(file)
                schemas[key] = schema
            for key, files in batches.items():
                self._insert_or_split(files, schemas[key])
                self.progress.done = len(self.files)
            self.version += 1

    def _insert_or_split(self, files: list[RolloutFile], schema: pa.Schema) -> None:
        try:
            self._insert(files, schema)
        except duckdb.Error as error:
            if len(files) == 1:
                self._break(files[0].path, files[0].run, error, files[0].stamp)
                return
            for file in files:
                self._insert_or_split([file], schema)

    def _insert(self, files: list[RolloutFile], schema: pa.Schema) -> None:
        for column in extra_columns(schema):
            if column.name not in self.extra:
                self._db.execute(f"ALTER TABLE rollouts ADD COLUMN {quoted(column.name)} {column.sql_type}")
                self.extra[column.name] = column
                self._join_all()
        there = set(schema.names)
        stored = [c for c in (*STORED, *self.extra.values()) if c.name in there]
        names = ["rid", "run", *(c.name for c in stored), *(c.name for c in GROUP)]
        inner = ", ".join(_read_expression(c, schema) for c in stored)
        rows = self._db.cursor()
        rows.begin()
        try:
            rows.executemany(
                "INSERT INTO files VALUES (?, ?, ?)", [[f.id, f.run, str(f.path)] for f in files]
            )
            rows.execute(
                f"""
                INSERT INTO rollouts ({", ".join(map(quoted, names))})
                SELECT rid, run, {", ".join(quoted(c.name) for c in stored)}, {_group_expressions(there)}
                FROM (
                    SELECT (f.id << {_ROW_BITS}) + p.file_row_number AS rid, f.run AS run, {inner}
                    FROM read_parquet(?, filename=true, file_row_number=true) p JOIN files f ON f.path = p.filename
                )
                WINDOW g AS (PARTITION BY rid >> {_ROW_BITS}, step, draw)
                """,
                [[str(f.path) for f in files]],
            )
            rows.commit()
        except duckdb.Error:
            rows.rollback()
            raise
        finally:
            rows.close()
        self.files |= {f.path: f for f in files}
        self._underived += files

    def _break(self, path: Path, run: str, error: Exception, stamp: tuple[int, int, int]) -> None:
        reason = str(error).splitlines()[0].replace(str(path), path.name)
        self.broken[path] = (run, reason, stamp)
        self.version += 1

    def close(self) -> None:
        self._db.close()


def _read_expression(column: Column, schema: pa.Schema) -> str:
    name = quoted(column.name)
    if column.place == "index" and column.kind == "text":
        return f"left(CAST(p.{name} AS VARCHAR), 2000) AS {name}"
    return f"TRY_CAST(p.{name} AS {column.sql_type}) AS {name}"


def _group_expressions(there: set[str]) -> str:
    reward = "reward" if "reward" in there else "NULL::DOUBLE"
    status = "status" if "status" in there else "NULL::VARCHAR"
    parts = (
        "list_transform(reward_components, lambda c: c.value)"
        if "reward_components" in there
        else "NULL::DOUBLE[]"
    )
    return f"""
        count(*) OVER g, avg({reward}) OVER g, stddev_pop({reward}) OVER g, count({reward}) OVER g,
        count(*) FILTER (WHERE {status} = 'truncated') OVER g,
        coalesce(list_min({parts}) < 0 AND list_max({parts}) > 0, false)
    """


def _newest_first(path: Path) -> tuple[str, str]:
    return "".join(chr(0x10FFFF - ord(c)) for c in path.name), str(path.parent)


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except FileNotFoundError:  # a run that resumes takes files back
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _lock_down(db: duckdb.DuckDBPyConnection, folders: list[Path]) -> None:
    """Files below these folders only, no extensions, no Python variables as tables; for good."""

    def listed(paths: list[str]) -> str:
        return ", ".join("'" + p.replace("'", "''") + "'" for p in paths)

    allowed = listed([str(f).rstrip("/") + "/" for f in folders if not f.is_file()])
    db.execute("SET max_temp_directory_size = '4GB'")
    db.execute("SET python_enable_replacements = false")
    db.execute("SET autoinstall_known_extensions = false")
    db.execute("SET autoload_known_extensions = false")
    db.execute(f"SET allowed_directories = [{allowed}]")
    db.execute(f"SET allowed_paths = [{listed([str(f) for f in folders if f.is_file()])}]")
    db.execute("SET enable_external_access = false")
    db.execute("SET lock_configuration = true")


def as_json(value: Any) -> Any:
    """Numbers that JSON lacks as words, so that they are seen; times as text."""
    if isinstance(value, float):
        return (
            value
            if value - value == 0
            else "NaN"
            if value != value
            else "Infinity"
            if value > 0
            else "-Infinity"
        )
    if isinstance(value, dict):
        return {str(k): as_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(v) for v in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    return str(value)
