"""What a job leaves for people: ``report.md`` with tables and plots, ``report.json`` with the same numbers.

Sources are the run's own files; a report can be made again at any time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.parquet as pq

from k3rl.config.load import hash_of
from k3rl.store import RunStore
from k3rl.store.files import replacing
from k3rl.tracking.plots import training_plots
from k3rl.types import Effort

Cell = dict[str, Any]
"""What one model did on one (domain, effort) cell: stage, domain, effort, reward, accuracy (pass@1), pass_at_k with k
samples a problem, format_rate, thinking_tokens, total_tokens, tokens_per_s, k, n."""

MEASURES = (
    ("reward", 3), ("accuracy", 3), ("pass_at_k", 3), ("format_rate", 3), ("thinking_tokens", 1), ("total_tokens", 1),
)  # fmt: skip
Between = tuple[str, str, float]
"""Stages at the normalised scores 0 and 1, and the least difference of the two in a cell that has a score."""


def evaluation_report(
    store: RunStore, cells: Sequence[Cell], stages: Sequence[str], between: Between | None = None
) -> Path:
    """The report of an evaluate job. ``stages``: models in their order, the first is the baseline."""
    content: dict[str, Any] = {"cells": list(cells), "stages": list(stages), **summary(cells, stages)}
    if between is not None:
        content |= {"between": between, "normalised": normalised_summary(cells, stages, between)}
    store.write_state("report.json", {**_head(store), **content, "phases": phases(store)})
    return _write(store.path, f"# {store.path.name}\n\n{evaluation_section(cells, stages, between)}")


def pipeline_report(folder: Path, runs: dict[str, Path]) -> Path:
    """One report over the jobs of a pipeline: tables of its evaluations, plots of what was trained."""
    own = RunStore.open(folder)
    sections, jobs, cells = [f"# {folder.name}\n"], {}, []
    for name, run in runs.items():
        store = RunStore.open(run)
        stored = run / "report.json"
        if store.config["kind"] == "evaluate" and stored.is_file():
            content = json.loads(stored.read_text(encoding="utf-8"))
            jobs[name] = content
            cells += content["cells"]
            section = evaluation_section(content["cells"], content["stages"], content.get("between"))
            sections.append(f"## {name}\n\n{section}")
    for name, run in runs.items():
        if RunStore.open(run).config["kind"] != "evaluate":
            sections.append(training_section(name, run, folder))
    seconds = {name: phases(RunStore.open(run)) for name, run in runs.items()}
    own.write_state("report.json", {**_head(own), "cells": cells, "jobs": jobs, "phases": seconds})
    return _write(folder, "\n".join(sections))


def training_report(store: RunStore) -> Path:
    """The report of a job that trained: its plots, and one cell per domain and effort of its last step's rollouts."""
    content = {**_head(store), "cells": _trained_cells(store), "phases": phases(store)}
    store.write_state("report.json", content)
    return _write(store.path, training_section(store.path.name, store.path, store.path).removeprefix("#"))


def _trained_cells(store: RunStore) -> list[Cell]:
    """What the policy did when it was last trained; stage ``train``. Empty for jobs without rollouts."""
    files = store.rollout_files()
    if not files:
        return []
    columns = ["domain", "effort", "reward", "thinking_tokens", "sampled_tokens"]
    table: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in pq.read_table(files[-1], columns=columns).to_pylist():
        if row["reward"] is not None:
            table.setdefault((row["domain"], row["effort"] or ""), []).append(row)
    return [
        {
            "stage": "train", "domain": domain, "effort": effort, "n": len(rows),
            "reward": fmean(r["reward"] for r in rows),
            "accuracy": fmean(r["reward"] >= 1.0 for r in rows),
            "thinking_tokens": fmean(r["thinking_tokens"] for r in rows),
            "total_tokens": fmean(r["sampled_tokens"] for r in rows),
        }
        for (domain, effort), rows in sorted(table.items(), key=lambda item: by_effort(item[0]))
    ]  # fmt: skip


def _head(store: RunStore) -> dict[str, str]:
    return {"kind": store.config["kind"], "config_hash": hash_of(store.config)}


def phases(store: RunStore) -> dict[str, float]:
    """Seconds of each phase over the whole run."""
    totals: dict[str, float] = {}
    for metrics in store.metrics():
        for name, value in metrics.items():
            if name.startswith("time/") and value is not None:
                key = name.removeprefix("time/").removesuffix("_s")
                totals[key] = totals.get(key, 0.0) + value
    return totals


def summary(cells: Sequence[Cell], stages: Sequence[str]) -> dict[str, Any]:
    """Mean reward over all cells by stage, and what the last stage gained over the first."""
    means = {stage: mean_over(cells, stage, "reward") for stage in stages}
    first, last = means[stages[0]], means[stages[-1]]
    return {"mean_reward": means, "gain": None if first is None or last is None else last - first}


def mean_over(cells: Sequence[Cell], stage: str, measure: str) -> float | None:
    """Mean over a stage's trajectories, that is over its cells by their size; None where nothing was measured."""
    chosen = [c for c in cells if c["stage"] == stage and c.get(measure) is not None]
    count = sum(c["n"] for c in chosen)
    return sum(c[measure] * c["n"] for c in chosen) / count if count else None


