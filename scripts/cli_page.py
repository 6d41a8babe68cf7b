"""The command reference as Markdown, from the commands. The documentation's build puts it at reference/cli.md."""

from __future__ import annotations

from typing import Any

import typer

from k3rl.cli import app

HEAD = """# Commands

Exit codes: 0 done; 1 the run broke, and the reason is printed; 2 bad input, found before anything expensive began.
Every command and group takes `--help`.
"""


def page() -> str:
    return "\n".join([HEAD, *sections(typer.main.get_command(app), "k3rl")])


def sections(command: Any, name: str) -> list[str]:
    """A command's section; a group's are those of its commands."""
    if below := getattr(command, "commands", None):
        return [s for key, child in below.items() for s in sections(child, f"{name} {key}")]
    usage = " ".join([name, *(metavar(p) for p in command.params if shown(p))])
    lines = [f"## {name}", "", command.help or "", "", f"`{usage}`", ""]
    rows = [f"| {names(p)} | {help_of(p)} |" for p in command.params if help_of(p)]
    if rows:
        lines += ["| | |", "| --- | --- |", *rows, ""]
    return ["\n".join(lines)]


def shown(parameter: Any) -> bool:
    return parameter.param_type_name == "argument" or parameter.required


def metavar(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper()
    name = parameter.opts[0] + " " + name if parameter.param_type_name == "option" else name
    name += "..." if parameter.nargs == -1 and not name.endswith("...") else ""
    return name if parameter.required else f"[{name}]"


def names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{(parameter.metavar or parameter.name.upper())}`"
    return ", ".join(f"`{o}`" for o in [*parameter.opts, *parameter.secondary_opts])


def help_of(parameter: Any) -> str:
    text = " ".join((getattr(parameter, "help", None) or "").split()).replace("|", "\\|")
    default = parameter.default
    plain = isinstance(default, str | int | float) and not isinstance(default, bool) and default != ""
    return f"{text} Default: `{default}`." if text and plain and not parameter.required else text


if __name__ == "__main__":
    print(page())
