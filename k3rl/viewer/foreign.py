"""Files that no run of ours wrote, read as rollouts: JSON lines, parquet, arrow, and folders that `datasets` saved.

They are rewritten as parquet in the viewer's own folder, row by row by `records`, and are then a run like any other.
What cannot be read is counted and named; the file itself is never touched.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from k3rl.errors import UserError
from k3rl.store import ROLLOUT_SCHEMA
from k3rl.viewer.records import row_of

SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".json", ".arrow", ".jsonl.gz")
_SKIPPED = {
    "dataset_info.json",
    "state.json",
    "dataset_dict.json",
    "metadata.json",
    "config.json",
    "notes.jsonl",
}
_SKIPPED |= {"metrics.jsonl", "status.json", "ledger.json", "report.json"}
_STEP = re.compile(r"(?:global_)?step[-_]?(\d+)", re.IGNORECASE)
_ROWS_A_FILE = 5_000
_LARGEST_JSON_BYTES = 1 << 30
_OURS = {"step", "draw", "sample", "problem_id"}
_DEPTH = 4
_COLUMNS = {f.name: f.type for f in ROLLOUT_SCHEMA} | {"turns_json": pa.string()}


@dataclass(slots=True)
class Foreign:
    """One source of other people's rows: files that belong together, and where their copies are.

    ``trouble``: what could not be read, by file. `refresh` is called by one thread.
    """

    path: Path
    folder: Path
    trouble: dict[Path, str] = field(default_factory=dict)
    _stamps: dict[Path, tuple[int, int]] = field(default_factory=dict)
    _copying: Iterator[Path] | None = None
    _began_at: float = 0.0
    _next_at: float = 0.0

    @property
    def notes_file(self) -> Path:
        beside = self.path.parent / f"{self.path.name}.notes.jsonl"
        return self.path / "notes.jsonl" if self.path.is_dir() else beside

    @property
    def busy(self) -> bool:
        """Is there more to copy?"""
        return self._copying is not None

    def refresh(self, seconds_s: float = 1.5) -> None:
        """Copy what changed, for so long at most; not more often than copying is cheap, for a file may grow all the
        time."""
        if self._copying is None:
            files = data_files(self.path)
            stamps = {f: (f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.exists()}
            if stamps == self._stamps or time.monotonic() < self._next_at:
                return
            self._stamps, self._copying, self._began_at = stamps, self._copy(files), time.monotonic()
        deadline = time.monotonic() + seconds_s
        for _ in self._copying:
            if time.monotonic() > deadline:
                return
        self._copying = None
        self._next_at = time.monotonic() + 5 * (time.monotonic() - self._began_at)

    def _copy(self, files: list[Path]) -> Iterator[Path]:
        """Each copy as soon as it is whole."""
        self.trouble = {}
        self.folder.mkdir(parents=True, exist_ok=True)
        places = Places()
        written: list[Path] = []
        rows: list[dict[str, Any]] = []
        for file in files:
            for row in self._rows(file):
                rows.append(places.of(row))
                if len(rows) == _ROWS_A_FILE:
                    written.append(self._write(rows, len(written)))
                    rows = []
                    yield written[-1]
        if rows:
            written.append(self._write(rows, len(written)))
            yield written[-1]
        for old in set(self.folder.glob("*.parquet")) - set(written):
            old.unlink()

    def _rows(self, file: Path) -> Iterator[dict[str, Any]]:
        step = step_in(file, self.path)
        bad: list[str] = []
        try:
            for where, record in read_records(file):
                if isinstance(record, ValueError):
                    bad.append(f"{where}: {record}")
                    continue
                try:
                    yield row_of(record, step)
                except ValueError as error:
                    bad.append(f"{where}: {error}")
        except (OSError, ValueError, pa.ArrowException) as error:
            bad.append(str(error).splitlines()[0].replace(str(file), file.name))
        if bad:
            more = f" (and {len(bad) - 1} more like it)" if len(bad) > 1 else ""
            self.trouble[file] = bad[0] + more

    def _write(self, rows: list[dict[str, Any]], number: int) -> Path:
        path = self.folder / f"{self.path.name}-{number:05d}.parquet"
        temporary = path.with_name(f".{path.name}.tmp")
        pq.write_table(table_of(rows), temporary, compression="zstd")
        temporary.replace(path)
        return path


@dataclass(slots=True)
class Places:
    """``draw`` numbers the problems of a step by their first row, ``sample`` the rows of each."""

    _draws: dict[tuple[int, str], int] = field(default_factory=dict)
    _next: Counter[int] = field(default_factory=Counter)
    _samples: Counter[tuple[int, int]] = field(default_factory=Counter)

    def of(self, row: dict[str, Any]) -> dict[str, Any]:
        step, problem = row["step"], row["problem_id"]
        if (step, problem) not in self._draws:
            self._draws[step, problem] = self._next[step]
            self._next[step] += 1
        draw = self._draws[step, problem]
        sample = self._samples[step, draw]
        self._samples[step, draw] += 1
        return {**row, "draw": draw, "sample": sample}


# -- finding -----------------------------------------------------------------------------------------------


def is_foreign(path: Path) -> bool:
    """A file to be copied: rows that are not already a run's."""
    if not path.name.endswith(SUFFIXES):
        return False
    if path.suffix != ".parquet":
        return True
    try:
        return not set(pq.read_schema(path).names) >= _OURS
    except (OSError, ValueError, pa.ArrowException):
        return False  # shown as a damaged file of rollouts


