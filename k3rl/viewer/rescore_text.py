"""`k3rl rewards rescore`: what a changed reward says of stored rollouts, in the terminal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from k3rl.viewer.queries import Selection
from k3rl.viewer.replay import job_of
from k3rl.viewer.rescore import Job, rescore
from k3rl.viewer.session import Session
from k3rl.viewer.text import plain

_SHOWN = 10


def rescore_text(
    run: Path, reward: str, filter: str = "", limit: int = 1000, out: Path | None = None, **more: Any
) -> None:
    """Score the newest ``limit`` rollouts that the filter lets through. ``more``: fields of `Job`.

    Raises `UserError`.
    """
    session = Session([run])
    try:
        session.read_all()
        job = job_of(session.queries, Selection((), filter), reward, limit, most=limit, **more)
    finally:
        session.__exit__(None, None, None)
    answer = rescore(Job(**job))
    if out is not None:
        out.write_text(
            "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in answer["rows"]), encoding="utf-8"
        )
    show(Console(highlight=False, file=sys.stdout), answer)


def show(console: Console, answer: dict[str, Any]) -> None:
    """The summary, then the largest changes."""
    found = answer["summary"]
    console.print(
        plain(f"{found['replayed']} of {found['rollouts']} rollouts scored again by {answer['reward']}")
    )
    for reason, count in found["not_replayed"].items():
        console.print(plain(f"  {count} not: {reason}"))
    if found["mean_before"] is None:
        return
    means = f"mean before {found['mean_before']:.4g}, after {found['mean_after']:.4g}"
    console.print(
        plain(f"{means}; {found['changed']} changed; {found['other_best']} groups have another best sample")
    )
    changed = sorted((r for r in answer["rows"] if r["change"]), key=lambda r: -abs(r["change"]))
    if not changed:
        return
    table = Table(
        "rollout", "problem", "before", "after", "why before", "why after", box=None, pad_edge=False
    )
    for row in changed[:_SHOWN]:
        cells = [
            f"{row['step']}/{row['draw']}.{row['sample']}",
            row["problem_id"],
            f"{row['task_before']:.3g}",
            f"{row['after']:.3g}",
            row["explanation_before"],
            row["explanation_after"],
        ]
        table.add_row(*(plain(cell[:200]) for cell in cells))
    console.print()
    console.print(table)
