"""Where a run's time went: `k3rl profile RUN`. Reads what the run wrote (metrics.jsonl, config, files); starts nothing.

Idle is measured against the whole step: a worker that is done waits for the slowest part of the loop. What a phase took
beyond its slowest worker is the price of driving workers from one process: Ray's calls, copies and scheduling.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from k3rl.errors import UserError
from k3rl.store import RunStore
from k3rl.store.files import replacing

ORDER = (
    "data",
    "rollout",
    "collect",
    "evaluate",
    "reward",
    "teach",
    "train",
    "publish",
    "record",
    "checkpoint",
)
"""In which a step goes through its phases."""
INSIDE = {"train": "train/seconds_s", "publish": "weights/load_seconds_s"}
"""Phase, and the metric with the time of its slowest worker."""
WORKER_BUSY = "rollout/busy_s/worker/"
PAUSED_SHOWN = 2000

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """A kind of worker. ``busy_s`` is the sum over ``count`` of them; ``idle`` their share of the run without work."""

    name: str
    count: int
    busy_s: float
    idle: float


@dataclass(frozen=True)
class Profile:
    """Numbers of one run. ``phases_s`` and ``overhead_s`` are seconds over all steps, in the order of a step."""

    run: str
    steps: int
    seconds_s: float
    phases_s: dict[str, float]
    workers: list[Part]
    overhead_s: dict[str, float]
    moved_bytes: dict[str, int]

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "workers": [vars(w) for w in self.workers]}


def runs_in(path: Path) -> list[Path]:
    """The run itself, and those of a pipeline's jobs. Raises `UserError` where nothing was measured."""
    found = sorted(p.parent for p in path.rglob("metrics.jsonl") if (p.parent / "config.yaml").is_file())
    if not found:
        raise UserError(f"{path}: no run with a metrics.jsonl in it")
    return found


def profile(run: Path) -> Profile:
    """Raises `UserError` where the folder is no run or holds no finished step."""
    store = RunStore.open(run)
    rows = store.metrics()
    if not rows:
        raise UserError(f"{run}: no step has finished yet")
    total = sum(step_seconds(r) for r in rows)
    phases = {name: sum(r.get(f"time/{name}_s") or 0.0 for r in rows) for name in phase_names(rows)}
    return Profile(
        run=str(run),
        steps=len(rows),
        seconds_s=total,
        phases_s=phases,
        workers=list(parts(store.config, rows, total)),
        overhead_s=overhead(rows, phases, store.config),
        moved_bytes=moved(store, rows),
    )


def phase_names(rows: Iterable[Row]) -> list[str]:
    """Phases that were timed, in the order of a step; unknown ones last."""
    found = {k.removeprefix("time/").removesuffix("_s") for r in rows for k in r if k.startswith("time/")}
    known = [p for p in ORDER if p in found]
    return known + sorted(found - {*ORDER, "step"})


def step_seconds(row: Row) -> float:
    return float(row.get("time/step_s") or 0.0)


def increases(rows: Sequence[Row], name: str) -> list[float]:
    """By step, of a metric that counts up from the start of the process: a resumed run begins at 0 again."""
    out, before = [], 0.0
    for row in rows:
        now = float(row.get(name) or 0.0)
        out.append(now - before if now >= before else now)
        before = now
    return out


def parts(config: Mapping[str, Any], rows: Sequence[Row], total_s: float) -> Iterator[Part]:
    """Workers of every kind that the run had, rollout workers one by one where each was measured."""

    def part(name: str, count: int, busy_s: float) -> Part:
        whole = total_s * count
        return Part(name, count, busy_s, max(0.0, 1 - busy_s / whole) if whole else 0.0)

    rollout = int(config.get("rollout", {}).get("workers", 0))
    if rollout:
        yield part("rollout workers", rollout, sum(increases(rows, "rollout/busy_s")))
        single = sorted({int(k.rpartition("/")[2]) for r in rows for k in r if k.startswith(WORKER_BUSY)})
        for i in single if rollout > 1 else ():
            yield part(f"  rollout worker {i}", 1, sum(increases(rows, f"{WORKER_BUSY}{i}")))
    if any("train/seconds_s" in r for r in rows):
        ranks = int(config.get("trainer", {}).get("parallel", {}).get("ranks", 1))
        yield part("trainer ranks", ranks, ranks * sum(r.get("train/seconds_s") or 0.0 for r in rows))
    if any("rewards/seconds_s/score" in r for r in rows):
        workers = max(1, int(config.get("rewards", {}).get("workers", 1)))
        yield part("reward workers", workers, sum(increases(rows, "rewards/seconds_s/score")))


