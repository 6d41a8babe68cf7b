"""Compare models on held-out problems: every model answers the same problems, with the same random streams. An ensemble
is several models, each in its (domain, effort) cells."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from distill.routing import Routing
from k3rl.algorithms import Selection
from k3rl.chat import Renderer
from k3rl.config.distill import TeacherConfig
from k3rl.config.jobs import EvaluateJob
from k3rl.config.rollout import RolloutConfig
from k3rl.data import every_effort, load_problems
from k3rl.models import ModelConfig
from k3rl.recipes.journal import Journal
from k3rl.recipes.launch import device_of, ray_cluster, renderer_of, rewards_running, rollout_running
from k3rl.recipes.records import Leaving, lengths
from k3rl.tracking.report import by_effort, evaluation_report
from k3rl.types import Author, Effort, Group, Problem, Status, Trajectory
from rewards.service import ScoredGroup

SIDE_BY_SIDE = 3
"""So many models have columns of their own in the printed table; more have rows."""


def run_evaluate(job: EvaluateJob) -> Path:
    """One step per model or ensemble. Returns the run's folder, with ``evaluation.json`` in it."""
    problems = evaluation_problems(job)
    device = device_of(job)
    names = [*job.models, *job.ensembles]
    with Journal(job, len(names)) as journal:
        stored = journal.path / "evaluation.json"
        cells: list[dict[str, Any]] = (
            json.loads(stored.read_text()) if stored.exists() and journal.done else []
        )
        with ray_cluster(job.ray):
            for step in journal.steps():
                name = names[step]
                first = job.models[name] if name in job.models else job.ensembles[name][0].model
                renderer = renderer_of(first)
                with journal.progress.phase("evaluate"):
                    if name in job.models:
                        scored, speed = answers(job, first, problems, device, journal)
                    else:
                        scored, speed = routed_answers(job, job.ensembles[name], problems, device, journal)
                cells = [c for c in cells if c["stage"] != name]
                cells += table_cells(scored, name, speed, renderer, job.thinking)
                groups = [s.group for s in scored]
                selection = Selection([t for g in groups for t in g.trajectories], [])
                leaving = Leaving([], selection, {g.draw: g.problem for g in groups})
                rows = leaving.rows(step, 0, renderer, job.thinking)
                journal.store.write_rollouts(step, [{**row, "fate": f"evaluated:{name}"} for row in rows])
                journal.store.write_state("evaluation.json", cells)
                with journal.store.new_checkpoint(step):
                    pass  # the answers themselves are the state
                every = lengths([t for g in groups for t in g.trajectories])
                journal.record(step, every, f"{name}: reward {every.get('reward/mean', float('nan')):.3f}")
        print_table(cells, names)
        zero_one = (
            (job.normalise.zero, job.normalise.one, job.normalise.min_headroom) if job.normalise else None
        )
        evaluation_report(journal.store, cells, names, zero_one)
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
        return sorted(rewards.drain(last=True), key=lambda s: s.group.draw), speed


def routed_answers(
    job: EvaluateJob,
    teachers: Sequence[TeacherConfig],
    problems: list[Problem],
    device: str,
    journal: Journal,
) -> tuple[list[ScoredGroup], float]:
    """The same, each problem by the teacher of its cell, in the prompt form that the teacher was trained with. What
    comes back carries the problem's own effort and the prompt that asks for it."""
    routing = Routing(teachers)
    mine: dict[int, list[int]] = defaultdict(list)
    for number, problem in enumerate(problems):
        mine[routing.teacher_of(problem)].append(number)
    out: list[ScoredGroup] = []
    seconds = tokens = 0.0
    for index, numbers in sorted(mine.items()):
        teacher = teachers[index]
        renderer = renderer_of(teacher.model)
        posed = [replace(problems[i], effort=teacher.reads(problems[i].effort)) for i in numbers]
        scored, speed = answers(job, teacher.model, posed, device, journal)
        for s in scored:
            number = numbers[s.group.draw]
            problem = problems[number]
            prompt = renderer.encode_prompt(
                problem.messages, problem.tools, problem.effort, thinking=job.thinking
            )
            own = [
                replace(t, draw=number, effort=problem.effort, prompt_ids=prompt)
                for t in s.group.trajectories
            ]
            out.append(replace(s, group=Group(problem, number, own)))
        written = sum(t.sampled_tokens for s in scored for t in s.group.trajectories)
        tokens, seconds = tokens + written, seconds + written / speed if speed else seconds
    return sorted(out, key=lambda s: s.group.draw), tokens / seconds if seconds else 0.0


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


