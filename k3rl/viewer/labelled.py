"""What people said of rollouts, as data: lines of notes, conversations for SFT, pairs for preference work.

A conversation is the problem's messages and the response by channel, as `k3rl` reads it for SFT and as other trainers
read it too. Rollouts of several turns are left out of conversations and counted, unless their messages were stored: the
text of tool results cannot be told back into messages exactly, and a guess would teach something that nobody said.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

from k3rl.errors import UserError
from k3rl.viewer.index import Index
from k3rl.viewer.queries import Queries, Selection
from k3rl.viewer.rollout import loaded, read_row

Form = Literal["notes", "sft", "preference"]
Row = dict[str, Any]
NOTED = "flag is not null or note is not null"
_MOST = 10_000
_TEXTS = ("messages_json", "reasoning", "content", "turns", "turns_json", "status")
_KEY = ("run", "step", "draw", "sample", "problem_id", "domain", "effort", "reward", "flag", "note")


def noted(queries: Queries, runs: list[str]) -> list[Row]:
    """The rows with a flag or a note, newest step first. Raises `UserError` beyond 10,000."""
    rids = queries.rids(Selection(tuple(runs), NOTED), _MOST + 1)
    if len(rids) > _MOST:
        raise UserError(f"more than {_MOST} rollouts carry notes; choose fewer runs")
    return queries.rows(queries.index.cursor(), rids)


def summary(queries: Queries, runs: list[str]) -> Row:
    """Rows with notes, and how many lines each form of export would have."""
    rows = noted(queries, runs)
    whole = list(_conversations(queries.index, rows))
    return {
        "rows": rows,
        "counts": {
            "notes": len(rows),
            "sft": sum(row["flag"] == "good" for row, _, _ in whole),
            "preference": sum(1 for _ in _pairs(whole)),
        },
        "left_out": sum(r["flag"] in ("good", "bad") for r in rows)
        - sum(row["flag"] in ("good", "bad") for row, _, _ in whole),
    }


def lines(queries: Queries, runs: list[str], form: Form) -> Iterator[str]:
    """JSON lines, each with its end of line.

    ``notes``: which rollout, flag and note. ``sft``: ``messages`` of every rollout flagged good. ``preference``:
    ``prompt``, ``chosen`` and ``rejected`` as messages, a line for each good and bad answer to the same messages.
    """
    rows = noted(queries, runs)
    found: Iterator[Row]
    if form == "notes":
        found = ({name: row[name] for name in _KEY} for row in rows)
    else:
        whole = list(_conversations(queries.index, rows))
        found = _sft(whole) if form == "sft" else _pairs(whole)
    return (json.dumps(line, ensure_ascii=False) + "\n" for line in found)


Conversation = tuple[Row, list[Row], list[Row]]
"""A row, the messages of its problem, the messages that followed."""


def _conversations(index: Index, rows: list[Row]) -> Iterator[Conversation]:
    """Those whose messages were stored, and which are of one turn or came with the messages of all."""
    for row in rows:
        if row["flag"] not in ("good", "bad"):
            continue
        file, at = index.file_of(int(row["rid"]))
        values = read_row(file.path, at, _TEXTS)
        messages = loaded(values.get("messages_json"))
        said = _said(values)
        if isinstance(messages, list) and said and values.get("status") != "failed":
            yield row, messages, said


def _said(values: Row) -> list[Row]:
    """The messages of a response; none where they cannot be told exactly."""
    turns = loaded(values.get("turns_json"))
    if isinstance(turns, list) and turns:
        return turns
    if (values.get("turns") or 1) > 1:
        return []
    message = {"role": "assistant", "content": values.get("content") or ""}
    if values.get("reasoning"):
        message["reasoning_content"] = values["reasoning"]
    return [message]


def _sft(whole: list[Conversation]) -> Iterator[Row]:
    for row, messages, said in whole:
        if row["flag"] == "good":
            yield {
                "id": _name(row),
                "messages": [*messages, *said],
                "effort": row["effort"],
                "note": row["note"],
            }


def _pairs(whole: list[Conversation]) -> Iterator[Row]:
    """The same messages on both sides, else the two answers do not compare."""
    by_prompt: dict[str, dict[str, list[Conversation]]] = {}
    for one in whole:
        sides = by_prompt.setdefault(json.dumps([one[1], one[0]["effort"]]), {"good": [], "bad": []})
        sides[one[0]["flag"]].append(one)
    for sides in by_prompt.values():
        for good, messages, chosen in sides["good"]:
            for bad, _, rejected in sides["bad"]:
                yield {
                    "id": f"{_name(good)} > {_name(bad)}",
                    "prompt": messages,
                    "chosen": chosen,
                    "rejected": rejected,
                    "effort": good["effort"],
                }


def _name(row: Row) -> str:
    return f"{row['run']}/{row['step']}/{row['draw']}.{row['sample']}"
