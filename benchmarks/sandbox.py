"""Latency of each step in a local sandbox's life, p50 and p99: one life after the other, and many in flight, where
a step also waits for the machine's cores; and what is left on the machine after all of them.

    python benchmarks/sandbox.py --count 500 --in-flight 32

The peers, measured in the same run: starting ``bwrap`` with its name spaces around ``true``, and starting ``true``
without any.
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
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

from sandbox_client import LocalBackend, SandboxSpec
from sandbox_client.local import bwrap
from sandbox_client.local.cgroup import Cgroup, hierarchies
from sandbox_client.local.processes import tree

STEPS = (
    "create",
    "exec",
    "write_file",
    "pause",
    "resume",
    "exec_after_resume",
    "read_file",
    "fork",
    "snapshot",
    "create_from_snapshot",
    "kill",
)
PEER_OF = {"create": "bwrap true", "exec": "true", "exec_after_resume": "true"}


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
    (child,) = await watch.time("fork", sandbox.fork())
    snapshot = await watch.time("snapshot", sandbox.snapshot())
    await watch.time("kill", sandbox.kill())
    await watch.time("kill", child.kill())
    again = await watch.time("create_from_snapshot", backend.create(SandboxSpec(snapshot.id, ttl_s=300)))
    assert len(await again.read_file("f")) == 10_000
    await watch.time("kill", again.kill())
    await backend.delete_snapshot(snapshot.id)


def traces(root: Path) -> dict[str, int]:
    """What sandboxes could leave behind, counted."""
    return {
        "processes": len(tree(os.getpid())),
        "mounts": Path("/proc/self/mounts").read_text().count("\n"),
        "files": sum(1 for _ in root.rglob("*")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "control groups": sum(1 for h in hierarchies() for _ in h.parent.glob("*-*-*-*-*-*")),
    }


async def many_lives(root: Path, count: int, in_flight: int) -> tuple[Stopwatch, float, dict[str, int]]:
    """-> the steps' times, the wall time of all, and how much more of each trace there is after than before."""
    watch, gate = Stopwatch(), asyncio.Semaphore(in_flight)

    async def gated() -> None:
        async with gate:
            await one_life(backend, watch)

    async with LocalBackend(root) as backend:
        await one_life(backend, Stopwatch())
        before = traces(root)
        began = time.perf_counter()
        await asyncio.gather(*(gated() for _ in range(count)))
        wall_s = time.perf_counter() - began
        after = traces(root)
    return watch, wall_s, {name: after[name] - before[name] for name in before}


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


def steps(name: str, watch: Stopwatch, peers: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Rows of p50 and p99; ``ratio``: how many times better than the peer."""
    for step in STEPS:
        for q in (0.5, 0.99):
            value_ms = 1000 * quantile(watch.seconds[step], q)
            row = {"metric": f"{step} p{round(100 * q)}, {name}", "value": round(value_ms, 3), "unit": "ms"}
            peer = PEER_OF.get(step) if peers and q == 0.5 else None
            peer_ms = round(1000 * peers[peer], 3) if peer else None
            ratio = round(peer_ms / value_ms, 3) if peer_ms else None
            yield row | {"peer": peer, "peer_value": peer_ms, "ratio": ratio}


def plain(metric: str, value: float, unit: str) -> dict[str, Any]:
    return {"metric": metric, "value": value, "unit": unit, "peer": None, "peer_value": None, "ratio": None}


def measure(count: int, in_flight: int) -> list[dict[str, Any]]:
    peers = {"bwrap true": bare_start(bwrap_true()), "true": bare_start(["true"])}
    with tempfile.TemporaryDirectory() as folder:
        alone, _, _ = asyncio.run(many_lives(Path(folder) / "alone", min(count, 50), 1))
        watch, wall_s, left = asyncio.run(many_lives(Path(folder) / "many", count, in_flight))
    rows = [*steps("alone", alone, peers), *steps(f"{in_flight} in flight", watch, {})]
    rows.append(plain(f"whole lives per second, {in_flight} in flight", round(count / wall_s, 2), "1/s"))
    return rows + [plain(f"{name} left after {count} lives", more, "") for name, more in left.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Latency of each step in a local sandbox's life.")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--in-flight", type=int, default=32)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "sandbox.cpu.json")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    rows = measure(options.count, options.in_flight)
    bubblewrap = subprocess.run(
        [bwrap.probe().bwrap, "--version"], capture_output=True, text=True, check=True
    )
    result = {
        "name": "sandbox",
        "machine": "cpu",
        "versions": {
            "python": platform.python_version(),
            "kernel": platform.release(),
            "bwrap": bubblewrap.stdout.split()[-1],
        },
        "setting": {
            "lives": options.count,
            "in_flight": options.in_flight,
            "isolation": bwrap.probe().mode,
            "limits": sorted(Cgroup("probe").controllers),
            "cores": os.cpu_count(),
            "load_at_start": round(load, 2),
        },
        "command": shlex.join(["python", "benchmarks/sandbox.py", *sys.argv[1:]]),
        "rows": rows,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        peer = f"   {row['ratio']}x of '{row['peer']}'" if row["peer"] else ""
        print(f"{row['metric']:44} {row['value']:10} {row['unit']}{peer}")


if __name__ == "__main__":
    main()
