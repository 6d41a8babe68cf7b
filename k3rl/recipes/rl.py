"""Reinforcement learning, the way K3 does it. The whole algorithm is in `run_rl`, top to bottom.

Synchronous RL with partial rollouts (spec/02 §3): N problems with K samples each are kept in flight; generation pauses
when ⌈λ·N·K⌉ trajectories are complete; the rest resume first in the next step; a problem's group is trained on as soon
as its K-th trajectory is complete, whatever policies wrote it. The objective is K2.5's by default: advantages against
the group's mean, a mask on the log-ratio to the behaviour policy, and its square as the trust region (spec/02 §1).

Distillation is the same loop with another source of advantages: see `k3rl.recipes.distill`.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Protocol

from k3rl.algorithms import Algorithm
from k3rl.config.jobs import RlJob
from k3rl.data import ProblemStream, load_problems
from k3rl.errors import RunError
from k3rl.recipes.journal import Journal
from k3rl.recipes.launch import (
    Turns,
    device_of,
    publish,
    ray_cluster,
    renderer_of,
    rewards_running,
    rollout_running,
    tokenizer_folder,
    trainer_resources,
)
from k3rl.recipes.records import Leaving, step_metrics, summary
from k3rl.types import Group
from rollout.pool import RolloutPool


class Annotate(Protocol):
    """Another source of advantages, by token."""

    def saw(self, group: Group) -> None:
        """A group is complete, and others are still generated."""

    def __call__(self, groups: list[Group], pool: RolloutPool, step: int) -> dict[str, float]:
        """Put token advantages on the groups of a step; returns metrics."""


def run_rl(job: RlJob, annotate: Annotate | None = None) -> Path:
    """Returns the run's folder. Raises `UserError` before anything starts, `RunError` where an invariant breaks."""
    renderer = renderer_of(job.model)
    stream = ProblemStream(load_problems(job.data), job.seed)
    algorithm = Algorithm(job.trainer.objective)
    device = device_of(job)
    with Journal(job, job.steps) as journal:
        if journal.done >= job.steps:
            return journal.path
        with (
            ray_cluster(job.ray),
            trainer_resources(job.model, job.trainer, device, job.seed, job.rollout, renderer) as trainer,
            rollout_running(job, job.rollout, job.model, device) as pool,
            rewards_running(job.rewards, job.model, job.thinking) as rewards,
        ):
            if journal.checkpoint:  # everything the run knew: weights, optimiser, what was in flight
                trainer.load(journal.checkpoint / "trainer")
                pool.load_state_dict(journal.read_state("rollout.json"))
                stream.draw = pool.next_draw
            rewards.follow_curriculum(journal.path, journal.done)
            published = publish(trainer, pool)
            turns = Turns(job, trainer, pool, journal.progress)

            def draw():
                return stream.draw, stream.next()

            for step in journal.steps():
                # Roll out until λ·N·K trajectories are complete; score groups while others still generate.
                rewards.again(step)  # what a judge that was down could not score
                turns.to_engines()
                with journal.progress.phase("rollout"):
                    for event in pool.rollout(step, draw):
                        if isinstance(event, Group):
                            rewards.submit(event, step)
                            if annotate:
                                annotate.saw(event)
                        else:
                            journal.progress.rollout(event.done, event.wanted, event.tokens_per_s)
                            progress = event
                with journal.progress.phase("reward"):
                    scored = sorted(rewards.drain(), key=lambda s: s.group.draw)
                groups = [s.group for s in scored if not s.drop]

                # Rewards to advantages; one optimiser step on what this step completed.
                extra = {}
                if annotate:
                    with journal.progress.phase("teachers"):
                        extra = annotate(groups, pool, step)
                selection = algorithm.batch(groups)
                version = trainer.version
                turns.to_trainer()
                with journal.progress.phase("train"):
                    metrics = trainer.step(selection.trained)
                turns.to_both()

                # The new weights to every rollout worker, with proof that they arrived.
                with journal.progress.phase("publish"):
                    published = publish(trainer, pool, published)

                # What left the run in this step, and why; then the books must balance.
                with journal.progress.phase("record"):
                    leaving = Leaving(scored, selection, {s.group.draw: s.group.problem for s in scored})
                    rows = partial(leaving.rows, step, version, renderer, job.thinking)
                    journal.store.write_rollouts_beside(step, rows)
                    for draw_number, reason in leaving.fates():
                        pool.settle(draw_number, reason)
                due = journal.due(step, job.checkpoint_every)
                if due:
                    with journal.progress.phase("checkpoint"):
                        pool.save_sandboxes()
                with journal.progress.phase("record"):
                    state = pool.state_dict()
                    journal.store.write_ledger(state["controller"]["ledger"])
                metrics = step_metrics(
                    scored,
                    selection,
                    progress,
                    {
                        **metrics,
                        **extra,
                        **published.metrics,
                        **turns.metrics(),
                        **pool.metrics(),
                        **rewards.metrics(),
                    },
                )
                if due:
                    with (
                        journal.progress.phase("checkpoint"),
                        journal.store.new_checkpoint(step, job.trainer.checkpoint.keep_last) as folder,
                    ):
                        trainer.save(folder / "trainer", tokenizer_folder(job.model))
                        (folder / "rollout.json").write_text(json.dumps(state))
                    pool.checkpointed(state)
                journal.record(step, metrics, summary(metrics))
            if stream.draw != pool.next_draw:
                raise RunError(f"{stream.draw} problems were drawn, the ledger knows of {pool.next_draw}")
    return journal.path