def overhead(rows: Sequence[Row], phases: Mapping[str, float], config: Mapping[str, Any]) -> dict[str, float]:
    """Seconds that phases took beyond the work in them. Of rollout: what workers did not spend generating or waiting
    for one another, for which the mean worker stands; so an upper bound where lengths differ."""
    out = {}
    for phase, name in INSIDE.items():
        if phase in phases and any(name in r for r in rows):
            inner = sum(r.get(name) or 0.0 for r in rows)
            out[phase] = max(0.0, phases[phase] - inner)
    workers = int(config.get("rollout", {}).get("workers", 0))
    if workers and "rollout" in phases and config.get("rollout", {}).get("mode", "partial") == "partial":
        busiest = max(
            [sum(increases(rows, "rollout/busy_s")) / workers]
            + [sum(increases(rows, f"{WORKER_BUSY}{i}")) for i in range(workers)]
        )
        out["rollout"] = max(0.0, phases["rollout"] - busiest)
    return {p: out[p] for p in ORDER if p in out}


def moved(store: RunStore, rows: Sequence[Row]) -> dict[str, int]:
    """Bytes, over the run: weights to each engine, teachers' weights to devices, what was written to disk."""
    engines = max(1, int(store.config.get("rollout", {}).get("workers", 1)))
    out = {"weights published, to all engines": engines * sum(int(r.get("weights/bytes") or 0) for r in rows)}
    out["teachers' weights to devices"] = int(sum(increases(rows, "teacher/moved_bytes")))
    out["rollouts on disk"] = sum(f.stat().st_size for f in store.rollout_files())
    kept = store.checkpoints()
    out["checkpoints on disk, those kept"] = sum(
        f.stat().st_size for c in kept for f in c.rglob("*") if f.is_file()
    )
    return {name: count for name, count in out.items() if count}


def show(p: Profile, console: Console | None = None) -> None:
    """Tables for people."""
    console = console or Console(highlight=False, soft_wrap=True)
    console.print(f"{p.run}: {p.steps} steps, {p.seconds_s:.1f} s, {p.seconds_s / p.steps:.2f} s a step")
    table = Table("phase", "s", "share", "beyond its slowest worker, s", box=None, pad_edge=False)
    for name, seconds in p.phases_s.items():
        beyond = f"{p.overhead_s[name]:.1f}" if name in p.overhead_s else ""
        table.add_row(name, f"{seconds:.1f}", f"{seconds / max(p.seconds_s, 1e-9):.0%}", beyond)
    console.print(table)
    if p.workers:
        table = Table("workers", "number", "busy s", "idle share", box=None, pad_edge=False)
        for w in p.workers:
            table.add_row(w.name, str(w.count), f"{w.busy_s:.1f}", f"{w.idle:.0%}")
        console.print(table)
    if p.overhead_s:
        total = sum(p.overhead_s.values())
        share = total / max(p.seconds_s, 1e-9)
        console.print(f"Ray, copies and scheduling, at most: {total:.1f} s, {share:.0%} of the run")
    for what, count in p.moved_bytes.items():
        console.print(f"{what}: {_size(count)}")


def _size(count: int) -> str:
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.3g} {units[0]}"


# -- the trace -----------------------------------------------------------------------------------------------


