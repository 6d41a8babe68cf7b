"""`k3rl curriculum`: where a run's tau is, and a person's decisions on its next steps."""

from __future__ import annotations

import getpass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from k3rl.errors import UserError

if TYPE_CHECKING:
    from k3rl.config.rewards import ReplaceOverBudget

app = typer.Typer(help="Decide how a run's token budgets narrow.", no_args_is_help=True)
Run = Annotated[Path, typer.Argument(help="The run's folder.", metavar="RUN")]
Domain = Annotated[str | None, typer.Option(help="This domain's step alone; else all that wait.")]
By = Annotated[str | None, typer.Option(help="Who decides; else the user of this machine.")]
Note = Annotated[str, typer.Option(help="Why: kept in the audit trail.")]


def budgets_of(run: Path) -> ReplaceOverBudget:
    """The budget rule of a run's config. Raises `UserError` where it has no curriculum."""
    import yaml
    from pydantic import ValidationError

    from k3rl.config.rewards import ReplaceOverBudget

    file = run / "config.yaml"
    if not file.is_file():
        raise UserError(f"{run} is not a run's folder: it has no config.yaml")
    found = (yaml.safe_load(file.read_text(encoding="utf-8")).get("rewards") or {}).get("budgets") or {}
    if not found.get("curriculum"):
        raise UserError(f"{file}: the run has no curriculum (rewards.budgets.curriculum)")
    try:
        return ReplaceOverBudget.model_validate(found)
    except ValidationError as error:
        raise UserError(f"{file}: rewards.budgets is not valid: {error.errors()[0]['msg']}") from error


@app.command()
def show(run: Run) -> None:
    """tau by domain and effort now, what waits for a decision, and the trail so far."""
    from rewards.curriculum import read_events, replay, tau_at

    budgets = budgets_of(run)
    assert budgets.curriculum is not None
    events = read_events(run)
    states = replay(budgets.curriculum, events)
    console = Console(highlight=False, soft_wrap=True)
    table = Table("domain", "stage", "tau", "next", box=None, pad_edge=False)
    now = tau_at(budgets, states)
    for domain, state in states.items():
        stages = budgets.curriculum.stages[domain]
        further = stages[state.stage] if state.stage < len(stages) else {}
        waits = " (waits for approval)" if state.proposed and not state.approved else ""
        table.add_row(domain, f"{state.stage} of {len(stages)}", _tau(now[domain]), _tau(further) + waits)
    console.print(table)
    for event in events:
        if event["event"] != "observed":
            rest = {k: v for k, v in event.items() if k not in ("time", "event", "step")}
            said = ", ".join(f"{k} {v}" for k, v in rest.items())
            console.print(
                f"{event['time']}  step {event['step']:>5}  {event['event']:9} {said}", markup=False
            )


def _tau(table: dict) -> str:
    return ", ".join(f"{effort} {value:g}" for effort, value in table.items()) or "-"


@app.command()
def approve(run: Run, domain: Domain = None, by: By = None, note: Note = "") -> None:
    """Let the steps that wait be taken: the run narrows tau at its next step."""
    _decide(run, "approved", domain, by, note)


@app.command()
def reject(run: Run, domain: Domain = None, by: By = None, note: Note = "") -> None:
    """Refuse the steps that wait; they are proposed again after `hold_steps`."""
    _decide(run, "rejected", domain, by, note)


def _decide(run: Path, verdict: str, domain: str | None, by: str | None, note: str) -> None:
    from rewards.curriculum import decide

    config = budgets_of(run).curriculum
    assert config is not None
    for event in decide(config, run, verdict, by or getpass.getuser(), domain, note):
        typer.echo(f"{event['domain']}: stage {event['stage']} {verdict} by {event['by']}")
