"""What benchmarks share: timing, rows with a peer measured in the same run, and the result file."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

SMALLER_IS_BETTER = ("ms", "s", "GiB", "MiB", "relative")


class Result:
    """Rows of one benchmark; ``write`` puts them beside versions and the command."""

    def __init__(self, name: str, machine: str) -> None:
        self.name, self.machine = name, machine
        self.rows: list[dict[str, Any]] = []

    def row(
        self, metric: str, value: float, unit: str, peer: str = "", peer_value: float | None = None
    ) -> None:
        """``ratio``: how many times better than the peer."""
        ratio = None
        if peer_value and value:
            ratio = peer_value / value if unit in SMALLER_IS_BETTER else value / peer_value
        facts = {"metric": metric, "value": value, "unit": unit, "peer": peer or None}
        self.rows.append({**facts, "peer_value": peer_value, "ratio": ratio})
        beside = f"   {peer} {peer_value:.4g}, ratio {ratio:.3g}" if ratio is not None and peer_value else ""
        print(f"{metric:64s} {value:10.4g} {unit}{beside}", flush=True)

    def write(self, path: Path | None) -> None:
        if path is None:
            return
        said = [a if a != str(path) else f"benchmarks/results/{path.name}" for a in sys.argv[1:]]
        program = Path(sys.argv[0]).resolve().relative_to(Path(__file__).resolve().parents[1])
        command = " ".join([f"python {program}", *said])
        content = {
            "name": self.name,
            "machine": self.machine,
            "versions": versions(),
            "command": command,
            "rows": self.rows,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
        page = Path(__file__).resolve().parents[1] / "scripts" / "benchmarks_page.py"
        if page.exists():  # not in a copy of the benchmarks alone
            subprocess.run([sys.executable, str(page)], check=False)


def versions() -> dict[str, str]:
    """Of what shapes the numbers."""
    found = {"python": platform.python_version()}
    for package in ("torch", "triton", "transformers", "ray", "vllm", "trl", "fla-core"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found |= {"device": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    return found


def seconds(function: Callable[[], Any], device: torch.device | str = "cuda", budget_s: float = 1.0) -> float:
    """Median time of a call, warmed up; on CUDA by events."""
    function()
    function()
    device = torch.device(device)
    times: list[float] = []
    started = time.monotonic()
    while len(times) < 3 or (time.monotonic() - started < budget_s and len(times) < 200):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            begun = time.perf_counter()
            function()
            times.append(time.perf_counter() - begun)
    return sorted(times)[len(times) // 2]


def peak_gib(function: Callable[[], Any]) -> float:
    """CUDA memory that a call takes beyond what was there before it."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30
