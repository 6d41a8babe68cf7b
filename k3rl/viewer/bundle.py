"""A selection of rollouts as one HTML file that opens without a server, to send to somebody.

It holds texts, channels, rewards and numbers by token, with secrets redacted; no token ids (they would spell out again
what was redacted), no config, no paths. Its own policy lets nothing run but the one script that it came with.
"""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from k3rl.errors import UserError
from k3rl.store.files import replacing
from k3rl.viewer.queries import Queries, Selection
from k3rl.viewer.redact import Redactor
from k3rl.viewer.rollout import question_of, rollout
from k3rl.viewer.session import Session

MOST_ROLLOUTS = 2000
_NUMBERS = ("logprobs", "trainer_logprobs", "teacher_logprobs", "token_advantages")
_MOST_TOKENS_WITH_NUMBERS = 20_000
_LEFT_OUT = {"rid"}


def write_bundle(
    paths: list[Path], folder: Path, filter: str = "", sort: str = "", limit: int = 200
) -> tuple[Path, dict[str, Any]]:
    """``folder``/index.html, and what is in it: ``{rollouts, total, redacted, bytes}``. Raises `UserError`."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: --bundle names the folder to write into")
    session = Session(paths)
    try:
        session.read_all()
        session.queries.search_seconds_s = float("inf")
        selection = Selection((), filter, sort.removeprefix("-"), sort.startswith("-"))
        data, facts = bundled(session.queries, selection, limit)
    finally:
        session.__exit__(None, None, None)
    target = folder / "index.html"
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(target) as temporary:
        temporary.write_bytes(page(data))
    return target, facts | {"bytes": target.stat().st_size}


def bundled(queries: Queries, selection: Selection, limit: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The page's data and facts about it. Raises `UserError` where nothing is selected."""
    rids = queries.rids(selection, max(1, min(limit, MOST_ROLLOUTS)))
    if not rids:
        raise UserError("no rollouts are selected for the bundle")
    total = queries.page(selection, 0, 1)["total"]
    redactor = Redactor()
    rows = queries.rows(queries.index.cursor(), rids)
    entries = [_entry(row, rollout(queries.index, int(row["rid"])), redactor) for row in rows]
    data = {
        "runs": sorted({e["row"]["run"] for e in entries}),
        "filter": redactor.text(selection.filter),
        "total": total,
        "rollouts": entries,
    }
    data["redacted"] = redactor.count
    return data, {"rollouts": len(entries), "total": total, "redacted": redactor.count}


def _entry(row: dict[str, Any], whole: dict[str, Any], redactor: Redactor) -> dict[str, Any]:
    traces = redactor.everything(whole["traces"])
    entry = {
        "row": redactor.everything({k: v for k, v in row.items() if k not in _LEFT_OUT and v is not None}),
        "texts": redactor.everything({k: v for k, v in whole["texts"].items() if v}),
        "traces": {k: v for k, v in traces.items() if v and k != "sandbox"},
        "question": question_of(traces.get("messages")),
    }
    tokens = whole["tokens"]
    if tokens["decoded"] and tokens["channels"]:
        entry["tokens"] = _tokens(tokens, redactor)
    return entry


def _tokens(tokens: dict[str, Any], redactor: Redactor) -> dict[str, Any]:
    """Pieces with their channels as runs, and numbers where there are not too many tokens to send."""
    pieces = redactor.pieces(tokens["text"])
    runs: list[list[Any]] = []
    for channel, sampled in zip(
        tokens["channels"], tokens["sampled_mask"] or [True] * len(pieces), strict=True
    ):
        if runs and runs[-1][0] == channel and runs[-1][1] == bool(sampled):
            runs[-1][2] += 1
        else:
            runs.append([channel, bool(sampled), 1])
    found: dict[str, Any] = {"text": pieces, "runs": runs}
    if len(pieces) <= _MOST_TOKENS_WITH_NUMBERS:
        for name in _NUMBERS:
            if tokens[name]:
                found[name] = [round(v, 3) if isinstance(v, float) else None for v in tokens[name]]
    return found


def page(data: dict[str, Any]) -> bytes:
    """The whole file. Data cannot end its element: ``<`` is escaped, and it is no script to the browser."""
    folder = files("k3rl.viewer") / "bundled"
    html, script, style = ((folder / f"page.{end}").read_text("utf-8") for end in ("html", "js", "css"))
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    for name, content in (("SCRIPT", script), ("STYLE", style)):
        html = html.replace(f"%{name}_HASH%", _hash(content)).replace(f"%{name}%", content)
    return html.replace("%DATA%", text).encode("utf-8", "replace")


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
