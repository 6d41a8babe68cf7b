"""A selection of rollouts as one file: parquet (which `datasets` loads), JSON lines, or CSV of what fits in a cell."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from k3rl.errors import UserError
from k3rl.store import ROLLOUT_SCHEMA
from k3rl.viewer.index import Index

Format = Literal["parquet", "jsonl", "csv"]
MEDIA = {"parquet": "application/vnd.apache.parquet", "jsonl": "application/jsonl", "csv": "text/csv"}


def selected(index: Index, rids: list[int]) -> pa.Table:
    """The rows with all their columns, in the order of ``rids``. Columns that a file lacks are null.

    Raises `UserError` where a file is damaged or has gone.
    """
    try:
        places = [index.file_of(rid) for rid in rids]
    except StopIteration:
        raise UserError("a rollout's file has gone: the run was resumed from an earlier step") from None
    parts: list[pa.Table] = []
    order: list[int] = []
    for file in dict.fromkeys(file.path for file, _ in places):
        chosen = [i for i, (f, _) in enumerate(places) if f.path == file]
        table = _read(file).take([places[i][1] for i in chosen])
        parts.append(table)
        order += chosen
    if not parts:
        return ROLLOUT_SCHEMA.empty_table()
    whole = pa.concat_tables(parts, promote_options="permissive")
    back = sorted(range(len(order)), key=order.__getitem__)
    return whole.take(back)


def _read(file: Path) -> pa.Table:
    try:
        return pq.read_table(file)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(f"{file.name} cannot be read: {str(error).splitlines()[0]}") from error


def encoded(table: pa.Table, form: Format) -> bytes:
    """The file's content."""
    if form == "parquet":
        sink = io.BytesIO()
        pq.write_table(table, sink, compression="zstd")
        return sink.getvalue()
    if form == "jsonl":
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in table.to_pylist()).encode()
    names = [f.name for f in table.schema if not pa.types.is_list(f.type)]
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(names)
    writer.writerows([_cell(row[name]) for name in names] for row in _rows(table.select(names)))
    return text.getvalue().encode()


def _rows(table: pa.Table) -> Iterator[dict[str, object]]:
    for batch in table.to_batches():
        yield from batch.to_pylist()


def _cell(value: object) -> object:
    """Spreadsheets run what begins like a formula: a policy's text must stay text."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t") else value
