"""PNG plots of a training run's metrics, each with several lines over the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

Metrics = Sequence[dict[str, Any]]

PLOTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "reward": ("mean reward", ("reward/mean", "reward/mean/effort/")),
    "loss": ("loss per token", ("train/nll",)),
    "components": ("mean of a reward's component", ("reward/part/",)),
    "lengths": ("thinking tokens", ("length/thinking", "length/thinking/effort/")),
    "sampled": ("sampled tokens", ("length/sampled", "length/sampled/effort/")),
    "judge": (
        "judge, share or correlation",
        tuple(
            f"judge/{x}"
            for x in ("void_rate", "agreement", "order_bias_rate", "over_length", "length_correlation")
        ),
    ),
    "staleness": ("policy updates since sampled", ("staleness/mean", "staleness/max")),
    "teacher": ("reverse KL to the teachers, per token", ("teacher/kl",)),
}
"""File name, what the axis says, and the metrics: whole names, or prefixes that end with '/'."""


def training_plots(metrics: Metrics, folder: Path, prefix: str) -> list[Path]:
    """Writes those plots for which there are numbers, as ``<prefix>-<plot>.png``; returns their paths."""
    written = []
    for plot, (label, wanted) in PLOTS.items():
        lines = {name: series(metrics, name) for name in names(metrics, wanted)}
        if lines:
            written.append(
                _save(folder / f"{prefix}-{plot}.png", label, lambda axes, d=lines: _lines(axes, d))
            )
    phases = [n for n in names(metrics, ("time/",)) if n != "time/step_s"]
    if phases:
        path = folder / f"{prefix}-phases.png"
        written.append(_save(path, "seconds per step", lambda axes: _stack(axes, metrics, phases)))
    return written


def names(metrics: Metrics, wanted: Sequence[str]) -> list[str]:
    """Metrics that exist among whole names and prefixes, in order of appearance."""
    present = {name: None for m in metrics for name in m}
    return [n for n in present if any(n == w or (w.endswith("/") and n.startswith(w)) for w in wanted)]


def series(metrics: Metrics, name: str) -> tuple[list[int], list[float]]:
    """Steps and values, without the steps that lack a value."""
    points = [(m["step"], m[name]) for m in metrics if m.get(name) is not None]
    return [s for s, _ in points], [v for _, v in points]


def _lines(axes: Axes, data: dict[str, tuple[list[int], list[float]]]) -> None:
    for number, (name, (steps, values)) in enumerate(data.items()):
        style = {"color": "black", "linewidth": 2} if number == 0 < len(data) - 1 else {"linewidth": 1.2}
        axes.plot(steps, values, label=name, marker="." if len(steps) < 60 else None, **style)


def _stack(axes: Axes, metrics: Metrics, phases: list[str]) -> None:
    steps = [m["step"] for m in metrics]
    rows = [[m.get(p) or 0.0 for m in metrics] for p in phases]
    axes.stackplot(steps, rows, labels=[p.removeprefix("time/").removesuffix("_s") for p in phases])


def _save(path: Path, label: str, draw: Any) -> Path:
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    try:
        draw(axes)
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
        if not math.isclose(*axes.get_ylim()):
            axes.margins(x=0.01)
        axes.legend(fontsize=8, frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120, metadata={"Software": None})
    finally:
        plt.close(figure)
    return path
