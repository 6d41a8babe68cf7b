"""A selection of rollouts as one file: parquet, JSON lines, CSV of what fits in a cell, or a folder for `datasets`.

Rows are written as they are read, some at a time: a selection may be a whole run, which no memory holds.
"""

from __future__ import annotations

import csv
import json
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from k3rl.errors import UserError
from k3rl.store import ROLLOUT_SCHEMA
from k3rl.viewer.derived import rows_at_once
from k3rl.viewer.index import Index

Format = Literal["parquet", "jsonl", "csv", "datasets"]
MEDIA = {
    "parquet": "application/vnd.apache.parquet",
    "jsonl": "application/jsonl",
    "csv": "text/csv",
    "datasets": "application/zip",
}
_ROWS = 1000


def write_selected(index: Index, rids: list[int], form: Format, folder: Path) -> Path:
    """A new file in ``folder`` with these rows in this order. Columns that a file lacks are null.

    Raises `UserError` where a file is damaged or has gone.
    """
    schema = _schema(index, rids)
    tables = selected(index, rids, schema)
    with tempfile.NamedTemporaryFile(dir=folder, suffix=f".{form}", delete=False) as file:
        path = Path(file.name)
    try:
        if form == "parquet":
            with pq.ParquetWriter(path, schema, compression="zstd") as parquet:
                for table in tables:
                    parquet.write_table(table)
        elif form == "datasets":
            _write_datasets(path, schema, tables)
        else:
            _write_lines(path, schema, tables, form)
    except BaseException:
        path.unlink()
        raise
    return path


def selected(index: Index, rids: list[int], schema: pa.Schema) -> Iterator[pa.Table]:
    """The rows in their order, some at a time."""
    for start in range(0, len(rids), _ROWS):
        places = _places(index, rids[start : start + _ROWS])
        parts: list[pa.Table] = []
        order: list[int] = []
        for file in dict.fromkeys(path for path, _ in places):
            chosen = sorted((row, i) for i, (path, row) in enumerate(places) if path == file)
            parts.append(_rows_of(file, [row for row, _ in chosen]))
            order += [i for _, i in chosen]
        whole = pa.concat_tables(parts, promote_options="permissive")
        back = sorted(range(len(order)), key=order.__getitem__)
        yield _as(whole.take(back), schema)


def _places(index: Index, rids: list[int]) -> list[tuple[Path, int]]:
    try:
        return [(file.path, row) for file, row in map(index.file_of, rids)]
    except StopIteration:
        raise UserError("a rollout's file has gone: the run was resumed from an earlier step") from None


def _schema(index: Index, rids: list[int]) -> pa.Schema:
    schemas = [_opened(file).schema_arrow for file in dict.fromkeys(path for path, _ in _places(index, rids))]
    return (
        pa.unify_schemas([s.remove_metadata() for s in schemas], promote_options="permissive")
        if schemas
        else ROLLOUT_SCHEMA
    )


def _rows_of(file: Path, rows: list[int]) -> pa.Table:
    """These rows of a file, in ascending order."""
    parts: list[pa.Table] = []
    start = 0
    try:
        with _opened(file) as parquet:
            for batch in parquet.iter_batches(batch_size=rows_at_once(parquet)):
                inside = [r - start for r in rows if start <= r < start + len(batch)]
                if inside:
                    parts.append(pa.Table.from_batches([batch]).take(inside))
                start += len(batch)
                if rows[-1] < start:
                    break
    except (OSError, ValueError, pa.ArrowException) as error:
        raise _unreadable(file, error) from error
    if sum(map(len, parts)) < len(rows):
        raise UserError(f"{file.name} has no such rows any more")
    return pa.concat_tables(parts)


def _opened(file: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> UserError:
    return UserError(f"{file.name} cannot be read: {str(error).splitlines()[0]}")


def _as(table: pa.Table, schema: pa.Schema) -> pa.Table:
    arrays = [
        table[f.name].cast(f.type) if f.name in table.column_names else pa.nulls(len(table), f.type)
        for f in schema
    ]
    return pa.table(arrays, schema=schema)


# -- formats -----------------------------------------------------------------------------------------------


def _write_lines(path: Path, schema: pa.Schema, tables: Iterator[pa.Table], form: str) -> None:
    names = [f.name for f in schema if not pa.types.is_list(f.type)]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        if form == "csv":
            writer.writerow(names)
        for table in tables:
            for row in _dicts(table if form == "jsonl" else table.select(names)):
                if form == "jsonl":
                    file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
                else:
                    writer.writerow([_cell(row[name]) for name in names])


def _write_datasets(path: Path, schema: pa.Schema, tables: Iterator[pa.Table]) -> None:
    """A zipped folder for `datasets.load_from_disk`."""
    from datasets import Dataset

    with tempfile.TemporaryDirectory(dir=path.parent) as name:
        folder = Path(name)
        with pq.ParquetWriter(folder / "rows.parquet", schema, compression="zstd") as parquet:
            for table in tables:
                parquet.write_table(table)
        found = Dataset.from_parquet(str(folder / "rows.parquet"), cache_dir=str(folder / "cache"))
        found.save_to_disk(folder / "rollouts")
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
            for file in sorted((folder / "rollouts").iterdir()):
                packed.write(file, f"rollouts/{file.name}")


def _dicts(table: pa.Table) -> Iterator[dict[str, Any]]:
    for batch in table.to_batches(max_chunksize=64):
        yield from batch.to_pylist()


def _cell(value: object) -> object:
    """Spreadsheets run what begins like a formula: a policy's text must stay text."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t") else value
