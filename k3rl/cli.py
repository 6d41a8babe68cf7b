"""`k3rl`: launch jobs, look at runs, check a machine.

Exit codes: 0 done; 1 the run broke (the reason is printed); 2 bad input, found before anything expensive began.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import yaml
from rich.console import Console
from rich.syntax import Syntax

from k3rl.errors import RunError, UserError
from k3rl.recipes.budgets import app as budgets_app
from k3rl.recipes.distill_cli import app as distill_app
from rewards.cli import app as rewards_app
from rewards.cli_curriculum import app as curriculum_app
from rewards.cli_judge import app as judge_app

app = typer.Typer(
    help="Post-train language models the way Kimi K3 was post-trained.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
config_app = typer.Typer(help="Look at a config before it runs.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(rewards_app, name="rewards")
app.add_typer(budgets_app, name="budgets")
app.add_typer(curriculum_app, name="curriculum")
app.add_typer(judge_app, name="judge")
app.add_typer(distill_app, name="distill")

Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="key=value pairs that replace what the file says, such as `steps=2`."),
]
Form = Literal["same", "bf16", "mxfp4"]
Rule = Literal["ceil", "floor", "even"]
ConfigFile = Annotated[
    Path, typer.Argument(help="A YAML config, such as `configs/quickstart.yaml`.", metavar="CONFIG")
]


@app.command()
def run(
    config: ConfigFile,
    overrides: Overrides = None,
    unsafe: Annotated[
        bool,
        typer.Option(help="Where this machine cannot isolate sandboxes: run what policies write regardless."),
    ] = False,
) -> None:
    """Run a job. The same command again resumes it where its last checkpoint left off."""
    if unsafe:
        os.environ["K3RL_UNSAFE"] = "1"  # workers of this machine inherit it
    from k3rl.config.load import load_job
    from k3rl.recipes.run import run_job

    run_job(load_job(config, overrides or []))


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(help="A checkpoint folder, a run's folder, or a preset.")],
    config: Annotated[
        Path, typer.Option(help="An `evaluate` config; its models are replaced by MODEL.")
    ] = Path("configs/evaluate.yaml"),
    overrides: Overrides = None,
) -> None:
    """Score a model on held-out problems and print the table."""
    from k3rl.config.load import load_job
    from k3rl.recipes.run import latest_model, run_job

    path = latest_model(Path(model)) if Path(model).is_dir() else model
    settings = [f"models={json.dumps({'model': {'path': str(path)}})}", *(overrides or [])]
    run_job(load_job(config, settings))


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="A checkpoint folder, a run's folder, or a preset.")],
    host: Annotated[str, typer.Option(help="Anything but loopback asks for a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free port.")] = 8000,
    name: Annotated[str, typer.Option(help="What clients call the model.")] = "model",
    max_slots: Annotated[int, typer.Option(help="Requests that run at once.")] = 16,
    thinking: Annotated[bool, typer.Option(help="Let it think before it answers.")] = True,
) -> None:
    """Offer a model on the native engine as an OpenAI-compatible chat API, with tools."""
    import secrets

    import uvicorn

    from k3rl.config.rewards import JudgeModel
    from k3rl.config.rollout import NativeEngineConfig
    from k3rl.models import ModelConfig
    from k3rl.recipes.journal import resolved
    from k3rl.recipes.judges import chat_engine
    from rollout.serving import make_app

    served = JudgeModel(
        model=resolved(ModelConfig(path=model)),
        engine=NativeEngineConfig(max_slots=max_slots),
        thinking=thinking,
    )
    token = "" if host in ("127.0.0.1", "::1", "localhost") else secrets.token_urlsafe(32)
    chat = chat_engine(served, name, "auto")
    print(f"{model} at http://{host}:{port}/v1 as '{name}'" + (f"; token {token}" if token else ""))
    try:
        uvicorn.run(make_app(chat, token), host=host, port=port, log_level="warning")
    finally:
        chat.close()


@app.command()
def view(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Run folders, folders that hold runs, or files and folders of messages (parquet, JSON lines, saved "
            "data sets, results of verifiers or prime-rl).",
            metavar="RUN...",
        ),
    ],
    port: Annotated[int, typer.Option(help="0: any free port.")] = 8800,
    host: Annotated[
        str, typer.Option(help="Anything but loopback needs the access token that is printed.")
    ] = "127.0.0.1",
    text: Annotated[bool, typer.Option("--text", help="List and show in the terminal instead.")] = False,
    filter_: Annotated[
        str,
        typer.Option("--filter", help='With --text or --bundle: such as `reward < 0.2 and text ~ "foo"`.'),
    ] = "",
    sort: Annotated[
        str, typer.Option(help="With --text or --bundle: a column; -reward for largest first.")
    ] = "",
    limit: Annotated[
        int | None, typer.Option(help="Rows to list with --text (20), or to hold with --bundle (200).")
    ] = None,
    show: Annotated[
        str, typer.Option(help="With --text: one rollout in full, as [RUN:]STEP/DRAW.SAMPLE.")
    ] = "",
    bundle: Annotated[
        Path | None,
        typer.Option(
            help="Write one HTML file into this folder that opens without a server; secrets redacted."
        ),
    ] = None,
    reward: Annotated[
        list[str] | None, typer.Option(help="A reward that may score again besides the built-in ones.")
    ] = None,
    module: Annotated[
        list[str] | None, typer.Option("--module", "-m", help="A module or .py file with such rewards.")
    ] = None,
) -> None:
    """Open runs in the browser: metrics, and every rollout with its tokens."""
    from k3rl.viewer import serve, show_text

    if text:
        show_text(runs, filter=filter_, sort=sort, limit=limit or 20, show=show)
    elif bundle is not None:
        from k3rl.viewer.bundle import write_bundle

        written, facts = write_bundle(runs, bundle, filter_, sort, limit or 200)
        typer.echo(
            f"{written}: {facts['rollouts']} of {facts['total']} rollouts, {facts['redacted']} secrets redacted"
        )
    else:
        serve(runs, port=port, host=host, rewards=tuple(reward or ()), modules=tuple(module or ()))


@rewards_app.command("rescore")
def rescore(
    run: Annotated[Path, typer.Argument(help="A run's folder, or a rollout file.", metavar="RUN")],
    reward: Annotated[
        str, typer.Option(help="A name, `package.module:function`, `file.py:function`, `problem`.")
    ],
    filter_: Annotated[str, typer.Option("--filter", help="Which rollouts, such as `step > 10`.")] = "",
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="An argument of the reward, such as limit=200 (YAML).")
    ] = None,
    limit: Annotated[int, typer.Option(help="Rollouts to score, newest first.")] = 1000,
    text_only: Annotated[
        bool,
        typer.Option("--text-only", help="The reward reads the text alone: score what had a sandbox too."),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="All rows, before and after, as JSON lines.")] = None,
    module: Annotated[
        list[str] | None, typer.Option("--module", "-m", help="A module or .py file with rewards.")
    ] = None,
    processes: Annotated[int, typer.Option(help="Calls at a time.")] = 1,
    timeout_s: Annotated[float, typer.Option(help="Limit of one call, in seconds.")] = 10.0,
) -> None:
    """Score stored rollouts by a changed reward, without the model: before and after, side by side."""
    from k3rl.viewer.rescore_text import rescore_text
    from rewards.cli import _arguments

    more = {"arguments": _arguments(set_ or []), "text_only": text_only}
    more |= {"modules": tuple(module or ()), "processes": processes, "timeout_s": timeout_s}
    rescore_text(run, reward, filter_, limit, out, **more)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run's folder, or one of its checkpoints.", metavar="RUN")],
    to: Annotated[Path, typer.Option(help="Folder to make.")],
    form: Annotated[
        Form,
        typer.Option(
            "--format", help="`same` as trained, `bf16`, or `mxfp4`: packed experts, the rest bf16."
        ),
    ] = "same",
    rule: Annotated[
        Rule | None, typer.Option(help="MXFP4: how a block's scale is chosen; as in training by default.")
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="MXFP4: patterns of linear modules to pack; as in training by default, else routed experts."
        ),
    ] = None,
) -> None:
    """Write a run's last model as a folder that transformers and vLLM load."""
    from k3rl.trainer.export import export as write
    from k3rl.trainer.export import packer_for

    packer = packer_for(run, target or (), rule)
    written = write(run, to, form=form, packer=packer)
    for layer, error in packer.errors.items():
        typer.echo(f"{layer}  relative error {error:.4f}")
    typer.echo(f"{written}: {form}")


