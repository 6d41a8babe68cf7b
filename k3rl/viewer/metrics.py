"""Runs as a whole: their state, their metrics, per-step numbers from their rollouts, their configs."""

from __future__ import annotations

import functools
from typing import Any

from k3rl.errors import UserError
from k3rl.store.files import read_lines
from k3rl.store.run import _flatten
from k3rl.viewer.columns import quoted
from k3rl.viewer.index import Index
from k3rl.viewer.session import Session
from k3rl.viewer.sources import Source

_MOST_POINTS = 2000
_MOST_VALUES = 40


def state(session: Session) -> dict[str, Any]:
    """Runs, what could not be read and why, and how far reading is. Asked every second or two."""
    index = session.index
    counts = {
        run: {"rollouts": n, "steps": steps, "last": last}
        for run, n, steps, last in index.cursor()
        .execute("SELECT run, count(*), count(DISTINCT step), max(step) FROM rollouts GROUP BY run")
        .fetchall()
    }
    runs = [_run_state(index, source, counts.get(name, {})) for name, source in index.runs.items()]
    p = index.progress
    return {
        "version": index.version,
        "runs": runs,
        "trouble": session.trouble,
        "reading": {"done": p.done, "total": p.total, "derived": p.derived},
    }


def _run_state(index: Index, source: Source, counts: dict[str, Any]) -> dict[str, Any]:
    broken = [
        {"file": p.name, "reason": reason}
        for p, (run, reason, _) in index.broken.items()
        if run == source.name
    ]
    status, damaged_files = readable(source)
    broken += damaged_files
    if damaged := index.notes.damaged.get(source.name):
        broken.append({"file": source.notes_file.name, "reason": f"{damaged} lines cannot be read"})
    recorded = last_step(source)
    last = counts.get("last")
    return {
        "name": source.name,
        "state": status.get("state", ""),
        "reason": status.get("reason", ""),
        "steps_done": status.get("steps_done"),
        "steps_asked": status.get("steps_asked"),
        "rollouts": counts.get("rollouts", 0),
        "steps": counts.get("steps", 0),
        "last_step": last,
        # its rollouts are whole, its metrics are not there yet
        "unrecorded_step": last if recorded is not None and last is not None and last > recorded else None,
        "metrics": recorded is not None,
        "broken": broken,
    }


def readable(source: Source) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """A run's status, and which of the files beside its rollouts cannot be read, and why."""
    status: dict[str, Any] = {}
    broken = []
    metrics = functools.partial(metric_lines, source)
    for file, read in (
        ("status.json", source.status),
        ("config.yaml", source.config),
        ("metrics.jsonl", metrics),
    ):
        try:
            found = read()
        except UserError as error:
            broken.append({"file": file, "reason": str(error).partition(": ")[2]})
        else:
            status = found if file == "status.json" and isinstance(found, dict) else status
    return status, broken


_metric_cache: dict[Any, tuple[tuple[int, int], list[dict[str, Any]]]] = {}


