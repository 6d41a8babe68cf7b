"""Stored rollouts scored again by a changed reward, without the model: before and after, side by side.

What a file does not hold cannot be replayed: the state of an environment or sandbox, a problem that the data has lost.
A reward that may look at such things gives no value for these rollouts, but the reason; nothing is guessed.

This module imports what grades, so the server runs it in a process of its own (`python -m k3rl.viewer.rescore JOB`).
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from k3rl.config.rewards import PROBLEM, RewardConfig, RewardPart
from k3rl.errors import UserError
from k3rl.types import Author, Channel, Outcome, Status
from rewards.api import RewardFunction, Scored, Verdict
from rewards.calls import call_reward
from rewards.isolation.pool import IsolatedPool
from rewards.registry import BUILT_IN, get_reward, is_remote, load_modules
from rewards.stored import StoredGroup, read_groups
from rewards.worker import arguments_of

SAME = 1e-9


@dataclass(frozen=True, slots=True)
class Job:
    """``files``: (draw, sample) of the rollouts to score, by parquet file; ``runs``: the run of each file.

    ``text_only``: the reward is said to read nothing but the text, so that lost sandboxes do not matter.
    """

    files: dict[str, list[tuple[int, int]]]
    runs: dict[str, str]
    reward: str
    arguments: dict[str, Any] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    text_only: bool = False
    timeout_s: float = 10.0
    processes: int = 1


@dataclass(slots=True)
class Row:
    """``before``: what the store says; ``task_before`` is the stored value that compares with a reward's: the total
    before a length rule replaced it. ``reason``: why there is no new value."""

    run: str
    step: int
    draw: int
    sample: int
    problem_id: str
    before: float | None
    task_before: float | None
    components_before: dict[str, float]
    explanation_before: str
    after: float | None = None
    components_after: dict[str, float] = field(default_factory=dict)
    explanation_after: str = ""
    outcome: str = ""
    replayed: bool = False
    reason: str = ""

    @property
    def change(self) -> float | None:
        return None if self.after is None or self.task_before is None else self.after - self.task_before


def rescore(job: Job) -> dict[str, Any]:
    """Rows in the order of files, draws and samples, and what came of them.

    Raises `UserError` where the reward does not exist or a file holds no rollouts of a run.
    """
    load_modules(job.modules)
    config = RewardConfig(processes=job.processes, timeout_s=job.timeout_s, modules=job.modules, retries=0)
    if job.reward != PROBLEM:
        get_reward(job.reward)  # a wrong name is said before anything is read
    pool = IsolatedPool(config.processes, config.memory_mb, config.retries, config.modules, config.sandbox)
    rows: list[Row] = []
    try:
        for name, keys in job.files.items():
            file, wanted = Path(name), {(d, s) for d, s in keys}
            boxed = _with_sandbox(file)
            for group in _groups(file):
                if any((v.trajectory.draw, v.trajectory.sample) in wanted for v in group.views):
                    rows += _score(job, config, pool, group, wanted, boxed, job.runs[name])
    finally:
        pool.close()
    return {
        "reward": job.reward,
        "summary": summary(rows),
        "rows": [asdict(r) | {"change": r.change} for r in rows],
    }


def summary(rows: list[Row]) -> dict[str, Any]:
    """Counts and means over the rows that have both values; the groups whose best sample is another one now."""
    both = [(r.task_before, r.after) for r in rows if r.after is not None and r.task_before is not None]
    groups: dict[tuple[str, int, int], list[Row]] = defaultdict(list)
    for row in rows:
        if row.change is not None:
            groups[row.run, row.step, row.draw].append(row)
    return {
        "rollouts": len(rows),
        "replayed": sum(r.replayed for r in rows),
        "scored": sum(r.after is not None for r in rows),
        "not_replayed": dict(Counter(r.reason for r in rows if not r.replayed)),
        "mean_before": statistics.fmean(b for b, _ in both) if both else None,
        "mean_after": statistics.fmean(a for _, a in both) if both else None,
        "changed": sum(abs(a - b) > SAME for b, a in both),
        "other_best": sum(
            _best(g, "task_before") != _best(g, "after") for g in groups.values() if len(g) > 1
        ),
    }


def _best(group: list[Row], name: str) -> set[int]:
    values = {r.sample: getattr(r, name) for r in group}
    return {s for s, v in values.items() if v > max(values.values()) - SAME}


def _groups(file: Path) -> Iterator[StoredGroup]:
    """With what the data says of each problem where it still does; else with what the rows hold of it."""
    try:
        yield from list(read_groups(file))
    except UserError:
        yield from read_groups(file, problems=False)


def _with_sandbox(file: Path) -> set[tuple[int, int]]:
    """Rollouts that had a sandbox. Its state has not been stored."""
    columns = ["draw", "sample", "sandbox_json"]
    if not set(columns) <= set(pq.read_schema(file).names):
        return set()
    rows = pq.read_table(file, columns=columns).to_pylist()
    return {(r["draw"], r["sample"]) for r in rows if r["sandbox_json"]}


def _score(
    job: Job,
    config: RewardConfig,
    pool: IsolatedPool,
    group: StoredGroup,
    wanted: set[tuple[int, int]],
    boxed: set[tuple[int, int]],
    run: str,
) -> list[Row]:
    rows = {v.trajectory.sample: _row(run, group, i) for i, v in enumerate(group.views)}
    asked = {s for s in rows if (group.views[0].trajectory.draw, s) in wanted}
    function, bound, trouble = _reward(job, group)
    for view in group.views:
        row = rows[view.trajectory.sample]
        row.reason = trouble or _lost(function, view, boxed, job.text_only)
    together = function is not None and function.scope == "group"
    if together and any(rows[v.trajectory.sample].reason for v in _not_failed(group)):
        for row in rows.values():
            row.reason = row.reason or "the reward compares it with samples that cannot be replayed"
    views = [v for v in _not_failed(group) if not rows[v.trajectory.sample].reason]
    if not together:
        views = [v for v in views if v.trajectory.sample in asked]
    if function is not None and views:
        limit_s = function.timeout_s or config.timeout_s
        for view, verdict in zip(views, _verdicts(pool, function, views, bound, limit_s), strict=True):
            _enter(rows[view.trajectory.sample], verdict)
    return [rows[s] for s in sorted(asked)]


def _not_failed(group: StoredGroup) -> list[Scored]:
    return [v for v in group.views if v.trajectory.status is not Status.FAILED]


def _reward(job: Job, group: StoredGroup) -> tuple[RewardFunction | None, dict[str, Any], str]:
    """The function and its arguments for this problem, or why there are none."""
    part = RewardPart(reward=job.reward, arguments=job.arguments)
    name, given = arguments_of(part, group.problem)
    if not name:
        return None, {}, "the data does not say any more what the problem's reward is"
    try:
        function = get_reward(name)
        return function, function.bind(given, f"problem '{group.problem.id}'"), ""
    except UserError as error:
        return None, {}, str(error)


def _lost(function: RewardFunction | None, view: Scored, boxed: set[tuple[int, int]], text_only: bool) -> str:
    """Why a rollout cannot be replayed by this reward; empty where it can."""
    t = view.trajectory
    if t.status is Status.FAILED:
        return "the rollout failed: it is not graded"
    if function is None or function.depends != "trajectory" or text_only:
        return ""
    if (t.draw, t.sample) in boxed:
        return "it had a sandbox, whose state is lost, and the reward may look at it"
    spoke = any(s.author is Author.ENVIRONMENT and s.channel is Channel.OBSERVATION for s in t.segments)
    return "its environment's state is lost, and the reward may look at it" if spoke else ""


def _verdicts(
    pool: IsolatedPool, function: RewardFunction, views: list[Scored], bound: dict[str, Any], limit_s: float
) -> list[Verdict]:
    if (function.trusted and not function.sandbox) or is_remote(function.name):
        return [v for some in call_reward(function, views, bound, limit_s) for v in some]
    if function.name in BUILT_IN:
        pool.preload(BUILT_IN[function.name])
    return pool.run(function, views, bound, limit_s)


def _row(run: str, group: StoredGroup, i: int) -> Row:
    t, stored = group.views[i].trajectory, group.rewards[i]
    return Row(
        run=run,
        step=group.step,
        draw=t.draw,
        sample=t.sample,
        problem_id=t.problem_id,
        before=stored.total,
        task_before=stored.components.get("task", stored.total) if stored.total is not None else None,
        components_before=stored.components,
        explanation_before=stored.explanation,
    )


def _enter(row: Row, verdict: Verdict) -> None:
    row.outcome, row.explanation_after = str(verdict.outcome), verdict.explanation
    row.replayed = verdict.outcome is Outcome.SCORED
    if verdict.score is not None and math.isfinite(verdict.score.value):
        row.after, row.components_after = verdict.score.value, verdict.score.components
    if not row.replayed:
        row.reason = f"{verdict.outcome}: {verdict.explanation}"[:500]


def main(path: str) -> None:
    """Read a job from a file and write the answer, or ``{"error": sentence}``, to standard output."""
    given = json.loads(Path(path).read_text(encoding="utf-8"))
    try:
        answer = rescore(Job(**given | {"modules": tuple(given.get("modules", ()))}))
    except UserError as error:
        answer = {"error": str(error)}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1])