@app.command()
def profile(
    run: Annotated[Path, typer.Argument(help="A run's folder, or a pipeline's.", metavar="RUN")],
    trace: Annotated[
        Path | None, typer.Option(help="Also write a trace for ui.perfetto.dev here (of one run).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Numbers alone.")] = False,
) -> None:
    """Where a run's time went: phases, idle shares of its workers, Ray's overhead, bytes moved."""
    from k3rl import profile as profiling

    runs = profiling.runs_in(run)
    if trace is not None and len(runs) > 1:
        raise UserError(f"{run} holds {len(runs)} runs; a trace is of one of them, such as {runs[0]}")
    found = [profiling.profile(r) for r in runs]
    if as_json:
        typer.echo(json.dumps([p.as_json() for p in found], indent=1))
    for p in found if not as_json else ():
        profiling.show(p)
    if trace is not None:
        typer.echo(f"{profiling.write_trace(runs[0], trace)}: open it at ui.perfetto.dev", err=as_json)


@app.command()
def doctor() -> None:
    """What is installed, which devices there are, and for each thing missing the command that brings it."""
    from k3rl.doctor import examine, show

    checks = examine()
    show(checks)
    if any(check.required and not check.ok for check in checks):
        raise typer.Exit(1)


@config_app.command("show")
def config_show(config: ConfigFile, overrides: Overrides = None) -> None:
    """Print the resolved config, every default filled in."""
    from k3rl.config.load import dump_job, load_job

    text = dump_job(load_job(config, overrides or []))
    if sys.stdout.isatty():
        Console().print(Syntax(text, "yaml", background_color="default"))
    else:
        typer.echo(text, nl=False)