def metric_lines(source: Source) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl; read again when the file has changed."""
    file = source.path / "metrics.jsonl"
    if not file.is_file():
        return []
    stat = file.stat()
    stamp = (stat.st_size, stat.st_mtime_ns)
    if _metric_cache.get(file, ((0, 0), []))[0] != stamp:
        try:
            lines = [line for line in read_lines(file) if isinstance(line, dict) and "step" in line]
            _metric_cache[file] = (stamp, lines)
        except ValueError as error:
            raise UserError(f"{file.name} of '{source.name}' is damaged: {error}") from error
    return _metric_cache[file][1]


def last_step(source: Source) -> int | None:
    try:
        lines = metric_lines(source)
    except UserError:
        return None
    return lines[-1].get("step") if lines else None


def series(index: Index, runs: list[str], names: list[str]) -> dict[str, Any]:
    """Without names: all metrics' names. With: their values by run, thinned to a screen's worth of points."""
    chosen = {run: metric_lines(_source(index, run)) for run in runs}
    if not names:
        every = sorted({n for lines in chosen.values() for line in lines for n in line if n != "step"})
        return {"names": every}
    found: dict[str, Any] = {}
    for name in names:
        found[name] = {}
        for run, lines in chosen.items():
            points = [(line["step"], line[name]) for line in lines if name in line]
            if points:
                points = thinned(points, _MOST_POINTS)
                found[name][run] = {"steps": [s for s, _ in points], "values": [v for _, v in points]}
    return {"series": found}


def thinned(points: list[tuple[Any, Any]], most: int) -> list[tuple[Any, Any]]:
    """At most ``most`` points that keep each stretch's lowest, highest and missing values, so that spikes stay."""
    if len(points) <= most:
        return points
    width = -(-len(points) // (most // 3))
    kept: list[tuple[Any, Any]] = []
    for start in range(0, len(points), width):
        stretch = points[start : start + width]
        numbers = [p for p in stretch if p[1] is not None]
        ends = [min(numbers, key=lambda p: p[1]), max(numbers, key=lambda p: p[1])] if numbers else []
        gaps = [p for p in stretch if p[1] is None][:1]
        kept += sorted(set(ends + gaps))
    return kept


def steps(index: Index, runs: list[str], by: str = "") -> dict[str, Any]:
    """Per-step numbers from the rollouts themselves, over all or by domain, effort or run and fate."""
    if by not in ("", "domain", "effort", "fate", "status", "stop_reason"):
        raise UserError(f"steps are split by domain, effort, fate, status or stop_reason, not by '{by}'")
    for run in runs:
        _source(index, run)
    split = f"coalesce({quoted(by)}, '')" if by else "''"
    found = index.cursor().execute(
        f"""
        SELECT run, {split} AS part, step, count(*) AS rollouts, avg(reward) AS reward,
               avg(sampled_tokens) AS sampled_tokens, avg(thinking_tokens) AS thinking_tokens,
               avg(budget_tokens) AS budget_tokens, avg(reference_length) AS reference_length,
               avg((status = 'truncated')::INT) AS truncated, avg((reward IS NULL)::INT) AS unscored,
               avg(staleness_mean) AS staleness_mean, max(staleness_max) AS staleness_max,
               avg((group_reward_std = 0)::INT) AS zero_variance
        FROM rollouts WHERE list_contains(?, run) GROUP BY ALL ORDER BY run, part, step
        """,
        [runs],
    )
    names = [c[0] for c in found.description]
    return {"columns": names, "rows": found.fetchall()}


def columns(index: Index) -> dict[str, Any]:
    """All columns, for completion; with the values of those that have few."""
    cursor = index.cursor()
    found = []
    for column in index.columns.values():
        entry: dict[str, Any] = {"name": column.name, "kind": column.kind, "place": column.place}
        entry["meaning"] = column.meaning
        if column.place == "index" and column.kind == "text" and column.name != "problem_id":
            values = cursor.execute(
                f"SELECT DISTINCT {quoted(column.name)} FROM rollouts WHERE {quoted(column.name)} IS NOT NULL "
                f"LIMIT {_MOST_VALUES + 1}"
            ).fetchall()
            if len(values) <= _MOST_VALUES:
                entry["values"] = sorted(v for (v,) in values if v)
        found.append(entry)
    parts = cursor.execute(
        "SELECT DISTINCT part.name FROM (SELECT unnest(reward_components) AS part FROM (SELECT reward_components "
        "FROM rollouts USING SAMPLE 20000 ROWS)) LIMIT 100"
    ).fetchall()
    found += [
        {"name": f"component.{name}", "kind": "number", "place": "index", "meaning": "part of the reward"}
        for (name,) in sorted(parts)
    ]
    return {"columns": found}


def configs(index: Index, runs: list[str]) -> dict[str, Any]:
    """Config keys and their value in each run; ``differs`` where they are not all the same."""
    flat = {run: dict(_flatten(_source(index, run).config())) for run in runs}
    keys = list(dict.fromkeys(key for values in flat.values() for key in values))
    return {
        "runs": runs,
        "rows": [
            {
                "key": key,
                "values": [flat[run].get(key) for run in runs],
                "set": [key in flat[run] for run in runs],
                "differs": len({repr(flat[run].get(key, ...)) for run in runs}) > 1,
            }
            for key in keys
        ],
    }


def _source(index: Index, run: str) -> Source:
    if run not in index.runs:
        raise UserError(f"there is no run '{run}'; known: {', '.join(index.runs) or 'none'}")
    return index.runs[run]
