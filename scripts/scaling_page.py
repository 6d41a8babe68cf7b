"""Writes docs/scaling.md from scaling_template.md: figures are those of simulate_fleet.cpu.json and of K3's config.

python scripts/scaling_page.py            # writes the page
python scripts/scaling_page.py --check    # exit code 1 where the page is not what it would write
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "scaling.md"
RESULTS = ROOT / "benchmarks" / "results" / "simulate_fleet.cpu.json"
Point = dict[str, Any]

TEXT = Path(__file__).with_name("scaling_template.md").read_text(encoding="utf-8")


def points(results: Path = RESULTS) -> list[Point]:
    """One mapping per setting: its keys, and every measured number by name."""
    found: dict[str, Point] = {}
    for row in json.loads(results.read_text(encoding="utf-8"))["rows"]:
        label = row["metric"].rpartition(": ")[0]
        keys = {k: row[k] for k in ("gpus", "model", "lambda", "N", "K", "resume")}
        found.setdefault(label, keys)[row["what"]] = row["value"]
    return list(found.values())


COLUMNS = {
    "use": ("use", "{:.0%}"),
    "tail": ("tail", "{:.0%}"),
    "recompute": ("recompute", "{:.0%}"),
    "staleness mean": ("staleness mean", "{:.2f}"),
    "staleness max": ("max", "{:.0f}"),
    "rollout": ("rollout, h", "{:.2f}"),
    "train": ("train, h", "{:.2f}"),
    "trained": ("trained tokens/s a GPU", "{:,.0f}"),
    "paused caches per host": ("paused caches, GB a host", "{:,.1f}"),
}
HOURS = {"rollout", "train"}
SIZES = {
    "trainer state per host": ("trainer, GB a host", "{:,.0f}"),
    "controller ms a trajectory": ("controller, ms a trajectory", "{:.2f}"),
}


def table(some: list[Point], keys: list[str], more: dict[str, tuple[str, str]] | None = None) -> str:
    """Markdown of some settings: what distinguishes them, then their numbers."""
    columns = {**COLUMNS, **(more or {})}
    lines = [_row([*keys, *(title for title, _ in columns.values())])]
    lines.append(_row(["---:"] * (len(keys) + len(columns))))
    for p in some:
        cells = [f"{p[k]:,}" if isinstance(p[k], int) else str(p[k]) for k in keys]
        for name, (_, form) in columns.items():
            cells.append(form.format(p[name] / 3600 if name in HOURS else p[name]))
        lines.append(_row(cells))
    return "\n".join(lines)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def page(results: Path = RESULTS) -> str:
    sys.path.append(str(ROOT / "benchmarks"))  # last: it has a rewards.py too
    from fleet_model import costs
    from simulate_fleet import K3, Fleet

    everything = points(results)
    base = next(
        p for p in everything if p["gpus"] == 128 and p["lambda"] == 0.75 and p["resume"] == "recompute"
    )
    same = [p for p in everything if p["gpus"] == base["gpus"]]
    usual = [p for p in same if p["resume"] == base["resume"]]
    fleet, cost = Fleet(gpus=base["gpus"], **K3), costs("k3-full", K3["engine_gpus"])
    hardware = cost.hardware
    fits = [p["gpus"] for p in everything if p["trainer state per host"] * 1e9 < hardware.host_dram_bytes]
    k3 = [p for p in everything if p["model"] == "k3-full"]
    return TEXT.format(
        engine_gpus=fleet.engine_gpus, slots=fleet.slots, decode=hardware.decode_efficiency,
        floor=1e3 * hardware.step_floor_s, prefill=hardware.prefill_mfu, train=hardware.train_mfu,
        network=hardware.network_efficiency, median=fleet.median, longest=fleet.longest, prompt=fleet.prompt,
        total=cost.total_params / 1e9, active=cost.active_params / 1e9, served=cost.served_bytes / 1e9,
        state=cost.state_bytes / 1e6, kv=cost.kv_bytes_per_token / 1e3, million=cost.cache_bytes(1 << 20) / 1e9,
        trainer=cost.trainer_bytes() / 1e12,
        small=min(g for g in fits if g in {p["gpus"] for p in k3}),
        sizes=table(sorted((p for p in everything if _default(p, everything)), key=lambda p: p["gpus"]),
                    ["gpus", "model", "N"], SIZES),
        lambdas=table(sorted((p for p in usual if (p["N"], p["K"]) == (base["N"], base["K"])),
                             key=lambda p: p["lambda"]), ["lambda"]),
        groups=table(sorted((p for p in usual if p["lambda"] == base["lambda"]), key=lambda p: (p["K"], p["N"])),
                     ["N", "K"]),
        caches=table([base, *(p for p in same if p["resume"] != base["resume"])], ["resume"]),
        published=base["publication as published"], packed=base["publication packed"], seconds=base["publish"],
        factor=base["publication as published"] / base["publication packed"],
    )  # fmt: skip


def _default(p: Point, everything: list[Point]) -> bool:
    """Is it the first setting of its size?"""
    return p is next(q for q in everything if q["gpus"] == p["gpus"])


def main() -> int:
    text = page()
    if "--check" in sys.argv:
        return int(not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
