"""Latency of each step in a local sandbox's life: p50 and p99, many in flight, beside the bare tools' own
price.

    python benchmarks/sandbox.py --count 500 --in-flight 32

The peers, measured in the same run: starting ``bwrap`` with the same isolation around ``true``, and starting
``true`` without any.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from sandbox_client import LocalBackend, SandboxSpec
from sandbox_client.local import bwrap

STEPS = ("create", "exec", "write_file", "read_file", "pause", "resume", "exec_after_resume", "kill")


class Stopwatch:
    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    async def time(self, step: str, call: Awaitable[Any]) -> Any:
        began = time.perf_counter()
        result = await call
        self.seconds[step].append(time.perf_counter() - began)
        return result


async def one_life(backend: LocalBackend, watch: Stopwatch) -> None:
    sandbox = await watch.time("create", backend.create(SandboxSpec(ttl_s=300)))
    done = await watch.time("exec", sandbox.exec(["true"]))
    assert done.ok
    await watch.time("write_file", sandbox.write_file("f", b"x" * 10_000))
    await watch.time("pause", sandbox.pause())
    await watch.time("resume", sandbox.resume())
    await watch.time("exec_after_resume", sandbox.exec(["true"]))
    assert len(await watch.time("read_file", sandbox.read_file("f"))) == 10_000
    await watch.time("kill", sandbox.kill())


async def many_lives(root: Path, count: int, in_flight: int) -> tuple[Stopwatch, float]:
    """-> the steps' times and the wall time of all."""
    watch, gate = Stopwatch(), asyncio.Semaphore(in_flight)

    async def gated() -> None:
        async with gate:
            await one_life(backend, watch)

    async with LocalBackend(root) as backend:
        began = time.perf_counter()
        await asyncio.gather(*(gated() for _ in range(count)))
        return watch, time.perf_counter() - began


def quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(q * len(ordered)), len(ordered) - 1)]


def bare_start(args: list[str], repeats: int = 50) -> float:
    """Median seconds to start and end a command."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        subprocess.run(args, check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def bwrap_true() -> list[str]:
    found = bwrap.probe()
    user = [] if found.mode == "root" else ["--unshare-user"]
    return [
        found.bwrap,
        "--unshare-pid",
        "--unshare-net",
        "--unshare-ipc",
        "--unshare-uts",
        *user,
        "--ro-bind",
        "/",
        "/",
        "true",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--in-flight", type=int, default=32)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "sandbox.cpu.json")
    options = parser.parse_args()
    peers = {"bwrap true": bare_start(bwrap_true()), "true": bare_start(["true"])}
    with tempfile.TemporaryDirectory() as folder:
        alone, _ = asyncio.run(many_lives(Path(folder) / "alone", min(options.count, 50), 1))
        watch, wall_s = asyncio.run(many_lives(Path(folder) / "many", options.count, options.in_flight))
    peer_of = {"create": "bwrap true", "exec": "true", "exec_after_resume": "true"}
    rows: list[dict[str, Any]] = []
    for name, found in (("alone", alone), (f"{options.in_flight} in flight", watch)):
        for step in STEPS:
            for q in (0.5, 0.99):
                value = quantile(found.seconds[step], q)
                peer = peer_of.get(step) if q == 0.5 and name == "alone" else None
                row = {
                    "metric": f"{step} p{round(100 * q)}, {name}",
                    "value": round(1000 * value, 3),
                    "unit": "ms",
                }
                if peer:
                    row |= {
                        "peer": peer,
                        "peer_value": round(1000 * peers[peer], 3),
                        "ratio": round(value / peers[peer], 2),
                    }
                rows.append(row)
    rows.append(
        {"metric": "whole lives per second", "value": round(options.count / wall_s, 2), "unit": "1/s"}
    )
    result = {
        "name": "sandbox",
        "machine": "cpu",
        "versions": {
            "python": platform.python_version(),
            "kernel": platform.release(),
            "bwrap": subprocess.run(
                [bwrap.probe().bwrap, "--version"], capture_output=True, text=True
            ).stdout.strip(),
            "cores": os.cpu_count(),
            "isolation": bwrap.probe().mode,
        },
        "command": "python benchmarks/sandbox.py " + shlex.join(sys.argv[1:]),
        "rows": rows,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        peer = f"   {row['ratio']}x of '{row['peer']}'" if "peer" in row else ""
        print(f"{row['metric']:40} {row['value']:10} {row['unit']}{peer}")


if __name__ == "__main__":
    main()