def table_cells(
    scored: list[ScoredGroup], stage: str, speed: float, renderer: Renderer, thinking: bool
) -> list[dict[str, Any]]:
    """One cell per domain and effort, as report.json holds them."""
    everything: dict[tuple[str, str], list[list[Trajectory]]] = {}
    for s in scored:
        key = (s.group.problem.domain, str(s.group.problem.effort or ""))
        everything.setdefault(key, []).append(s.group.trajectories)
    out = []
    for (domain, effort), groups in everything.items():
        trajectories = [t for group in groups for t in group]
        numbers = lengths(trajectories)
        solved = [found for group in groups if (found := _solved(group))]
        samples = max(len(group) for group in groups)
        out.append(
            {
                "stage": stage,
                "domain": domain,
                "effort": effort,
                "reward": numbers.get("reward/mean"),
                "accuracy": fmean(ok for found in solved for ok in found) if solved else None,
                "pass_at_k": fmean(pass_at(found, samples) for found in solved) if solved else None,
                "format_rate": fmean(well_formed(t, renderer, thinking) for t in trajectories),
                "thinking_tokens": numbers["length/thinking"],
                "total_tokens": numbers["length/sampled"],
                "tokens_per_s": speed,
                "k": samples,
                "n": len(trajectories),
            }
        )
    return out


def _solved(group: Sequence[Trajectory]) -> list[bool]:
    """Of those that were scored, by the task's own reward, before any budget rule."""
    rewards = [t.reward for t in group if t.reward and t.reward.total is not None]
    return [r.components.get("task", r.total) > 0.5 for r in rewards]


def pass_at(solved: Sequence[bool], k: int) -> float:
    """Probability that at least one of k answers drawn without replacement is right: 1 - C(n-c, k) / C(n, k), Chen et
    al. 2021. With fewer than k answers, of all there are."""
    n, wrong, k = len(solved), len(solved) - sum(solved), min(k, len(solved))
    return 1.0 - math.comb(wrong, k) / math.comb(n, k)


def well_formed(trajectory: Trajectory, renderer: Renderer, thinking: bool) -> bool:
    """Did it end by itself, with a last turn that reads back without an error?"""
    turn: list[int] = []
    for segment in reversed(trajectory.segments):
        if segment.author is not Author.MODEL:
            break
        turn = segment.token_ids + turn
    if trajectory.status is not Status.COMPLETE or not turn:
        return False
    parsed = renderer.parse(turn, thinking=thinking)
    return parsed.complete and not parsed.errors


def print_table(cells: list[dict[str, Any]], stages: list[str]) -> None:
    """The table a person waits for: models side by side, or one below the other where they are many."""
    found = {(c["domain"], c["effort"], c["stage"]): c for c in cells}
    rows = sorted({(c["domain"], c["effort"]) for c in cells}, key=by_effort)
    what = {"reward": ("reward", 3), "thinking": ("thinking_tokens", 1)}

    def text(key: tuple[str, str], stage: str, name: str) -> str:
        field, digits = what[name]
        return _number(found.get((*key, stage), {}).get(field), digits)

    console = Console()
    if len(stages) <= SIDE_BY_SIDE:
        table = Table("domain", "effort", *(f"{s}: {name}" for s in stages for name in what))
        for key in rows:
            table.add_row(*key, *(text(key, s, name) for s in stages for name in what))
        console.print(table)
        return
    if not console.is_terminal:
        console = Console(width=120)  # of a file: rich would squeeze it into 80
    for name in what:
        heads = ("\n".join(key) for key in rows)
        table = Table(name, *heads, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for stage in stages:
            table.add_row(stage, *(text(key, stage, name) for key in rows))
        console.print(table)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
