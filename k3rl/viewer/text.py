"""`k3rl view --text`: the same runs in a terminal, for people over ssh."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from k3rl.errors import UserError
from k3rl.viewer.metrics import metric_lines, readable
from k3rl.viewer.queries import Key, Selection
from k3rl.viewer.rollout import excerpts, rollout
from k3rl.viewer.session import Session

_STYLES = {"think": "dim", "tool_call": "cyan", "observation": "green", "structure": "magenta"}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def show_text(
    paths: list[Path],
    filter: str = "",
    sort: str = "",
    limit: int = 20,
    show: str = "",
    console: Console | None = None,
) -> None:
    """List runs and their rollouts; ``show`` (``[run:]step/draw.sample``): one rollout in full. Raises `UserError`."""
    console = console or Console(highlight=False, soft_wrap=bool(show), file=sys.stdout)
    session = Session(paths)
    try:
        session.read_all()
        if show:
            _show_one(console, session, _key(session, show))
            return
        _list_runs(console, session)
        selection = Selection((), filter, sort.removeprefix("-"), sort.startswith("-"))
        session.queries.search_seconds_s = float("inf")
        _list_rollouts(console, session, session.queries.page(selection, 0, limit))
    finally:
        session.__exit__(None, None, None)


def _list_runs(console: Console, session: Session) -> None:
    table = Table("run", "state", "steps", "rollouts", "reward", box=None, pad_edge=False)
    trouble: list[tuple[str, str, str]] = []
    counts = dict(
        session.index.cursor().execute("SELECT run, count(*) FROM rollouts GROUP BY run").fetchall()
    )
    for name, source in session.index.runs.items():
        status, broken = readable(source)
        lines = [] if any(b["file"] == "metrics.jsonl" for b in broken) else metric_lines(source)
        trouble += [(name, b["file"], b["reason"]) for b in broken]
        rewards = [line["reward/mean"] for line in lines if line.get("reward/mean") is not None]
        course = f"{rewards[0]:.3f} → {rewards[-1]:.3f}" if rewards else "-"
        steps = f"{status.get('steps_done', len(lines))}/{status.get('steps_asked', '?')}"
        table.add_row(*map(plain, (name, status.get("state", "-"), steps, str(counts.get(name, 0)), course)))
    console.print(table)
    trouble += [(run, path.name, reason) for path, (run, reason, _) in session.index.broken.items()]
    for run, file, reason in trouble:
        console.print(plain(f"{run}: {file} cannot be read: {reason}"), style="red")


def _list_rollouts(console: Console, session: Session, page: dict[str, Any]) -> None:
    several = len(session.index.runs) > 1
    names = ["rollout", "problem", "effort", "reward", "tokens", "ended", "fate", "answer"]
    table = Table(*names, box=None, pad_edge=False)
    table.columns[0].no_wrap = True
    table.columns[-1].overflow, table.columns[-1].no_wrap = "ellipsis", True
    said = excerpts(session.index, [int(r["rid"]) for r in page["rows"]], 200)
    for row in page["rows"]:
        name = f"{row['step']}/{row['draw']}.{row['sample']}"
        cells = [
            f"{row['run']}:{name}" if several else name,
            row["problem_id"],
            row["effort"],
            "-" if row["reward"] is None else f"{row['reward']:.3g}",
            row["sampled_tokens"],
            row["stop_reason"],
            row["fate"],
            said.get(row["rid"], {}).get("answer", ""),
        ]
        table.add_row(*(plain("-" if c is None else str(c)) for c in cells))
    console.print()
    console.print(table)
    shown = len(page["rows"])
    console.print(plain(f"\n{shown} of {page['total']} rollouts; --show STEP/DRAW.SAMPLE shows one in full"))


def _show_one(console: Console, session: Session, key: Key) -> None:
    rid = session.queries.find(key)
    row = session.queries.rows(session.index.cursor(), [rid])[0]
    whole = rollout(session.index, rid)
    console.rule(plain(f"{key.run}  step {key.step}  rollout {key.draw}.{key.sample}"))
    for name, value in row.items():
        if value not in (None, "") and name not in ("rid", "run", "step", "draw", "sample"):
            console.print(plain(f"{name:>20}  {value}"))
    console.rule("prompt")
    console.print(plain(whole["texts"]["prompt_text"]))
    console.rule("response")
    console.print(_response(whole))
    if whole["texts"]["reward_explanation"]:
        console.rule("reward")
        console.print(plain(whole["texts"]["reward_explanation"]))


def _response(whole: dict[str, Any]) -> Text:
    tokens = whole["tokens"]
    if not tokens["decoded"] or not tokens["channels"]:
        return plain(whole["texts"]["response_text"] or whole["texts"]["content"])
    text, version = Text(), None
    for i, piece in enumerate(tokens["text"]):
        found = tokens["policy_versions"][i] if tokens["policy_versions"] else None
        if found is not None and version is not None and found != version:
            text.append(f"⟦resumed by version {found}⟧", style="bold yellow")
        version = version if found is None else found
        text.append(_CONTROL.sub("�", piece), style=_STYLES.get(tokens["channels"][i], ""))
    return text


def _key(session: Session, show: str) -> Key:
    run, _, rest = show.rpartition(":")
    match = re.fullmatch(r"(\d+)/(\d+)\.(\d+)", rest)
    if match is None:
        raise UserError(f"--show {show}: a rollout is named [RUN:]STEP/DRAW.SAMPLE, such as 12/34.0")
    if not run and len(session.index.runs) != 1:
        raise UserError(f"--show {show}: there are several runs, say which: RUN:{rest}")
    step, draw, sample = map(int, match.groups())
    return Key(run or next(iter(session.index.runs)), step, draw, sample)


def plain(text: str) -> Text:
    """Text as it is: no markup, and no escape sequences for the terminal to obey."""
    return Text(_CONTROL.sub("�", text))