def write_trace(run: Path, to: Path) -> Path:
    """A trace in Chrome's JSON format for ui.perfetto.dev: phases, workers, trajectories that were paused, curves.

    metrics.jsonl has durations, not moments: steps are set one after another, and a worker's work at the start of its
    phase."""
    store = RunStore.open(run)
    rows = store.metrics()
    if not rows:
        raise UserError(f"{run}: no step has finished yet")
    events = [*_named(), *_slices(store.config, rows), *_paused(store, rows), *_counters(rows)]
    with replacing(to) as temporary:
        temporary.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return to


PROCESSES = {1: "driver", 2: "rollout workers", 3: "trainer ranks", 4: "paused trajectories"}


def _named() -> Iterator[dict[str, Any]]:
    for pid, name in PROCESSES.items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}


def starts(rows: Sequence[Row]) -> list[tuple[float, dict[str, tuple[float, float]]]]:
    """By step: when it began, and each phase's beginning and length, in seconds since the run's start."""
    out, now = [], 0.0
    names = phase_names(rows)
    for row in rows:
        began, phases = now, {}
        for name in names:
            length = float(row.get(f"time/{name}_s") or 0.0)
            if length:
                phases[name] = (now, length)
                now += length
        out.append((began, phases))
    return out


def _slices(config: Mapping[str, Any], rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    workers = int(config.get("rollout", {}).get("workers", 0))
    ranks = int(config.get("trainer", {}).get("parallel", {}).get("ranks", 1))
    whole = increases(rows, "rollout/busy_s")
    each = {
        i: increases(rows, f"{WORKER_BUSY}{i}")
        for i in range(workers)
        if any(f"{WORKER_BUSY}{i}" in r for r in rows)
    }
    for n, (row, (began, phases)) in enumerate(zip(rows, starts(rows), strict=True)):
        yield _slice(1, 0, f"step {row['step']}", began, sum(length for _, length in phases.values()))
        for name, (at, length) in phases.items():
            yield _slice(1, 1, name, at, length)
        if "rollout" in phases:
            at, length = phases["rollout"]
            for i in range(workers):
                busy = each[i][n] if i in each else whole[n] / workers
                yield _slice(2, i, "generating", at, min(busy, length))
        if "train" in phases and row.get("train/seconds_s"):
            at, length = phases["train"]
            for rank in range(ranks):
                yield _slice(3, rank, "training", at, min(float(row["train/seconds_s"]), length))


def _slice(pid: int, tid: int, name: str, at_s: float, length_s: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": at_s * 1e6, "dur": length_s * 1e6}


def _paused(store: RunStore, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Trajectories over several steps, from the rollout they began in to the one they ended in."""
    import pyarrow.parquet as pq

    spans = {
        int(r["step"]): phases["rollout"]
        for r, (_, phases) in zip(rows, starts(rows), strict=True)
        if "rollout" in phases
    }
    shown = 0
    columns = ["draw", "sample", "started_step", "finished_step", "sampled_tokens", "problem_id"]
    for file in store.rollout_files():
        for t in pq.read_table(file, columns=columns).to_pylist():
            first, last = t["started_step"], t["finished_step"]
            if first == last or first not in spans or last not in spans or shown >= PAUSED_SHOWN:
                continue
            shown += 1
            common = {
                "cat": "trajectory",
                "id": shown,
                "pid": 4,
                "tid": 0,
                "name": f"{t['draw']}.{t['sample']}",
            }
            begin, (at, length) = spans[first][0], spans[last]
            yield {**common, "ph": "b", "ts": begin * 1e6, "args": t}
            yield {**common, "ph": "e", "ts": (at + length) * 1e6}


def _counters(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    for row, (began, _) in zip(rows, starts(rows), strict=True):
        for name in ("rollout/tokens_per_s", "reward/mean", "staleness/mean", "rollout/in_flight"):
            if isinstance(row.get(name), int | float):
                value = {"value": row[name]}
                yield {"ph": "C", "name": name, "pid": 1, "tid": 0, "ts": began * 1e6, "args": value}
