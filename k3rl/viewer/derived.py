"""Columns that need a row's tokens, computed file by file with numpy."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from k3rl.viewer.columns import DERIVED

_READ = [
    "step",
    "draw",
    "content",
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
    """A table of ``rid`` and the derived columns. Raises what pyarrow raises where the file is damaged."""
    parts: list[pa.Table] = []
    with pq.ParquetFile(path) as parquet:
        there = set(parquet.schema_arrow.names)
        read = [name for name in _READ if name in there]
        for group in range(parquet.num_row_groups):
            rows = parquet.read_row_group(group, columns=read)
            calls = _repeated_calls(parquet, group, rows)
            parts.append(_derive(rows, calls, first_rid + sum(len(p) for p in parts)))
    return pa.concat_tables(parts) if parts else _table({"rid": []}, 0)


def _derive(rows: pa.Table, calls: list[int | None], first_rid: int) -> pa.Table:
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
            "repeated_calls": calls,
            "duplicates": _duplicates(rows),
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


def _duplicates(rows: pa.Table) -> list[int | None] | None:
    if not {"step", "draw", "content"} <= set(rows.column_names):
        return None
    keys = list(
        zip(rows["step"].to_pylist(), rows["draw"].to_pylist(), rows["content"].to_pylist(), strict=True)
    )
    counts = Counter(keys)
    return [counts[k] - 1 if k[2] else None for k in keys]


def _repeated_calls(parquet: pq.ParquetFile, group: int, rows: pa.Table) -> list[int | None]:
    """Calls are the runs of tokens in the tool-call channel: equal ids are equal calls, in any format."""
    found: list[int | None] = [None] * len(rows)
    if "turns" not in rows.column_names or "channels" not in parquet.schema_arrow.names:
        return found
    many = [i for i, t in enumerate(rows["turns"].to_pylist()) if t and t > 1]
    if not many:
        return found
    channels = parquet.read_row_group(group, columns=["channels"])["channels"]
    for i in many:
        found[i] = most_repeated(rows["response_ids"][i].as_py() or [], channels[i].as_py() or [])
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
