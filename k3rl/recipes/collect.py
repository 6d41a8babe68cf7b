"""Teachers answer, and what they wrote becomes training data: off-policy distillation (`kind: collect`, then SFT).

Rows are those of any run's rollout store. Responses are kept token by token as they were sampled; the prompt in a row
is the student's, with the effort message, whatever form the teacher read.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq

from k3rl.algorithms import Selection
from k3rl.config.distill import RolloutsData
from k3rl.config.jobs import CollectJob, EvaluateJob
from k3rl.data import ProblemStream, load_problems
from k3rl.errors import RunError, UserError
from k3rl.recipes.evaluate import routed_answers
from k3rl.recipes.journal import Journal
from k3rl.recipes.launch import device_of, ray_cluster, renderer_of
from k3rl.recipes.records import Leaving, lengths
from k3rl.trainer import SftSequence
from k3rl.types import Problem, Status


def run_collect(job: CollectJob) -> Path:
    """Returns the run's folder, with the trajectories under ``rollouts/``."""
    problems = drawn_problems(job)
    device = device_of(job)
    renderer = renderer_of(job.teachers[0].model)
    with Journal(job, 1) as journal:
        if journal.done:
            return journal.path
        with ray_cluster(job.ray), journal.progress.phase("collect"):
            scored, speed = routed_answers(as_evaluation(job), job.teachers, problems, device, journal)
        groups = [s.group for s in scored]
        trajectories = [t for g in groups for t in g.trajectories]
        leaving = Leaving([], Selection(trajectories, []), {g.draw: g.problem for g in groups})
        rows = leaving.rows(0, 0, renderer, job.thinking)
        journal.store.write_rollouts(0, [{**row, "fate": "collected"} for row in rows])
        with journal.store.new_checkpoint(0):
            pass  # the rows are the state
        metrics = {**lengths(trajectories), "rollout/tokens_per_s": speed}
        mean = metrics.get("reward/mean", float("nan"))
        journal.record(0, metrics, f"{len(trajectories)} trajectories, reward {mean:.3f}")
    return journal.path


def drawn_problems(job: CollectJob) -> list[Problem]:
    """As training would draw them; with ``evaluation.efforts``, each at all of these."""
    stream = ProblemStream(load_problems(job.evaluation.data), job.seed)
    drawn = [stream.next() for _ in range(job.problems)]
    if not job.evaluation.efforts:
        return drawn
    return [replace(p, effort=effort) for p in drawn for effort in job.evaluation.efforts]


def as_evaluation(job: CollectJob) -> EvaluateJob:
    """The job whose answering this is."""
    shared = {name: getattr(job, name) for name in ("name", "runs", "seed", "device", "ray", "thinking")}
    return EvaluateJob(
        **shared,
        models={"teachers": job.teachers[0].model},
        evaluation=job.evaluation,
        engine=job.engine,
        workers=job.workers,
        rewards=job.rewards,
    )


class Rollouts:
    """Trajectories of a run as sequences to imitate, in the order they are stored. Raises `UserError` where none is
    left."""

    def __init__(self, config: RolloutsData) -> None:
        files = sorted((Path(config.path) / "rollouts").glob("step-*.parquet"))
        if not files:
            raise UserError(f"data.path: {config.path} holds no rollouts")
        self.sequences: list[SftSequence] = []
        digest = hashlib.blake2b(digest_size=16)
        columns = ["prompt_ids", "response_ids", "sampled_mask", "status", "reward", "effort"]
        for file in files:
            for row in pq.read_table(file, columns=columns).to_pylist():
                if not _kept(row, config):
                    continue
                if len(row["response_ids"]) != len(row["sampled_mask"]):
                    raise RunError(f"{file}: a mask of another length than its response")
                ids = [*row["prompt_ids"], *row["response_ids"]]
                mask = [False] * len(row["prompt_ids"]) + row["sampled_mask"]
                self.sequences.append(SftSequence(ids, mask))
                digest.update(repr((ids, mask)).encode())
        if not self.sequences:
            raise UserError(f"data: no trajectory of {config.path} meets the conditions")
        self._digest = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> SftSequence:
        return self.sequences[index]

    def fingerprint(self) -> str:
        return self._digest


def _kept(row: dict, config: RolloutsData) -> bool:
    if row["status"] != Status.COMPLETE or not any(row["sampled_mask"]):
        return False
    if config.efforts and row["effort"] not in config.efforts:
        return False
    return config.min_reward is None or (row["reward"] is not None and row["reward"] >= config.min_reward)