@config_app.command("check")
def config_check(config: ConfigFile, overrides: Overrides = None) -> None:
    """Validate a config, and open its data, rewards and models, without running it."""
    from k3rl.config.load import load_job
    from k3rl.recipes.run import check_job

    job = load_job(config, overrides or [])
    check_job(job)
    typer.echo(f"{config}: ok ({job.kind} job '{job.name}')")


@config_app.command("schema")
def config_schema(
    yaml_output: Annotated[bool, typer.Option("--yaml", help="YAML instead of JSON.")] = False,
) -> None:
    """Print the JSON schema of all jobs, with every field's description."""
    from k3rl.config.load import job_schema

    schema: dict[str, Any] = job_schema()
    typer.echo(yaml.safe_dump(schema, sort_keys=False) if yaml_output else json.dumps(schema, indent=2))


def main() -> None:
    """Entry point: one sentence for a person's mistakes, the trace for ours."""
    logging.basicConfig(
        level=os.environ.get("K3RL_LOG", "WARNING"), format="%(levelname)s %(name)s: %(message)s"
    )
    error_console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        app()
    except UserError as error:
        error_console.print(f"k3rl: {error}", markup=False)
        sys.exit(2)
    except RunError as error:
        error_console.print(f"k3rl: the run stopped: {error}", markup=False)
        sys.exit(1)
    except KeyboardInterrupt:
        error_console.print("k3rl: interrupted; the same command resumes from the last checkpoint")
        sys.exit(130)


if __name__ == "__main__":
    main()
