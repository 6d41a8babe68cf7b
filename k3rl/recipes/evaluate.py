"""Compare models on held-out problems: every model answers the same problems, with the same random streams."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from k3rl.algorithms import Selection
from k3rl.config.jobs import EvaluateJob
from k3rl.config.rollout import RolloutConfig
from k3rl.data import every_effort, load_problems
from k3rl.models import ModelConfig
from k3rl.recipes.journal import Journal
from k3rl.recipes.launch import device_of, ray_cluster, renderer_of, rewards_running, rollout_running
from k3rl.recipes.records import Leaving, lengths
from k3rl.tracking.report import by_effort, evaluation_report
from k3rl.types import Effort, Group, Problem, Trajectory
from rewards.service import ScoredGroup


def run_evaluate(job: EvaluateJob) -> Path:
    """One step per model. Returns the run's folder, with ``evaluation.json`` in it."""
    problems = evaluation_problems(job)
    device = device_of(job)
    names = list(job.models)
    with Journal(job, len(names)) as journal:
        stored = journal.path / "evaluation.json"
        cells: list[dict[str, Any]] = (
            json.loads(stored.read_text()) if stored.exists() and journal.done else []
        )
        with ray_cluster(job.ray):
            for step in journal.steps():
                with journal.progress.phase("evaluate"):
                    scored, speed = answers(job, job.models[names[step]], problems, device, journal)
                cells = [c for c in cells if c["stage"] != names[step]] + table_cells(
                    scored, names[step], speed
                )
                groups = [s.group for s in scored]
                selection = Selection([t for g in groups for t in g.trajectories], [])
                leaving = Leaving([], selection, {g.draw: g.problem for g in groups})
                renderer = renderer_of(job.models[names[step]])
                rows = leaving.rows(step, 0, renderer, job.thinking)
                journal.store.write_rollouts(
                    step, [{**row, "fate": f"evaluated:{names[step]}"} for row in rows]
                )
                journal.store.write_state("evaluation.json", cells)
                with journal.store.new_checkpoint(step):
                    pass  # the answers themselves are the state
                every = lengths([t for g in groups for t in g.trajectories])
                journal.record(
                    step, every, f"{names[step]}: reward {every.get('reward/mean', float('nan')):.3f}"
                )
        print_table(cells, names)
        evaluation_report(journal.store, cells, names)
    return journal.path


def evaluation_problems(job: EvaluateJob) -> list[Problem]:
    """Each problem once at each effort asked for."""
    source = load_problems(job.evaluation.data)
    efforts: tuple[Effort, ...] = job.evaluation.efforts
    if not efforts:
        return list(every_effort(source))
    return [replace(source[i], effort=effort) for i in range(len(source)) for effort in efforts]


def answers(
    job: EvaluateJob, model: ModelConfig, problems: list[Problem], device: str, journal: Journal
) -> tuple[list[ScoredGroup], float]:
    """All problems answered and scored, and the speed in tokens per second."""
    config = rollout_config(job, len(problems))
    draws = iter(enumerate(problems))
    groups: list[Group] = []
    with (
        rollout_running(job, config, model, device) as pool,
        rewards_running(job.rewards, model, job.thinking) as rewards,
    ):
        started, tokens = time.monotonic(), 0
        for event in pool.rollout(0, lambda: next(draws, None)):
            if isinstance(event, Group):
                groups.append(event)
                rewards.submit(event, 0)
            else:
                journal.progress.rollout(event.done, event.wanted, event.tokens_per_s)
                tokens = event.tokens
        speed = tokens / (time.monotonic() - started)
        return sorted(rewards.drain(), key=lambda s: s.group.draw), speed


def rollout_config(job: EvaluateJob, problems: int) -> RolloutConfig:
    """All problems in flight at once; the step ends when the last is done."""
    e = job.evaluation
    return RolloutConfig(
        groups=problems,
        samples=e.samples,
        lambda_=1.0,
        sampling=e.sampling,
        engine=job.engine,
        workers=job.workers,
        max_tokens=e.max_tokens,
        max_context=e.max_context,
        thinking=job.thinking,
        agent=e.agent,
    )


def table_cells(scored: list[ScoredGroup], stage: str, speed: float) -> list[dict[str, Any]]:
    """One cell per domain and effort, as report.json holds them."""
    everything: dict[tuple[str, str], list[Trajectory]] = {}
    for s in scored:
        for t in s.group.trajectories:
            everything.setdefault((t.domain, str(t.effort or "")), []).append(t)
    out = []
    for (domain, effort), trajectories in everything.items():
        numbers = lengths(trajectories)
        scored_ones = [t.reward for t in trajectories if t.reward and t.reward.total is not None]
        solved = [r.components.get("task", r.total) > 0.5 for r in scored_ones]  # before any budget rule
        out.append(
            {
                "stage": stage,
                "domain": domain,
                "effort": effort,
                "reward": numbers.get("reward/mean"),
                "accuracy": sum(solved) / len(solved) if solved else None,
                "thinking_tokens": numbers["length/thinking"],
                "total_tokens": numbers["length/sampled"],
                "tokens_per_s": speed,
                "n": len(trajectories),
            }
        )
    return out


def print_table(cells: list[dict[str, Any]], stages: list[str]) -> None:
    """The table a person waits for."""
    table = Table("domain", "effort", *(f"{s}: {what}" for s in stages for what in ("reward", "thinking")))
    for domain, effort in sorted({(c["domain"], c["effort"]) for c in cells}, key=by_effort):
        row = []
        for stage in stages:
            cell = next(
                (c for c in cells if (c["domain"], c["effort"], c["stage"]) == (domain, effort, stage)), None
            )
            row += (
                ["-", "-"]
                if cell is None
                else [_number(cell["reward"], 3), _number(cell["thinking_tokens"], 1)]
            )
        table.add_row(domain, effort, *row)
    Console().print(table)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
