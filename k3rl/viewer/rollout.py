"""One rollout with everything there is to know of it, read from its own parquet row.

Tokens travel by column, aligned to the response ids. Their text comes from the run's tokenizer; without one the ids
stand for themselves. A character that takes several tokens is the first one's, and the others' text is empty.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from k3rl.chat import Renderer
from k3rl.errors import UserError
from k3rl.viewer.columns import TEXTS
from k3rl.viewer.derived import rows_at_once
from k3rl.viewer.index import Index, RolloutFile, as_json
from k3rl.viewer.tokenizer import tokenizer_of
from k3rl.viewer.turns import special_ids, tool_calls

_TOKEN_COLUMNS = (
    "sampled_mask",
    "channels",
    "logprobs",
    "policy_versions",
    "trainer_logprobs",
    "teacher_logprobs",
    "token_advantages",
)
_FLOATS = {"logprobs", "trainer_logprobs", "teacher_logprobs", "token_advantages"}
_JSON_COLUMNS = ("messages_json", "timings_json", "judge_trace_json", "sandbox_json", "turns_json")
_TEXT_COLUMNS = ("prompt_text", "response_text", "reasoning", "content", "reward_explanation")
_LONGEST_CHARACTER = 4


def read_row(file: Path, row: int, columns: Iterable[str] | None = None) -> dict[str, Any]:
    """A row as Python values; only its row group is read, and of a large one some rows at a time.

    Raises `UserError` where the file is damaged or gone.
    """
    try:
        with pq.ParquetFile(file) as parquet:
            wanted = None if columns is None else [c for c in columns if c in parquet.schema_arrow.names]
            for group in range(parquet.num_row_groups):
                count = parquet.metadata.row_group(group).num_rows
                if row < count:
                    for batch in parquet.iter_batches(
                        rows_at_once(parquet), [group], wanted, use_threads=False
                    ):
                        if row < len(batch):
                            return {name: batch[name][row].as_py() for name in batch.schema.names}
                        row -= len(batch)
                row -= count
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(f"{file.name} cannot be read: {str(error).splitlines()[0]}") from error
    raise UserError(f"{file.name} has no such row any more")


def rollout(index: Index, rid: int) -> dict[str, Any]:
    """Texts, traces and tokens of a row."""
    try:
        file, row = index.file_of(rid)
    except StopIteration:
        raise UserError("the rollout's file has gone: the run was resumed from an earlier step") from None
    values = read_row(file.path, row)
    return {
        "file": file.path.name,
        "row": row,
        "texts": {name: values.get(name) or "" for name in _TEXT_COLUMNS},
        "traces": {name.removesuffix("_json"): as_json(loaded(values.get(name))) for name in _JSON_COLUMNS},
        "tokens": tokens(values, tokenizer(index, file)),
        "extra": as_json({k: v for k, v in values.items() if k in index.extra or _is_unknown(k, v, index)}),
    }


def group(index: Index, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with their texts and messages, without tokens: samples of a group are read side by side."""
    by_file: dict[RolloutFile, list[tuple[int, int]]] = {}
    for row in rows:
        rid = int(row["rid"])
        file, at = index.file_of(rid)
        by_file.setdefault(file, []).append((rid, at))
    found: dict[int, dict[str, Any]] = {}
    for file, places in by_file.items():
        read = dict(_some_rows(file.path, places, (*_TEXT_COLUMNS, "messages_json")))
        if len(read) < len(
            places
        ):  # it was cut since it was listed: say so, rather than show samples without text
            read_row(file.path, places[0][1])
            raise UserError(f"{file.path.name} has no such rows any more")
        found |= read
    samples = []
    for row in rows:
        values = found.get(int(row["rid"]), {})
        texts = {name: values.get(name) or "" for name in _TEXT_COLUMNS}
        messages = loaded(values.get("messages_json"))
        samples.append({"row": row, "texts": texts, "traces": {"messages": messages}})
    return samples


def tokens(values: dict[str, Any], renderer: Renderer | None) -> dict[str, Any]:
    """Per-token columns as lists as long as the response; null where a token has no number or the run has none.

    Numbers are rounded to 1e-7, which is what 32 bits hold of a log-prob. ``special``: ids that are structure
    tokens. ``calls``: tool calls by the first token of their turn.
    """
    ids, prompt = values.get("response_ids") or [], values.get("prompt_ids") or []
    out: dict[str, Any] = {"ids": ids, "prompt_ids": prompt, "decoded": renderer is not None}
    for name in _TOKEN_COLUMNS:
        column = values.get(name)
        if column is not None and len(column) != len(ids):
            raise UserError(f"the row's '{name}' has {len(column)} values for {len(ids)} tokens")
        out[name] = _numbers(column) if name in _FLOATS else column
    pieces = Pieces(renderer)
    out["text"] = pieces.of(ids)
    out["prompt_pieces"] = pieces.of(prompt)
    out["special"] = special_ids(renderer, [*ids, *prompt])
    out["calls"] = as_json(tool_calls(renderer, values))
    return out


