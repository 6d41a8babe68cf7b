"""`k3rl rewards`: look at rewards, try one on stored rollouts, offer them over HTTP."""

from __future__ import annotations

import inspect
import json
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from k3rl.errors import UserError

if TYPE_CHECKING:
    from rewards.trial import Case, Trial

app = typer.Typer(help="Work on rewards without training.", no_args_is_help=True)
LOOPBACK = ("127.0.0.1", "::1", "localhost")

Modules = Annotated[
    list[str] | None,
    typer.Option("--module", "-m", help="A module or .py file whose rewards get names here."),
]
RewardName = Annotated[
    str, typer.Argument(help="A name, `package.module:function` or `file.py:function`.", metavar="NAME")
]


@app.command("list")
def list_rewards(module: Modules = None) -> None:
    """All rewards that have a name."""
    from rewards.registry import get_reward, known_names, load_modules

    load_modules(module or [])
    table = Table("name", "scope", "runs in", "what it says", box=None, pad_edge=False)
    for name in known_names():
        found = get_reward(name)
        first = " ".join(found.doc.split("\n\n")[0].split()).partition(". ")[0]
        table.add_row(name, found.scope, "the worker" if found.trusted else "its own process", _plain(first))
    _console().print(table)


@app.command()
def show(name: RewardName, module: Modules = None) -> None:
    """One reward: what it does, what it takes, where it comes from."""
    from rewards.registry import get_reward, load_modules

    load_modules(module or [])
    found = get_reward(name)
    file, line = inspect.getsourcefile(found.function), inspect.getsourcelines(found.function)[1]
    console = _console()
    console.print(f"{found.name}  ({found.scope}; {file}:{line})", markup=False)
    console.print(found.doc or "It has no docstring.", markup=False)
    table = Table("argument", "type", "default", box=None, pad_edge=False)
    for parameter in list(inspect.signature(found.function).parameters.values())[1:]:
        if not (found.sandbox and parameter.name == "sandbox"):
            default = "required" if parameter.default is parameter.empty else repr(parameter.default)
            unknown = parameter.annotation is parameter.empty
            kind = "" if unknown else inspect.formatannotation(parameter.annotation)
            table.add_row(parameter.name, kind, default)
    if table.row_count:
        console.print(table)
    traits = {
        "sandbox on each call": found.sandbox,
        "new process for each call": found.fresh,
        "verdicts cached": found.deterministic,
        "async": found.is_async,
    }
    console.print("; ".join(label for label, holds in traits.items() if holds), markup=False)


