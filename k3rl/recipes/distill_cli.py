"""`k3rl distill collect`: the teachers of a `distill` config answer its problems, for SFT on what they wrote."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from k3rl.errors import UserError

if TYPE_CHECKING:
    from k3rl.config.jobs import CollectJob, DistillJob

app = typer.Typer(help="Distillation besides training.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Distillation besides training."""


@app.command()
def collect(
    config: Annotated[
        Path,
        typer.Argument(help="A `distill` or `collect` config; of a pipeline, see --job.", metavar="CONFIG"),
    ],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value pairs for the config.")] = None,
    problems: Annotated[int, typer.Option(help="Problems to draw from the config's data.")] = 1000,
    samples: Annotated[int, typer.Option(help="Answers to each.")] = 1,
    job: Annotated[str, typer.Option(help="A pipeline's job, whose earlier jobs have run.")] = "",
) -> None:
    """Sample teachers' answers, each in its own cells; the folder it prints is what SFT reads:
    `data: {type: rollouts, path: FOLDER, min_reward: 0.5}`."""
    from k3rl.config.jobs import CollectJob, DistillJob, PipelineJob
    from k3rl.config.load import load_job
    from k3rl.recipes.pipeline import with_results
    from k3rl.recipes.run import run_job

    asked = load_job(config, overrides or [])
    if isinstance(asked, PipelineJob):
        if job not in asked.jobs:
            raise UserError(f"{config} is a pipeline: name one of its distill jobs with --job")
        runs = {name: Path(part.runs) / part.name for name, part in asked.jobs.items()}
        asked = with_results(asked.jobs[job], runs)
    if isinstance(asked, DistillJob):
        asked = from_distill(asked, problems, samples)
    if not isinstance(asked, CollectJob):
        raise UserError(f"{config}: a '{asked.kind}' job has no teachers to collect from")
    typer.echo(run_job(asked))


def from_distill(job: DistillJob, problems: int, samples: int) -> CollectJob:
    """The collect job with a distill job's teachers, problems, sampling and rewards."""
    from k3rl.config.jobs import CollectJob, EvaluationConfig

    if remote := [t for t in job.teachers if t.remote is not None]:
        raise UserError(
            f"teachers: '{remote[0].name}' is remote, and a server only scores: name its model to sample"
        )
    rollout = job.rollout
    shared = {name: getattr(job, name) for name in ("runs", "seed", "device", "ray", "tracking", "thinking")}
    return CollectJob(
        **shared,
        name=f"{job.name}-collected",
        teachers=job.teachers,
        problems=problems,
        evaluation=EvaluationConfig(
            data=job.data,
            samples=samples,
            sampling=rollout.sampling,
            max_tokens=rollout.max_tokens,
            max_context=rollout.max_context,
            agent=rollout.agent,
        ),
        engine=rollout.engine,
        workers=rollout.workers,
        rewards=job.rewards,
    )
