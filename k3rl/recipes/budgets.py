"""`k3rl budgets estimate`: a cold-start model answers a set of problems, and each gets its b0 and l0 (spec/02 §3).

The model, the problems and the sampling are those of an `evaluate` config with one model. Its run is kept and resumed
like any other; the result is a JSONL file that a job's `data` reads, with the columns `budget_tokens` and
`reference_length`. How a budget follows from the answers: `rewards.estimate`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3rl.errors import UserError

if TYPE_CHECKING:
    from k3rl.config.jobs import BudgetsJob
    from k3rl.types import Problem
    from rewards.estimate import Answer, Budget

app = typer.Typer(help="Token budgets of problems.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Token budgets of problems."""


@app.command()
def estimate(
    source: Annotated[
        Path,
        typer.Argument(help="An `evaluate` config with one model, or the run of one.", metavar="CONFIG|RUN"),
    ],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value pairs for the config.")] = None,
    out: Annotated[Path, typer.Option(help="The JSONL file to write.")] = Path("problems.jsonl"),
    estimator: Annotated[str, typer.Option(help="percentile, mean, longest or shortest.")] = "percentile",
    rho: Annotated[
        float, typer.Option(help="Which percentile of the correct answers' lengths, as a share.")
    ] = 0.9,
    correct_at: Annotated[
        float, typer.Option(help="A task reward of at least this is a correct answer.")
    ] = 0.5,
) -> None:
    """Run a cold-start model over problems and write their budgets beside them."""
    run = source if source.is_dir() else _answered(source, overrides or [])
    typer.echo(write_budgets(run, out, estimator, rho, correct_at))


def run_budgets(job: BudgetsJob) -> Path:
    """`kind: budgets`. Returns the run's folder, with ``problems.jsonl`` in it."""
    from k3rl.recipes.evaluate import run_evaluate

    run = run_evaluate(job)
    whole = getattr(job.rewards.budgets, "whole_trajectory_domains", None)
    write_budgets(run, run / "problems.jsonl", job.estimator, job.rho, job.correct_at, whole)
    return run


def write_budgets(
    run: Path,
    out: Path,
    estimator: str,
    rho: float,
    correct_at: float,
    whole_trajectory_domains: Sequence[str] | None = None,
) -> str:
    """Budgets of a run's problems from its answers, to ``out``; returns what was done, in words."""
    from rewards.estimate import estimate as estimate_budgets

    problems = {p.id: p for p in _problems(run)}
    budgets = estimate_budgets(read_answers(run, correct_at, whole_trajectory_domains), estimator, rho)
    lacking = sorted(set(problems) - set(budgets))
    if lacking:
        raise UserError(f"{run}: {len(lacking)} problems have no answers, such as '{lacking[0]}'")
    write_problems(out, [problems[name] for name in problems], budgets)
    rules = Counter(b.rule for b in budgets.values())
    return f"{out}: {len(problems)} problems ({', '.join(f'{n} by {rule}' for rule, n in rules.items())})"


@app.command()
def check(
    run: Annotated[Path, typer.Argument(help="A run's folder, or a pipeline's.", metavar="RUN")],
) -> None:
    """Recompute the budget rule from the stored rows: lengths by effort, and whether -1 stands where it must."""
    from statistics import fmean

    from rich.console import Console
    from rich.table import Table

    from k3rl.errors import RunError
    from k3rl.types import Effort
    from rewards.audit import audit

    found, order = audit(run), [str(e) for e in Effort]
    table = Table(
        "model", "domain", "effort", "n", "T", "of b0", "over", "T against the effort below", box=None
    )
    below: dict[tuple[str, str], float] = {}
    for (stage, domain, effort), cell in sorted(
        found.cells.items(), key=lambda item: (*item[0][:2], order.index(item[0][2]))
    ):
        mean, last = fmean(cell.lengths), below.get((stage, domain))
        table.add_row(
            stage or "-",
            domain,
            effort,
            str(len(cell.lengths)),
            f"{mean:.1f}",
            f"{fmean(cell.shares):.2f}",
            str(cell.over),
            f"{mean / last:.2f}x" if last else "-",
        )
        below[stage, domain] = mean
    Console(highlight=False).print(table)
    typer.echo(
        f"{found.rows} rewarded trajectories with a budget, {found.over} over it, {len(found.broken)} broken"
    )
    if found.broken:
        raise RunError(f"{run}: the budget rule does not hold in {len(found.broken)} rows: {found.broken[0]}")


def _answered(config: Path, overrides: Sequence[str]) -> Path:
    """The run of an evaluate config, made or gone on with."""
    from k3rl.config.jobs import EvaluateJob
    from k3rl.config.load import load_job
    from k3rl.recipes.run import run_job

    job = load_job(config, list(overrides))
    if not isinstance(job, EvaluateJob) or len(job.models) != 1:
        raise UserError(f"{config}: budgets are estimated by an 'evaluate' job with one model")
    return run_job(job)


def _problems(run: Path) -> Iterable[Problem]:
    import yaml
    from pydantic import TypeAdapter

    from k3rl.data import load_problems
    from k3rl.data.config import DataConfig
    from k3rl.store import RunStore

    RunStore.open(run)
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    data = (config.get("evaluation") or {}).get("data")
    if data is None:
        raise UserError(f"{run} is not the run of an 'evaluate' job")
    found = load_problems(TypeAdapter(DataConfig).validate_python(data))
    return (found[i] for i in range(len(found)))


def read_answers(
    run: Path, correct_at: float, whole_trajectory_domains: Sequence[str] | None = None
) -> list[Answer]:
    """Scored answers of a run; those cut off by a limit are never correct, and as long as they got. In the domains
    named, all sampled tokens count; None: in those of the budget rule's default."""
    from k3rl.config.rewards import ReplaceOverBudget
    from k3rl.types import Channel, Status
    from rewards.budgets import counted_tokens
    from rewards.estimate import Answer
    from rewards.stored import read_groups

    whole = whole_trajectory_domains
    if whole is None:
        whole = ReplaceOverBudget().whole_trajectory_domains
    answers = []
    for group in read_groups(run, problems=False):
        for view, reward in zip(group.views, group.rewards, strict=True):
            task = reward.components.get("task", reward.total)
            if task is None:
                continue  # its grader failed: nothing is known of this answer
            t = view.trajectory
            answers.append(
                Answer(
                    problem_id=t.problem_id,
                    domain=t.domain,
                    length=counted_tokens(t, whole),
                    response_tokens=t.channel_tokens(Channel.RESPONSE),
                    correct=task >= correct_at and t.status is Status.COMPLETE,
                )
            )
    return answers


def write_problems(out: Path, problems: Sequence[Problem], budgets: dict[str, Budget]) -> None:
    """One JSON object a problem, as `data: {type: jsonl}` reads it; whole or not there."""
    from k3rl.store.files import replacing

    lines = []
    for problem in problems:
        budget = budgets[problem.id]
        row: dict[str, Any] = {
            "id": problem.id,
            "domain": problem.domain,
            "messages": problem.messages,
            "reward": problem.reward,
            "budget_tokens": budget.budget_tokens,
            "reference_length": budget.reference_length,
            "budget_rule": budget.rule,
            "solved": budget.solved,
            "answers": budget.answers,
        }
        row |= {"effort": str(problem.effort)} if problem.effort else {}
        row |= {"tools": problem.tools} if problem.tools else {}
        lines.append(json.dumps({**problem.metadata, **row}, ensure_ascii=False))
    with replacing(out) as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
