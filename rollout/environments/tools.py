"""What an agent can do in its sandbox: run bash and python, look at, make and change files.

Each call stands alone: a command starts a new shell in the home folder, so what a later call needs is in files.
That is what lets a sandbox be built again from a snapshot and the calls since (see `rollout.environments.sandboxed`).

A call returns text for the policy. What the policy did wrong is said in it (`ToolError`, or a file that is
missing); what the sandbox did wrong is an exception of `sandbox_client.errors`, and not the policy's fault.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from k3rl.errors import UserError, nearest
from sandbox_client import Chunk, Sandbox
from sandbox_client.errors import FileMissing, InvalidRequest, OutOfSpace
from sandbox_client.output import BothEnds, keep_both_ends

ANSWER = "answer"
"""Argument of `submit`."""
POLICY_FAULTS = (FileMissing, InvalidRequest, OutOfSpace)
"""Of the sandbox's errors, those that say what the policy asked wrongly."""


class ToolError(Exception):
    """The policy asked for what cannot be done; the message tells it why."""


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """``output_chars`` of a result reach the policy, from both of its ends. Seconds are of one call."""

    bash_s: float = 30.0
    python_s: float = 30.0
    output_chars: int = 4000
    file_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        if min(self.bash_s, self.python_s) <= 0 or self.output_chars < 2 or self.file_bytes < 1:
            raise UserError("an agent's tools need limits above 0, and at least 2 characters of output")


async def bash(sandbox: Sandbox, limits: ToolLimits, *, command: str) -> str:
    """Run a command with bash, in the home folder."""
    return await _run(sandbox, command, limits.bash_s, limits.output_chars)


async def python(sandbox: Sandbox, limits: ToolLimits, *, code: str) -> str:
    """Run Python code, in the home folder, and return what it prints."""
    return await _run(sandbox, ["python3", "-c", code], limits.python_s, limits.output_chars)


async def view(
    sandbox: Sandbox, limits: ToolLimits, *, path: str, first: int = 1, last: int | None = None
) -> str:
    """Show a file's lines with their numbers, or a folder's names."""
    if first < 1 or (last is not None and last < first):
        raise ToolError(f"lines count from 1 and end after they begin, not {first} to {last}")
    info = await sandbox.stat(path)
    if info.type == "directory":
        names = [f.name + ("/" if f.type == "directory" else "") for f in await sandbox.list_files(path)]
        return keep_both_ends("\n".join(sorted(names)) or "[empty]", limits.output_chars)
    lines = (await _read(sandbox, path, limits)).splitlines()
    shown = [f"{number} {line}" for number, line in enumerate(lines, 1) if number >= first][
        : None if last is None else last - first + 1
    ]
    return keep_both_ends("\n".join(shown) or "[no such lines]", limits.output_chars)


async def create(sandbox: Sandbox, limits: ToolLimits, *, path: str, content: str) -> str:
    """Write a file, new or over the old one; folders are made."""
    if len(content.encode()) > limits.file_bytes:
        raise ToolError(f"the content is longer than {limits.file_bytes} bytes")
    await sandbox.write_file(path, content)
    return "[written]"


async def edit(sandbox: Sandbox, limits: ToolLimits, *, path: str, old: str, new: str) -> str:
    """Put text in the place of other text, which must occur exactly once in the file."""
    text = await _read(sandbox, path, limits)
    found = text.count(old) if old else 0
    if found != 1:
        raise ToolError(f"the old text must occur once in {path}, it occurs {found} times")
    await sandbox.write_file(path, text.replace(old, new))
    return "[written]"


