"""The Python of docs/sandboxes.md runs as it stands, and its table of capabilities is what the backends say."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from sandbox_client import Capabilities, LocalBackend
from sandbox_client.agentenv import AgentEnvBackend
from sandbox_client.metrics import COUNTERS, TIMES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "sandboxes.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)


@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_the_pages_python_runs(index: int, tmp_path: Path, needs_isolation) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKS[index]],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("k3rl-sandboxes-*/live/*")) == []


async def test_the_table_of_capabilities_is_what_the_backends_say(tmp_path: Path, needs_isolation) -> None:
    rows = {
        cells[1].strip(" `"): cells[2:4]
        for line in PAGE.splitlines()
        if len(cells := line.split("|")) == 6 and cells[1].startswith(" `")
    }
    named = {f.name for f in fields(Capabilities)} - {"notes"}
    assert named <= rows.keys()
    async with LocalBackend(tmp_path) as local:
        for name in named - {"enforced_limits"}:
            for kind, cell in zip(
                (local.capabilities, AgentEnvBackend.capabilities), rows[name], strict=True
            ):
                said = cell.strip().replace("*", "")
                assert said.startswith("yes" if getattr(kind, name) else "no"), (name, said)


def test_every_metric_is_explained() -> None:
    explained = set(re.findall(r"`(\w+)`", PAGE.partition("## Metrics")[2].partition("## Trouble")[0]))
    timed = {f"{name[:-2]}_{q}_s" for name in TIMES for q in ("p50", "p99")}
    assert {*COUNTERS, *timed, "alive", "paused", "pause_share", "faults"} <= explained