def groups_below(root: Path) -> list[Path]:
    """Folders below ``root`` that are one source each."""
    return list(dict.fromkeys(_source_of(file, root) for file in _files_below(root, _DEPTH)))


def _source_of(file: Path, root: Path) -> Path:
    """The folder that a file belongs to. Folders named after steps belong to their parent."""
    folder = file.parent
    while folder != root and (_STEP.fullmatch(folder.name) or folder.name == "rollouts"):
        folder = folder.parent
    return folder


def data_files(path: Path) -> list[Path]:
    """The files of one source, in the order of their steps and names."""
    if path.is_file():
        return [path]
    own = [f for f in _files_below(path, _DEPTH) if _source_of(f, path) == path]
    return sorted(own, key=lambda f: (step_in(f, path), str(f)))


def step_in(file: Path, root: Path) -> int:
    """The step that a file's name or folder below ``root`` gives; 0 where none does."""
    below = (
        file.relative_to(root.parent if root.is_file() else root)
        if file.is_relative_to(root)
        else Path(file.name)
    )
    for part in reversed(below.parts):
        if match := _STEP.search(part):
            return int(match.group(1))
    return 0


def _files_below(folder: Path, depth: int) -> Iterator[Path]:
    try:
        inside = sorted(folder.iterdir())
    except OSError:
        return
    for path in inside:
        if path.name.startswith(".") or path.name in _SKIPPED or path.name.endswith(".notes.jsonl"):
            continue
        if path.is_dir() and depth:
            yield from _files_below(path, depth - 1)
        elif path.is_file() and path.name.endswith(SUFFIXES):
            yield path


# -- reading -----------------------------------------------------------------------------------------------


def read_records(file: Path) -> Iterator[tuple[str, dict[str, Any] | ValueError]]:
    """Where each record stands, and the record, or why it is none. Raises what the reader raises at a damaged file."""
    if file.suffix == ".parquet":
        with pq.ParquetFile(file) as parquet:
            yield from _numbered(parquet.iter_batches(batch_size=500))
    elif file.suffix == ".arrow":
        with pa.memory_map(str(file)) as source:
            yield from _numbered(_arrow_batches(source))
    elif file.suffix == ".json":
        yield from _json_records(file)
    else:
        yield from _line_records(file)