@app.command("test")
def try_on_rollouts(
    name: Annotated[
        str, typer.Argument(help="The reward, or `problem` for the problems' own.", metavar="NAME")
    ],
    rollouts: Annotated[Path, typer.Option(help="A run's folder, or a parquet file of rollouts.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="An argument of the reward, such as limit=200 (YAML).")
    ] = None,
    limit: Annotated[int, typer.Option(help="Trajectories to score.")] = 1000,
    processes: Annotated[int, typer.Option(help="Calls at a time.")] = 1,
    timeout_s: Annotated[float, typer.Option(help="Limit of one call, in seconds.")] = 10.0,
    samples: Annotated[int, typer.Option(help="How many cases of each kind to print.")] = 3,
    module: Modules = None,
    as_json: Annotated[bool, typer.Option("--json", help="Numbers as JSON, and nothing else.")] = False,
) -> None:
    """Score stored rollouts: distribution, disagreements with the stored reward, slowest cases, errors."""
    from k3rl.config.rewards import RewardConfig
    from rewards.stored import read_groups, rollout_files, run_of
    from rewards.trial import try_reward

    config = RewardConfig(processes=processes, timeout_s=timeout_s, modules=tuple(module or ()), retries=0)
    inside_run = run_of(rollout_files(rollouts)[0]) is not None
    groups = read_groups(rollouts, problems=inside_run, limit=limit)
    trial = try_reward(name, groups, _arguments(set_ or []), config)
    if as_json:
        typer.echo(json.dumps(trial.summary()))
    else:
        print_trial(trial, samples)


def _arguments(settings: list[str]) -> dict[str, Any]:
    import yaml

    found = {}
    for text in settings:
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            raise UserError(f"--set {text}: it is not of the form key=value")
        try:
            found[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(f"--set {text}: the value is not YAML") from error
    return found


def print_trial(trial: Trial, samples: int) -> None:
    """The report for a person."""
    console, numbers = _console(), trial.summary()
    mean = (
        "-" if numbers["mean"] is None else f"{numbers['mean']:.4f} (standard deviation {numbers['std']:.4f})"
    )
    console.print(
        f"{trial.reward}: {numbers['scored']} of {numbers['trajectories']} trajectories scored", markup=False
    )
    console.print(f"mean {mean}; {1000 * numbers['seconds_s_mean']:.2f} ms a call")
    most = max((count for _, count in numbers["histogram"]), default=1)
    for label, count in numbers["histogram"]:
        console.print(f"  {label:>18} {count:6} {'█' * round(40 * count / most)}", markup=False)
    for component, value in numbers["components"].items():
        console.print(f"  mean of {component}: {value:.4f}", markup=False)
    apart = trial.disagreements()
    console.print(f"\n{len(apart)} differ from the stored reward")
    for case in apart[:samples]:
        _print_case(console, case)
    if trial.failures:
        console.print(f"\n{len(trial.failures)} were not scored")
        for case in trial.failures[:samples]:
            _print_case(console, case)
    console.print("\nslowest")
    for case in trial.slowest(samples):
        console.print(
            f"  {1000 * case.seconds_s:8.1f} ms  step {case.step}, trajectory {case.id}", markup=False
        )
    contrasts = trial.contrasts(samples)
    if contrasts:
        table = Table("question", "best", "worst", title="side by side", show_lines=True)
        for best, worst in contrasts:
            cells = [f"{c.value:g}\n{_short(c.content, 300)}" for c in (best, worst)]
            table.add_row(*map(_plain, (_short(best.question, 200), *cells)))
        console.print(table)


def _print_case(console: Console, case: Case) -> None:
    value = case.outcome if case.value is None else f"{case.value:g}"
    stored = "none" if case.stored is None else f"{case.stored:g}"
    head = f"  step {case.step}, trajectory {case.id} of '{case.problem_id}': {value}, stored {stored}"
    console.print(head, markup=False)
    for label, text in (("asked", case.question), ("said", case.content), ("why", case.explanation)):
        if text.strip():
            console.print(f"      {label}: {_short(text, 160)}", markup=False)


def _short(text: str, length: int) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= length else f"{flat[: length - 3]}..."


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(text)


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True)


@app.command()
def serve(
    host: Annotated[
        str, typer.Option(help="Anything but loopback needs the token that is printed.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free port.")] = 8900,
    processes: Annotated[int, typer.Option(help="Killable processes.")] = 2,
    timeout_s: Annotated[float, typer.Option(help="Limit of one call, in seconds.")] = 10.0,
    memory_mb: Annotated[int, typer.Option(help="Memory that a reward's process may take.")] = 2048,
    module: Modules = None,
) -> None:
    """Offer the rewards that have a name to runs elsewhere: `reward: http://HOST:PORT/NAME`."""
    import socket

    import uvicorn

    from k3rl.config.rewards import RewardConfig
    from rewards.remote import TOKEN_VARIABLE
    from rewards.server import RewardServer, make_app

    token = os.environ.get(TOKEN_VARIABLE, "")
    if host not in LOOPBACK and not token:
        token = secrets.token_urlsafe(24)
        typer.echo(f"{TOKEN_VARIABLE}={token}   (set it where the rewards are called)")
    config = RewardConfig(
        processes=processes, timeout_s=timeout_s, memory_mb=memory_mb, modules=tuple(module or ())
    )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = RewardServer(config)
    with socket.socket(family) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
            listening.listen(128)  # before the address is said: who reads it may come at once
        except OSError as error:
            raise UserError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        typer.echo(f"rewards at http://{host}:{listening.getsockname()[1]}/NAME; Ctrl-C ends it")
        try:
            uvicorn.Server(uvicorn.Config(make_app(server, token), log_level="warning")).run([listening])
        finally:
            server.close()
