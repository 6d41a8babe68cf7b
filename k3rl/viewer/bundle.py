"""A selection of rollouts as one HTML file that opens without a server, to send to somebody.

It is the viewer's own page with its modules in one script and the server's answers beside it, secrets redacted. Ids of
redacted tokens go too, for they would spell them out again; configs and paths are not in it. Its own policy lets
nothing run but that script.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from k3rl.errors import UserError
from k3rl.store.files import replacing
from k3rl.viewer import metrics
from k3rl.viewer.cells import cells
from k3rl.viewer.index import Index, as_json
from k3rl.viewer.queries import Queries, Selection
from k3rl.viewer.redact import Redactor
from k3rl.viewer.rollout import excerpts, rollout
from k3rl.viewer.session import Session

MOST_ROLLOUTS = 2000
MOST_STEPS = 200
"""In the table by step."""


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
    index, redactor = queries.index, Redactor()
    total = queries.page(selection, 0, 1)["total"]
    rows = queries.rows(index.cursor(), rids)
    runs = list(dict.fromkeys(row["run"] for row in rows))
    data = {
        "rollouts": [_redacted(rollout(index, int(row["rid"])) | {"row": row}, redactor) for row in rows],
        "excerpts": redactor.everything(excerpts(index, rids)),
        "answers": [
            ("state", {}, _state(rows, runs)),
            ("columns", {}, redactor.everything(metrics.columns(index))),
            *(answer for run in runs for answer in _by_step(index, run, redactor)),
        ],
    }
    return data, {"rollouts": len(rows), "total": total, "redacted": redactor.count}


def _redacted(whole: dict[str, Any], redactor: Redactor) -> dict[str, Any]:
    tokens = whole.pop("tokens")
    traces = {k: v for k, v in whole.pop("traces").items() if k != "sandbox"}
    found = redactor.everything({**whole, "traces": traces})
    for ids, pieces in (("ids", "text"), ("prompt_ids", "prompt_pieces")):
        kept = redactor.pieces(tokens[pieces])
        tokens[ids] = [i if a == b else -1 for i, a, b in zip(tokens[ids], kept, tokens[pieces], strict=True)]
        tokens[pieces] = kept
    if not tokens["decoded"]:  # nobody can tell what the ids say
        tokens |= {name: [] if isinstance(v, list) else v for name, v in tokens.items()}
    tokens["calls"] = redactor.everything(tokens.get("calls"))
    return found | {"tokens": tokens}


def _state(rows: list[dict[str, Any]], runs: list[str]) -> dict[str, Any]:
    """As of runs that have ended, of which there is no more than this."""

    def facts(run: str) -> dict[str, Any]:
        own = [row["step"] for row in rows if row["run"] == run]
        known = {"rollouts": len(own), "steps": len(set(own)), "last_step": max(own)}
        return {"name": run, "state": "", "reason": "", "metrics": True, "broken": [], **known}

    return {
        "version": 1,
        "runs": [facts(run) for run in runs],
        "trouble": "",
        "reading": {"done": 1, "total": 1, "derived": 1},
    }


def _by_step(index: Index, run: str, redactor: Redactor) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """A run's charts and its table of domain x effort, over all its rollouts: as (path, parameters, answer).

    Steps of the table are the newest `MOST_STEPS`; only the answer for the whole run lists them.
    """
    names = metrics.series(index, [run], [])["names"]
    yield "metrics", {"run": run}, as_json(metrics.series(index, [run], names) if names else {"series": {}})
    for by in ("", "domain", "effort"):
        yield "steps", {"run": run, "by": by}, redactor.everything(as_json(metrics.steps(index, [run], by)))
    whole = as_json(cells(index, run, whole=True))
    steps = whole["steps"][-MOST_STEPS:]
    yield "cells", {"run": run, "whole": "true"}, redactor.everything(whole | {"steps": steps})
    for step in steps:
        found = as_json(cells(index, run, step)) | {"steps": []}
        yield "cells", {"run": run, "step": step}, redactor.everything(found)


# -- the page ----------------------------------------------------------------------------------------------


def page(data: dict[str, Any]) -> bytes:
    """The whole file. Data cannot end its element: ``<`` is escaped, and it is no script to the browser."""
    text = json.dumps(as_json(data), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    script, style = one_script("app.js"), _static("style.css")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>k3rl view</title>\n<style>{style}</style>\n</head>\n<body>",
        "<noscript>This file shows its rollouts with a script of its own.</noscript>",
        f'<script type="application/json" id="bundle">{text}</script>',
        f"<script>{script}</script>\n</body>\n</html>\n",
    ]
    return "\n".join(parts).encode("utf-8", "replace")


_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w.-]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function|const|class) (\w+))", re.MULTILINE)


def one_script(entry: str) -> str:
    """A module and all that it imports as one plain script: each a function that returns what it exports.

    Browsers load no modules from files. Raises `ValueError` where a module is written in a way that this cannot join.
    """
    order: list[str] = []
    _visit(entry, [], order)
    return '"use strict";\n' + "\n".join(_as_function(name) for name in order)


def _visit(name: str, above: list[str], order: list[str]) -> None:
    if name in above:
        raise ValueError(f"modules import each other: {' → '.join([*above, name])}")
    if name in order:
        return
    for _, other in _IMPORT.findall(_static(name)):
        _visit(other, [*above, name], order)
    order.append(name)


def _as_function(name: str) -> str:
    source = _static(name)
    exported = [found for _, found in _EXPORT.findall(source)]
    body = _IMPORT.sub(lambda m: f"const {{{m[1].replace(' as ', ': ')}}} = {_variable(m[2])};\n", source)
    body = _EXPORT.sub(r"\1", body)
    if re.search(r"^(?:import|export)\b|\bimport\(|</script", body, re.MULTILINE):
        raise ValueError(f"{name} holds an import or export that a bundle cannot join")
    return f"const {_variable(name)} = (() => {{\n{body}\nreturn {{{', '.join(exported)}}};\n}})();"


def _variable(name: str) -> str:
    return "$" + re.sub(r"\W", "_", name)


def _static(name: str) -> str:
    return (files("k3rl.viewer") / "static" / name).read_text("utf-8")


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
