"""On-policy distillation from many teachers (spec/03): RL whose advantage is, token by token, what the teacher of the
problem's domain and effort thinks of the token.

The loop is `run_rl`'s, partial rollouts included. What is added, in `Annotator`: the groups of a step are scored by
their teachers and by the student's present weights, and the clipped difference becomes each token's advantage.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from distill.routing import Routing, teacher_prompt
from distill.teachers import TeacherPool
from distill.token_rewards import Opinion, assign, metrics
from k3rl.chat import Renderer
from k3rl.config.jobs import DistillJob
from k3rl.recipes.launch import device_of, ray_cluster, renderer_of
from k3rl.recipes.rl import run_rl
from k3rl.types import Group
from rollout.pool import RolloutPool

log = logging.getLogger(__name__)


def run_distill(job: DistillJob) -> Path:
    """Returns the run's folder. Errors as `run_rl`."""
    routing = Routing(job.teachers)
    models = {routing.weights[i]: t.model for i, t in enumerate(job.teachers)}
    objective = job.trainer.objective.model_copy(
        update={"token_advantages": True, "group_weight": job.token_rewards.outcome_weight}
    )
    job = job.model_copy(update={"trainer": job.trainer.model_copy(update={"objective": objective})})
    with ray_cluster(job.ray):
        pool = TeacherPool([models[i] for i in range(len(models))], device_of(job), job.rollout.max_context)
        try:
            return run_rl(job, Annotator(job, routing, renderer_of(job.model), pool))
        finally:
            pool.close()


class Annotator:
    """Puts teachers' opinions on the groups of a step; returns metrics."""

    def __init__(self, job: DistillJob, routing: Routing, renderer: Renderer, teachers: TeacherPool) -> None:
        self.job, self.routing, self.renderer, self.teachers = job, routing, renderer, teachers
        self._gated = False

    def __call__(self, groups: list[Group], pool: RolloutPool) -> dict[str, float]:
        scored = [(g, t) for g in groups for t in g.trajectories if t.sampled_tokens]
        if not scored:
            return {}
        numbers = [self.routing.teacher_of(g.problem) for g, _ in scored]
        own = [[*t.prompt_ids, *t.token_ids] for _, t in scored]
        student = pool.score(own, [len(t.prompt_ids) for _, t in scored])
        requests = []
        for (group, t), number in zip(scored, numbers, strict=True):
            teacher = self.job.teachers[number]
            prompt = teacher_prompt(self.renderer, group.problem, teacher, self.job.thinking)
            requests.append((self.routing.weights[number], [*prompt, *t.token_ids], len(prompt)))
        opinions = []
        rows = zip(scored, numbers, self.teachers.score(requests), student, strict=True)
        for (_, t), number, theirs, ours in rows:
            mask = t.sampled_mask
            opinions.append(Opinion(t, number, _where(theirs, mask), _where(ours, mask)))
        assign(opinions, self.job.token_rewards)
        found = metrics(opinions, self.routing.names, self.job.token_rewards)
        self._gate(found)
        return {**found, **self.teachers.statistics()}

    def _gate(self, found: dict[str, float]) -> None:
        """A teacher of another origin makes distillation collapse; its first KL tells (spec/03 §3)."""
        if self._gated:
            return
        self._gated = True
        for name, kl in found.items():
            if name.startswith("teacher/kl/teacher/") and kl > self.job.token_rewards.warn_kl:
                log.warning(
                    "teacher '%s': the student's reverse KL to it is %.3f nats per token at the start, above %.2f: "
                    "it may be too far away to learn from on-policy",
                    name.removeprefix("teacher/kl/teacher/"), kl, self.job.token_rewards.warn_kl,
                )  # fmt: skip


def _where(values: list[float], mask: list[bool]) -> list[Any]:
    return [v for v, sampled in zip(values, mask, strict=True) if sampled]