def normalised(
    cells: Sequence[Cell], stage: str, between: Between, measure: str
) -> dict[tuple[str, str], float]:
    """By (domain, effort): (x - zero) / (one - zero) of a stage; cells without headroom are left out."""
    zero, one, headroom = between
    table = {(c["stage"], c["domain"], c["effort"]): c[measure] for c in cells}
    out = {}
    for (name, domain, effort), value in table.items():
        low, high = table.get((zero, domain, effort)), table.get((one, domain, effort))
        if name != stage or value is None or low is None or high is None or abs(high - low) < headroom:
            continue
        out[domain, effort] = (value - low) / (high - low)
    return out


def normalised_summary(
    cells: Sequence[Cell], stages: Sequence[str], between: Between
) -> dict[str, dict[str, dict[str, float]]]:
    """By measure and stage: mean over cells, the lowest and the highest of them."""
    out: dict[str, dict[str, dict[str, float]]] = {}
    for measure in ("reward", "accuracy"):
        for stage in stages:
            if values := list(normalised(cells, stage, between, measure).values()):
                numbers = {"mean": sum(values) / len(values), "lowest": min(values), "highest": max(values)}
                out.setdefault(measure, {})[stage] = {**numbers, "cells": float(len(values))}
    return out


def _normalised_section(cells: Sequence[Cell], stages: Sequence[str], between: Between) -> list[str]:
    lines = []
    for measure in ("reward", "accuracy"):
        scores = {stage: normalised(cells, stage, between, measure) for stage in stages}
        places = sorted({place for found in scores.values() for place in found}, key=by_effort)
        lines += [f"### normalised {measure}", "", f"{between[0]} is 0, {between[1]} is 1.", ""]
        lines += [_row(["domain", "effort", *stages]), _row(["---"] * 2 + ["---:"] * len(stages))]
        for place in places:
            row = [_number(scores[stage].get(place), 3) for stage in stages]
            lines.append(_row([place[0], place[1] or "-", *row]))
        for title, over in (("mean", lambda v: sum(v) / len(v)), ("lowest", min)):
            row = [_number(over(list(s.values())) if (s := scores[stage]) else None, 3) for stage in stages]
            lines.append(_row([title, "", *row]))
        lines.append("")
    return lines


def evaluation_section(cells: Sequence[Cell], stages: Sequence[str], between: Between | None = None) -> str:
    """Markdown: one table per measure with a row per (domain, effort) and a column per model, then speed."""
    numbers = summary(cells, stages)
    lines = []
    if len(stages) > 1 and numbers["gain"] is not None:
        before, after = numbers["mean_reward"][stages[0]], numbers["mean_reward"][stages[-1]]
        lines += [
            f"Mean reward on held-out problems: {stages[0]} {before:.3f}, {stages[-1]} {after:.3f} "
            f"({numbers['gain']:+.3f}).",
            "",
        ]
    if between is not None:
        lines += _normalised_section(cells, stages, between)
    for measure, digits in MEASURES:
        if not any(measure in c for c in cells):
            continue  # cells of an older version
        lines += [f"### {_title(measure, cells)}", "", _row(["domain", "effort", *stages])]
        lines.append(_row(["---"] * 2 + ["---:"] * len(stages)))
        for domain, effort in sorted({(c["domain"], c["effort"]) for c in cells}, key=by_effort):
            row = [_value(cells, domain, effort, stage, measure, digits) for stage in stages]
            lines.append(_row([domain, effort or "-", *row]))
        lines.append(_row(["all", "", *(_number(mean_over(cells, s, measure), digits) for s in stages)]))
        lines.append("")
    speeds = {c["stage"]: c["tokens_per_s"] for c in cells}
    lines.append(
        "Speed: " + ", ".join(f"{s} {speeds[s]:,.0f} tokens/s" for s in stages if s in speeds) + ".\n"
    )
    return "\n".join(lines)


def training_section(name: str, run: Path, folder: Path) -> str:
    """Markdown: where a training job ended, and its plots."""
    store = RunStore.open(run)
    metrics = store.metrics()
    seconds = phases(store)
    lines = [
        f"## {name}",
        "",
        f"{store.config['kind']}, {len(metrics)} steps, {seconds.get('step', 0):.0f} s.",
        "",
    ]
    lines += [_row(["phase", *seconds]), _row(["---", *["---:"] * len(seconds)])]
    lines += [_row(["seconds", *(f"{s:.1f}" for s in seconds.values())]), ""]
    for image in training_plots(metrics, folder / "plots", name):
        lines.append(f"![{image.stem}]({os.path.relpath(image, folder)})")
    return "\n".join([*lines, ""])


def by_effort(cell: tuple[str, str]) -> tuple[str, int]:
    """Sorts (domain, effort) by the efforts' order, those without one first."""
    order = ["", *map(str, Effort)]
    return cell[0], order.index(cell[1]) if cell[1] in order else len(order)


def _title(measure: str, cells: Sequence[Cell]) -> str:
    """A measure's name in tables; accuracy is pass@1."""
    if measure == "pass_at_k":
        return f"pass@{max(c.get('k', 1) for c in cells)}"
    return {"accuracy": "accuracy (pass@1)"}.get(measure, measure.replace("_", " "))


def _value(cells: Sequence[Cell], domain: str, effort: str, stage: str, measure: str, digits: int) -> str:
    for c in cells:
        if (c["domain"], c["effort"], c["stage"]) == (domain, effort, stage):
            return _number(c.get(measure), digits)
    return "-"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _write(folder: Path, text: str) -> Path:
    path = folder / "report.md"
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path