def _numbers(column: list[float | None] | None) -> list[Any] | None:
    """As JSON, and short: a rollout of 100,000 tokens has 400,000 of them."""
    if column is None:
        return None
    values = np.array(column, dtype=np.float64)
    found: list[Any] = np.round(values, 7).tolist()
    for i in np.flatnonzero(~np.isfinite(values)):
        found[i] = as_json(column[i])
    return found


class Pieces:
    """Text by token. Ids that are not in the vocabulary are shown as such."""

    def __init__(self, renderer: Renderer | None) -> None:
        self._renderer = renderer
        self._known: dict[tuple[int, ...], str] = {}

    def of(self, ids: list[int]) -> list[str]:
        if self._renderer is None:
            return [f"⟨{i}⟩" for i in ids]
        one = {i: self._decoded((i,)) for i in set(ids)}
        found = [one[i] for i in ids]
        at = 0
        while at < len(ids):
            if "\ufffd" in found[at]:
                for length in range(2, _LONGEST_CHARACTER + 1):
                    whole = self._decoded(tuple(ids[at : at + length]))
                    if "\ufffd" not in whole:
                        found[at : at + length] = [whole, *[""] * (min(length, len(ids) - at) - 1)]
                        at += length - 1
                        break
            at += 1
        return found

    def _decoded(self, ids: tuple[int, ...]) -> str:
        if ids not in self._known:
            self._known[ids] = self._decode(list(ids))
        return self._known[ids]

    def _decode(self, ids: list[int]) -> str:
        try:
            return self._renderer.decode(ids) if self._renderer else ""
        except (UserError, KeyError, IndexError, ValueError, OverflowError):
            return "".join(f"⟨{i}⟩" for i in ids)


def tokenizer(index: Index, file: RolloutFile) -> Renderer | None:
    """The tokenizer of the run that a file belongs to; None where there is none."""
    source = index.runs.get(file.run)
    return None if source is None else tokenizer_of(source)


def excerpts(index: Index, rids: list[int], length: int = 160) -> dict[str, dict[str, str]]:
    """The beginning of each row's question and answer, by rid as text."""
    found: dict[str, dict[str, str]] = {}
    by_file: dict[RolloutFile, list[tuple[int, int]]] = {}
    for rid in rids:
        try:
            file, row = index.file_of(rid)
        except StopIteration:
            continue
        by_file.setdefault(file, []).append((rid, row))
    for file, rows in by_file.items():
        for rid, values in _some_rows(file.path, rows, ("content", "response_text", "messages_json")):
            answer = values.get("content") or values.get("response_text") or ""
            found[str(rid)] = {
                "question": _short(question_of(loaded(values.get("messages_json"))), length),
                "answer": _short(answer, length),
            }
    return found


def _some_rows(
    file: Path, rows: list[tuple[int, int]], columns: tuple[str, ...]
) -> list[tuple[int, dict[str, Any]]]:
    """Each row group is read once."""
    out = []
    try:
        with pq.ParquetFile(file) as parquet:
            names = [c for c in columns if c in parquet.schema_arrow.names]
            start = 0
            for group in range(parquet.num_row_groups):
                count = parquet.metadata.row_group(group).num_rows
                inside = [(rid, row - start) for rid, row in rows if start <= row < start + count]
                if inside:
                    table = parquet.read_row_group(group, columns=names, use_threads=False)
                    out += [(rid, {n: table[n][row].as_py() for n in names}) for rid, row in inside]
                start += count
    except (OSError, ValueError, pa.ArrowException):
        return []  # the page says so by the index's list of broken files
    return out


def question_of(messages: Any) -> str:
    """The last user message as text."""
    for message in reversed(messages if isinstance(messages, list) else []):
        if isinstance(message, dict) and message.get("role") == "user":
            content = message.get("content")
            if isinstance(content, list):
                return " ".join(str(p.get("text", "")) for p in content if isinstance(p, dict))
            return str(content or "")
    return ""


def _short(text: str, length: int) -> str:
    flat = " ".join(text[: 4 * length].split())
    return flat if len(flat) <= length else f"{flat[: length - 1]}…"


def loaded(text: str | None) -> Any:
    """JSON that was stored as text; what cannot be read is shown as it is."""
    if not text:
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text


def _is_unknown(name: str, value: Any, index: Index) -> bool:
    known = set(index.columns) | {c.name for c in TEXTS} | set(_TOKEN_COLUMNS) | set(_JSON_COLUMNS)
    return name not in known | {"prompt_ids", "response_ids"} and value is not None
