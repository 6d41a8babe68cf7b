"""On-policy distillation from many teachers (spec/03): RL whose advantage is, token by token, what the teacher of the
problem's domain and effort thinks of the token.

The loop is `run_rl`'s, partial rollouts included. What is added, in `Annotator`: a group that is complete goes to its
teacher while others are still generated; when the step's rollout is over, the student's present weights score the same
tokens, and the clipped difference becomes each token's advantage.
"""

from __future__ import annotations

from pathlib import Path

from distill.diagnostics import GapLog, Gate, disagreement, largest_gaps
from distill.pool import TeacherPool
from distill.remote import RemoteScorer
from distill.routing import Routing, teacher_prompt
from distill.teachers import Scores
from distill.token_rewards import Opinion, assign, metrics, weights
from k3rl.algorithms.config import ObjectiveChoice
from k3rl.algorithms.divergence import DivergenceConfig
from k3rl.chat import Renderer
from k3rl.config.jobs import DistillJob
from k3rl.recipes.launch import device_of, ray_cluster, renderer_of
from k3rl.recipes.rl import run_rl
from k3rl.types import Group, Problem, Trajectory
from rollout.pool import RolloutPool


def run_distill(job: DistillJob) -> Path:
    """Returns the run's folder. Errors as `run_rl`; `UserError` also where a remote teacher is not there, or has
    another vocabulary."""
    renderer = renderer_of(job.model)
    remote = remote_scorers(job, renderer)
    trained = job.model_copy(
        update={"trainer": job.trainer.model_copy(update={"objective": objective_of(job)})}
    )
    with ray_cluster(job.ray):
        pool = TeacherPool(
            job.teachers,
            device_of(job),
            job.rollout.max_context,
            job.teacher_pool,
            remote,
            job.divergence.top_k if job.divergence else None,
        )
        try:
            return run_rl(trained, Annotator(job, renderer, pool))
        finally:
            pool.close()


def objective_of(job: DistillJob) -> ObjectiveChoice:
    """The job's own objective on token advantages; or a divergence, whose token advantages are the cells' weights."""
    if job.divergence is None:
        changes = {"token_advantages": True, "group_weight": job.token_rewards.outcome_weight}
        return job.trainer.objective.model_copy(update=changes)
    choice = job.divergence
    return DivergenceConfig(divergence=choice.type, beta=choice.beta, token_advantages=True)


def remote_scorers(job: DistillJob, renderer: Renderer) -> dict[int, RemoteScorer]:
    """By teacher's number, those that live behind HTTP, each found to be there and to mean the same by every id."""
    found = {}
    for number, teacher in enumerate(job.teachers):
        if teacher.remote is not None:
            found[number] = RemoteScorer(teacher.remote, teacher.name or teacher.remote.url, renderer)
            found[number].handshake()
    return found


class Annotator:
    """Puts teachers' opinions on the groups of a step; returns metrics."""

    def __init__(self, job: DistillJob, renderer: Renderer, teachers: TeacherPool) -> None:
        self.job, self.config, self.renderer, self.teachers = job, job.token_rewards, renderer, teachers
        self.routing = Routing(job.teachers)
        self.gate = Gate(self.config)
        self.log = GapLog(Path(job.runs) / job.name / "gaps.jsonl")
        self._tickets: dict[str, int] = {}

    def saw(self, group: Group) -> None:
        """Ask the group's teacher now, while others are still generated."""
        if self.job.teacher_pool.overlap:
            self._ask(group)
            self.teachers.work()

    def __call__(self, groups: list[Group], pool: RolloutPool, step: int) -> dict[str, float]:
        for group in groups:
            self._ask(group)
        scored = [(g, t) for g in groups for t in g.trajectories if t.sampled_tokens]
        self.teachers.work(everything=True)
        own = [[*t.prompt_ids, *t.token_ids] for _, t in scored]
        student = pool.score(own, [len(t.prompt_ids) for _, t in scored]) if scored else []
        scores, tickets = self.teachers.answers(), self._tickets
        self._tickets = {}
        if not scored:
            return {}
        opinions = [
            self._opinion(group, t, scores[tickets[t.id]], ours)
            for (group, t), ours in zip(scored, student, strict=True)
        ]
        assign(opinions, self.config)
        if self.job.divergence is not None:
            for (_, t), weight in zip(scored, weights([t for _, t in scored], self.config), strict=True):
                t.token_advantages = [weight] * t.sampled_tokens
        found = metrics(opinions, self.routing.names, self.config)
        self.gate.check(found)
        if self.config.compare_every and step % self.config.compare_every == 0:
            found |= self._compared(scored, opinions)
        gaps = largest_gaps(opinions, self.routing.names, self.renderer, self.config.largest_gaps)
        self.log.write(step, gaps)
        return {**found, **self.teachers.statistics()}

    def _ask(self, group: Group) -> None:
        """Each trajectory once."""
        number = self.routing.teacher_of(group.problem)
        for t in group.trajectories:
            if t.sampled_tokens and t.id not in self._tickets:
                self._tickets[t.id] = self._question(group.problem, t, number)

    def _question(self, problem: Problem, t: Trajectory, number: int) -> int:
        """The response after the prompt as that teacher reads it: aligned from the prompts' ends."""
        prompt = teacher_prompt(self.renderer, problem, self.job.teachers[number], self.job.thinking)
        return self.teachers.ask(number, [*prompt, *t.token_ids], len(prompt))

    def _opinion(self, group: Group, t: Trajectory, theirs: Scores, ours: list[float]) -> Opinion:
        mask = t.sampled_mask
        if theirs.ids is not None:
            t.teacher_top = theirs.ids[mask], theirs.top[mask]
        number = self.routing.teacher_of(group.problem)
        return Opinion(t, number, _where(theirs.logprobs, mask), _where(ours, mask))

    def _compared(self, scored: list[tuple[Group, Trajectory]], opinions: list[Opinion]) -> dict[str, float]:
        """A few trajectories, spread over the step's, under all other teachers."""
        chosen = range(0, len(scored), max(1, len(scored) // self.config.compare))
        asked = []
        for i in chosen:
            group, t = scored[i]
            others = [n for n in range(len(self.job.teachers)) if n != opinions[i].teacher]
            asked.append({n: self._question(group.problem, t, n) for n in others})
        scores = self.teachers.answers()
        views = [
            {n: _where(scores[ticket].logprobs, scored[i][1].sampled_mask) for n, ticket in tickets.items()}
            for i, tickets in zip(chosen, asked, strict=True)
        ]
        return disagreement([opinions[i] for i in chosen], views, self.routing.names)


def _where(values: list[float], mask: list[bool]) -> list[float]:
    return [v for v, sampled in zip(values, mask, strict=True) if sampled]