def _numbered(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[str, dict[str, Any] | ValueError]]:
    number = 0
    for batch in batches:
        for record in batch.to_pylist():
            yield f"row {number}", record
            number += 1


def _arrow_batches(source: Any) -> Iterator[pa.RecordBatch]:
    """`datasets` writes the stream form; other tools the file form."""
    try:
        yield from pa.ipc.open_stream(source)
        return
    except pa.ArrowInvalid:
        source.seek(0)
    reader = pa.ipc.open_file(source)
    for i in range(reader.num_record_batches):
        yield reader.get_batch(i)


def _line_records(file: Path) -> Iterator[tuple[str, dict[str, Any] | ValueError]]:
    """A last line without an end may still be being written: it is not trouble."""
    with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                if line.endswith(b"\n"):
                    yield f"line {number}", ValueError(f"it is not JSON: {error}")
                continue
            yield f"line {number}", record if isinstance(record, dict) else ValueError("it is no JSON object")


def _json_records(file: Path) -> Iterator[tuple[str, dict[str, Any] | ValueError]]:
    """A list of objects, an object that holds one, or lines after all."""
    if file.stat().st_size > _LARGEST_JSON_BYTES:
        raise ValueError("it is larger than 1 GiB: JSON of that size is read as lines, from a .jsonl file")
    try:
        whole = json.loads(file.read_bytes())
    except ValueError as error:
        if "Extra data" not in str(error):
            raise ValueError(f"it is not JSON: {error}") from error
        yield from _line_records(file)
        return
    if isinstance(whole, dict):
        inside = [v for v in whole.values() if isinstance(v, list) and v and isinstance(v[0], dict)]
        whole = max(inside, key=len) if inside and not {"messages", "prompt"} & set(whole) else [whole]
    if not isinstance(whole, list):
        raise ValueError("it holds neither objects nor a list of them")
    for number, record in enumerate(whole):
        yield f"item {number}", record if isinstance(record, dict) else ValueError("it is no JSON object")


# -- writing -----------------------------------------------------------------------------------------------


def table_of(rows: list[dict[str, Any]]) -> pa.Table:
    """Rows as a table: our columns by their types, others by what their values are. What does not fit is null."""
    names = dict.fromkeys(name for row in rows for name in row)
    lower = Counter(name.lower() for name in names)
    arrays = {}
    for name in names:
        if name not in _COLUMNS and lower[name.lower()] > 1:
            continue  # columns of a table differ in more than case
        values = [row.get(name) for row in rows]
        kind = _COLUMNS.get(name) or _kind_of(values)
        arrays[name] = pa.array([_fitting(v, kind) for v in values], kind)
    return pa.table(arrays)


def _kind_of(values: list[Any]) -> pa.DataType:
    found = {type(v) for v in values if v is not None}
    if found == {bool}:
        return pa.bool_()
    return pa.float64() if found and found <= {int, float, bool} else pa.string()


def _fitting(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_string(kind):
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        return text.encode("utf-8", "replace").decode()
    if pa.types.is_boolean(kind):
        return bool(value)
    if pa.types.is_list(kind):
        inner = kind.value_type
        return value if pa.types.is_struct(inner) else [_fitting(v, inner) for v in value]
    if not isinstance(value, int | float):
        return None
    if pa.types.is_floating(kind):
        return _as_float(value)
    fits = math.isfinite(value) and -(2**31) <= value < (2**63 if kind == pa.int64() else 2**31)
    return int(value) if fits else None


def _as_float(value: float) -> float | None:
    try:
        return float(value)
    except OverflowError:
        return None


def check_file(path: Path) -> None:
    """Raises `UserError` where a file is not of a kind that can be opened."""
    if not path.name.endswith(SUFFIXES):
        raise UserError(f"{path.name} cannot be opened: it should end with one of {', '.join(SUFFIXES)}")
