"""`k3rl judge`: one tournament from the command line, with everything the judge did."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from k3rl.errors import UserError

app = typer.Typer(help="Try the agentic judge.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Try the agentic judge."""


@app.command("try")
def try_(
    file: Annotated[Path, typer.Argument(help="JSON: {question, answers, criteria}.", metavar="FILE")],
    rule: Annotated[str | None, typer.Option(help="A rule as the judge: package.module:function.")] = None,
    url: Annotated[str | None, typer.Option(help="An OpenAI-compatible endpoint, up to /v1.")] = None,
    model: Annotated[str, typer.Option(help="The endpoint's model.")] = "",
    tournament: Annotated[str, typer.Option(help="all_pairs, swiss or elimination.")] = "all_pairs",
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON.")] = False,
) -> None:
    """Judge some answers to one question; prints the ranking, the rubrics, each judgement's scores and its health."""
    from rewards.grm.ratings import bradley_terry
    from rewards.grm.reward import Court, make_judge
    from rewards.grm.tournament import play

    question, answers, criteria = _read(file)
    if (rule is None) == (url is None):
        raise UserError(
            "give either --rule package.module:function or --url http://HOST:PORT/v1 with --model"
        )
    spec = {"type": "rule", "function": rule} if rule else {"type": "endpoint", "url": url, "model": model}

    async def run() -> tuple[Any, Court]:
        court = Court(make_judge(spec), question, answers, criteria)
        try:
            return await play(tournament, len(answers), court.pair), court
        finally:
            await court.judge.close()

    result, court = asyncio.run(run())
    ratings = bradley_terry(len(answers), result.played)
    if as_json:
        print(
            json.dumps({"ratings": ratings.tolist(), "health": result.health(), "judgements": court.traces})
        )
        return
    console = Console(highlight=False)
    table = Table("rank", "rating", "answer")
    for rank, i in enumerate(sorted(range(len(answers)), key=lambda i: -ratings[i]), 1):
        table.add_row(str(rank), f"{ratings[i]:+.2f}", answers[i][:100].replace("[", "\\["))
    console.print(table)
    for trace in court.traces:
        rubric = ", ".join(f"{c['name']} ({c['weight']:g})" for c in trace["rubric"])
        console.print(f"{trace['first']} against {trace['second']}: {trace['stage']}; {rubric}", markup=False)
        for label, scores in trace["scores"].items():
            console.print(f"   {label} {scores}: {trace['justifications'][label]}", markup=False)
        for step in trace["steps"]:
            if not step["accepted"]:
                console.print(f"   {step['tool']}: {step['answer']}", markup=False)
    for failure in court.failures:
        console.print(f"failed: {failure}", markup=False)
    console.print("  ".join(f"{name} {value:.3g}" for name, value in result.health().items()), markup=False)
    if not result.played:
        raise UserError("no judgement stands: there is no ranking")


def _read(file: Path) -> tuple[str, list[str], list[Any]]:
    from rewards.grm.protocol import Criterion

    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        question, answers = content["question"], content["answers"]
        criteria = [Criterion(**row) for row in content.get("criteria", [])]
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{file}: no JSON: {error.msg} in line {error.lineno}") from None
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{file}: it must hold 'question', 'answers' and, if any, 'criteria' ({error})"
        ) from None
    if not isinstance(question, str) or not isinstance(answers, list) or len(answers) < 2:
        raise UserError(f"{file}: 'question' must be text and 'answers' a list of at least two")
    if not all(isinstance(a, str) for a in answers):
        raise UserError(f"{file}: every answer must be text")
    return question, answers, criteria
