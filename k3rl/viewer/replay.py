"""The server's side of re-scoring: which rewards people may ask for, and a process that scores."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k3rl.errors import UserError, nearest
from k3rl.viewer.queries import Queries, Selection
from rewards.registry import BUILT_IN

MOST_ROLLOUTS = 2000
LIMIT_S = 120.0
PROBLEMS_OWN = "problem"
_JUDGES = "rewards.grm"
_one_at_a_time = threading.Lock()


def allowed(extra: tuple[str, ...] = ()) -> list[str]:
    """Rewards that a browser may ask for: each problem's own, the built-in ones that call no model, and those that the
    viewer was started with. Any other name could load code or reach another machine."""
    built_in = [name for name, module in BUILT_IN.items() if not module.startswith(_JUDGES)]
    return [PROBLEMS_OWN, *sorted(built_in), *extra]


def job_of(
    queries: Queries, selection: Selection, reward: str, limit: int, most: int = MOST_ROLLOUTS, **more: Any
) -> dict[str, Any]:
    """A job for `k3rl.viewer.rescore`. Raises `UserError` where nothing is selected."""
    limit = max(1, min(limit, most))
    files: dict[str, list[tuple[int, int]]] = {}
    runs: dict[str, str] = {}
    rids = queries.rids(selection, limit)
    if not rids:
        raise UserError("no rollouts are selected to score")
    for row in queries.rows(queries.index.cursor(), rids):
        file, _ = queries.index.file_of(int(row["rid"]))
        files.setdefault(str(file.path), []).append((row["draw"], row["sample"]))
        runs[str(file.path)] = file.run
    return {"files": files, "runs": runs, "reward": reward, **more}


def replay(
    queries: Queries,
    selection: Selection,
    reward: str,
    arguments: Mapping[str, Any],
    *,
    limit: int = 200,
    text_only: bool = False,
    extra: tuple[str, ...] = (),
    modules: tuple[str, ...] = (),
    limit_s: float = LIMIT_S,
) -> dict[str, Any]:
    """What a reward says of a selection, scored in a process that is killed after ``limit_s``. Raises `UserError`."""
    known = allowed(extra)
    if reward not in known:
        raise UserError(f"the viewer was not started with --reward {reward}{nearest(reward, known)}")
    for name, value in arguments.items():
        if not isinstance(value, str | int | float | bool) and value is not None:
            raise UserError(f"the argument '{name}' should be a number, a word or true or false")
    job = job_of(
        queries,
        selection,
        reward,
        limit,
        arguments=dict(arguments),
        text_only=text_only,
        modules=list(modules),
    )
    if not _one_at_a_time.acquire(blocking=False):
        raise UserError("another re-scoring is going on; try again when it has ended")
    try:
        return _run(job, queries.index.folder, limit_s)
    finally:
        _one_at_a_time.release()


def _run(job: dict[str, Any], folder: Path, limit_s: float) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile("w", suffix=".json", dir=folder, encoding="utf-8") as file:
        json.dump(job, file)
        file.flush()
        command = [sys.executable, "-m", "k3rl.viewer.rescore", file.name]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            said, trouble = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the graders that it started
            process.communicate()
            raise UserError(
                f"scoring took longer than {limit_s:g} s and was stopped: select fewer rollouts"
            ) from None
    try:
        answer: dict[str, Any] = json.loads(said)
    except ValueError:
        last = (trouble.strip().splitlines() or ["it said nothing"])[-1]
        raise UserError(f"scoring broke off: {last}") from None
    if "error" in answer:
        raise UserError(answer["error"])
    return answer
