"""Columns that need a row's tokens, computed file by file with numpy."""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from k3rl.viewer.columns import DERIVED

_BATCH_BYTES = 64 << 20
_DECODED = 3
"""Tokens take some three times the bytes that the file says: dictionaries are spelt out."""
_READ = [
    "step",
    "turns",
    "prompt_ids",
    "response_ids",
    "logprobs",
    "trainer_logprobs",
    "teacher_logprobs",
    "policy_versions",
]
_TYPES = {"INTEGER": pa.int32(), "DOUBLE": pa.float64()}


def derived_columns(path: Path, first_rid: int) -> pa.Table:
    """A table of ``rid`` and the derived columns. Raises what pyarrow raises where the file is damaged.

    Tokens are read some rows at a time: a step of long rollouts is larger than the viewer's memory.
    """
    parts: list[pa.Table] = []
    with pq.ParquetFile(path) as parquet:
        there = set(parquet.schema_arrow.names)
        read = [name for name in _READ if name in there]
        if {"turns", "channels"} <= there and _has_turns(parquet):
            read.append("channels")
        duplicates = _duplicates(parquet, there)
        for batch in parquet.iter_batches(batch_size=rows_at_once(parquet), columns=read):
            rows = pa.Table.from_batches([batch])
            done = sum(len(p) for p in parts)
            own = None if duplicates is None else duplicates[done : done + len(rows)]
            parts.append(_derive(rows, own, first_rid + done))
    return pa.concat_tables(parts) if parts else _table({"rid": []}, 0)


def rows_at_once(parquet: pq.ParquetFile) -> int:
    """How many rows are some 64 MB, decoded."""
    file = parquet.metadata
    size = sum(file.row_group(i).total_byte_size for i in range(file.num_row_groups))
    return max(1, min(1024, _BATCH_BYTES * file.num_rows // max(1, size * _DECODED)))


def _has_turns(parquet: pq.ParquetFile) -> bool:
    turns = parquet.read(columns=["turns"])["turns"]
    return bool(pc.any(pc.greater(turns, 1)).as_py())


def _derive(rows: pa.Table, duplicates: list[int | None] | None, first_rid: int) -> pa.Table:
    engine, trainer = _column(rows, "logprobs"), _column(rows, "trainer_logprobs")
    gaps = _differences(trainer, engine, len(rows))
    teacher = _differences(engine, _column(rows, "teacher_logprobs"), len(rows))
    return _table(
        {
            "rid": np.arange(first_rid, first_rid + len(rows)),
            "prompt_tokens": _lengths(rows, "prompt_ids"),
            "response_tokens": _lengths(rows, "response_ids"),
            "logprob_gap_mean": [None if g is None else float(np.abs(g).mean()) for g in gaps],
            "logprob_gap_max": [None if g is None else float(np.abs(g).max()) for g in gaps],
            "teacher_kl": [None if g is None else float(g.mean()) for g in teacher],
            "versions": _versions(rows),
            "repeated_calls": _repeated_calls(rows),
            "duplicates": duplicates,
        },
        len(rows),
    )


def _table(values: dict[str, Any], count: int) -> pa.Table:
    arrays = {"rid": pa.array(values["rid"], pa.int64())}
    for column in DERIVED:
        given = values.get(column.name)
        arrays[column.name] = (
            pa.nulls(count, _TYPES[column.sql_type])
            if given is None
            else pa.array(given, _TYPES[column.sql_type], from_pandas=False)
        )
    return pa.table(arrays)


def _column(rows: pa.Table, name: str) -> pa.Array | None:
    """A list column in one piece; None where the file lacks it or it is empty throughout."""
    if name not in rows.column_names or rows[name].null_count == len(rows):
        return None
    found = rows[name].combine_chunks()
    return found.chunk(0) if isinstance(found, pa.ChunkedArray) else found


def _lengths(rows: pa.Table, name: str) -> pa.Array | None:
    found = _column(rows, name)
    return None if found is None else pc.list_value_length(found).cast(pa.int32())


def _numbers(lists: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Offsets, and all values with null as NaN."""
    values = lists.values.to_numpy(zero_copy_only=False).astype(np.float64)
    return lists.offsets.to_numpy(), values


def _differences(a: pa.Array | None, b: pa.Array | None, count: int) -> list[np.ndarray | None]:
    """By row: a − b where both have a number; None where no token has both."""
    if a is None or b is None:
        return [None] * count
    (starts_a, values_a), (starts_b, values_b) = _numbers(a), _numbers(b)
    found: list[np.ndarray | None] = []
    for i in range(len(a)):
        first = values_a[starts_a[i] : starts_a[i + 1]]
        second = values_b[starts_b[i] : starts_b[i + 1]]
        both = first - second if len(first) == len(second) else np.empty(0)
        both = both[~np.isnan(both)]
        found.append(both if len(both) else None)
    return found


def _versions(rows: pa.Table) -> list[int | None] | None:
    lists = _column(rows, "policy_versions")
    if lists is None:
        return None
    starts, values = _numbers(lists)
    found: list[int | None] = []
    for i in range(len(lists)):
        own = values[starts[i] : starts[i + 1]]
        own = own[~np.isnan(own)]
        found.append(len(np.unique(own)) if len(own) else None)
    return found


def _duplicates(parquet: pq.ParquetFile, there: set[str]) -> list[int | None] | None:
    """By row of the file: others of its group with the same answer. Groups are whole within a file, not within rows
    that are read together."""
    names = ["step", "draw", "content"]
    if not set(names) <= there:
        return None
    keys: list[tuple[Any, Any, bytes]] = []
    for batch in parquet.iter_batches(batch_size=1024, columns=names):
        for step, draw, content in zip(*(batch[n].to_pylist() for n in names), strict=True):
            keys.append((step, draw, blake2b(content.encode(), digest_size=12).digest() if content else b""))
    counts = Counter(keys)
    return [counts[k] - 1 if k[2] else None for k in keys]


def _repeated_calls(rows: pa.Table) -> list[int | None]:
    """Calls are the runs of tokens in the tool-call channel: equal ids are equal calls, in any format."""
    found: list[int | None] = [None] * len(rows)
    if "channels" not in rows.column_names or "response_ids" not in rows.column_names:
        return found
    for i, turns in enumerate(rows["turns"].to_pylist()):
        if turns and turns > 1:
            ids, channels = rows["response_ids"][i].as_py() or [], rows["channels"][i].as_py() or []
            found[i] = most_repeated(ids, channels) if len(ids) == len(channels) else None
    return found


def most_repeated(ids: list[int], channels: list[str]) -> int:
    calls: Counter[tuple[int, ...]] = Counter()
    current: list[int] = []
    for token, channel in zip(ids, channels, strict=True):
        if channel == "tool_call":
            current.append(token)
        elif current:
            calls[tuple(current)] += 1
            current = []
    if current:
        calls[tuple(current)] += 1
    return max(calls.values(), default=0)