async def _run(sandbox: Sandbox, command: str | list[str], timeout_s: float, output_chars: int) -> str:
    """Both streams in the order in which they came, then how it ended, where that wasn't well."""
    if "\0" in (command if isinstance(command, str) else "".join(command)):
        raise ToolError("a command cannot hold a zero byte")
    output = BothEnds(4 * output_chars)

    def collect(chunk: Chunk) -> None:
        output.feed(chunk.data)

    result = await sandbox.exec(
        command, timeout_s=timeout_s, on_output=collect, output_limit_bytes=4 * output_chars
    )
    text = keep_both_ends(output.text().rstrip("\n"), output_chars)
    notes = [f"[not finished after {timeout_s:g} s]"] if result.timed_out else []
    notes += ["[out of memory]"] if result.out_of_memory else []
    notes += [f"[exit code {result.exit_code}]"] if result.exit_code and not result.timed_out else []
    return "\n".join(part for part in (text, *notes) if part) or "[no output]"


async def _read(sandbox: Sandbox, path: str, limits: ToolLimits) -> str:
    info = await sandbox.stat(path)
    if info.type != "file":
        raise ToolError(f"{path} is a {info.type}, not a file")
    if info.size_bytes > limits.file_bytes:
        raise ToolError(f"{path} has {info.size_bytes} bytes; use bash for files above {limits.file_bytes}")
    try:
        return (await sandbox.read_file(path, limit_bytes=limits.file_bytes)).decode()
    except UnicodeDecodeError as error:
        raise ToolError(f"{path} is not UTF-8 text") from error


TOOLS: dict[str, Callable[..., Awaitable[str]]] = {
    "bash": bash,
    "python": python,
    "view": view,
    "create": create,
    "edit": edit,
}
CHANGING = frozenset({"bash", "python", "create", "edit"})
"""Tools after which the sandbox may differ."""
_TYPES = {"str": "string", "int": "integer", "int | None": "integer"}


@functools.cache
def _parameters(name: str) -> dict[str, inspect.Parameter]:
    signature = inspect.signature(TOOLS[name])
    return {n: p for n, p in signature.parameters.items() if p.kind is p.KEYWORD_ONLY}


def declaration(name: str) -> dict[str, Any]:
    """A tool, or ``submit``, as chat formats declare it. Raises `UserError` for a name that is neither."""
    if name == "submit":
        return _declare(name, "Hand in and end.", {ANSWER: {"type": "string"}}, [])
    if name not in TOOLS:
        raise UserError(f"there is no tool '{name}' for a sandbox{nearest(name, [*TOOLS, 'submit'])}")
    parameters = _parameters(name)
    kinds = {n: {"type": _TYPES[str(p.annotation)]} for n, p in parameters.items()}
    required = [n for n, p in parameters.items() if p.default is p.empty]
    return _declare(name, inspect.getdoc(TOOLS[name]) or "", kinds, required)


def _declare(
    name: str, description: str, properties: Mapping[str, Any], required: Sequence[str]
) -> dict[str, Any]:
    schema = {"type": "object", "properties": dict(properties)} | (
        {"required": list(required)} if required else {}
    )
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": schema},
    }


async def call_tool(sandbox: Sandbox, limits: ToolLimits, name: str, arguments: Mapping[str, Any]) -> str:
    """Run one call. Raises `ToolError` for what the policy can mend, `SandboxError` for the sandbox's own faults."""
    _check(name, arguments)
    try:
        return await TOOLS[name](sandbox, limits, **arguments)
    except POLICY_FAULTS as error:
        raise ToolError(_without_id(str(error), sandbox.id)) from error


def _check(name: str, arguments: Mapping[str, Any]) -> None:
    parameters = _parameters(name)
    for given, value in arguments.items():
        if given not in parameters:
            raise ToolError(f"{name} has no argument '{given}'{nearest(given, parameters)}")
        kind = _TYPES[str(parameters[given].annotation)]
        right = isinstance(value, str) if kind == "string" else type(value) is int
        if not right:
            raise ToolError(f"{name}: '{given}' must be a {kind}, not {json.dumps(value, default=repr)}")
    for wanted, parameter in parameters.items():
        if parameter.default is parameter.empty and wanted not in arguments:
            raise ToolError(f"{name} needs the argument '{wanted}'")


def _without_id(text: str, sandbox_id: str) -> str:
    """A sandbox's id says nothing to the policy, and differs from run to run."""
    return text.removeprefix(f"sandbox {sandbox_id}: ")
