"""Scoring beside generation: groups are handed over as they complete, and their rewards collected at the
step's end.

    service = RewardService(config, tokenizer="k3-nano")
    service.submit(group, step)          # returns at once
    for done in service.poll(): ...      # those that are scored by now
    for done in service.drain(): ...     # all of them, or RunError after drain_timeout_s

Owner of a submitted group: the service, until `poll` or `drain` gives it back, once, with ``reward`` set on
every trajectory. A worker that dies is replaced and its groups are scored again.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3rl.chat import load_renderer
from k3rl.config.rewards import ReplaceOverBudget, RewardConfig
from k3rl.errors import RunError
from k3rl.types import Group, Outcome, Reward
from rewards.budgets import Tau
from rewards.curriculum import Curriculum
from rewards.worker import RewardWorker

if TYPE_CHECKING:
    from ray import ObjectRef

log = logging.getLogger(__name__)
FAILURES = (Outcome.GRADER_FAILED, Outcome.TIMED_OUT, Outcome.JUDGE_FAILED)
MAX_WORKER_DEATHS = 3  # of one group: after that it is the group's fault


@dataclass(slots=True)
class ScoredGroup:
    """A group given back. ``drop`` says why it must not be trained on; empty: it may."""

    group: Group
    step: int
    drop: str = ""


@dataclass(slots=True)
class _Ticket:
    group: Group
    step: int
    tau: Tau | None
    submitted_s: float
    worker: int = 0
    actor: Any = None
    deaths: int = 0
    deferrals: int = 0


class _Actor:
    """The worker inside its actor: loads its own tokenizer."""

    def __init__(self, config: RewardConfig, tokenizer: str, thinking: bool) -> None:
        os.nice(5)  # rewards wait rather than slow generation down
        self.worker = RewardWorker(config, load_renderer(tokenizer), thinking)

    def score(self, group: Group, step: int, tau: Tau | None) -> list[Reward]:
        return self.worker.score(group, step, tau)

    def metrics(self) -> dict[str, float]:
        return self.worker.metrics()

    def fingerprint(self) -> str:
        return self.worker.renderer.fingerprint()

    def close(self) -> None:
        self.worker.close()


def settle(group: Group, rewards: list[Reward], config: RewardConfig, step: int) -> ScoredGroup:
    """Put rewards on a group's trajectories, and do with failed ones what ``on_error`` says. Raises
    `RunError`."""
    failed = [(t, r) for t, r in zip(group.trajectories, rewards, strict=True) if r.outcome in FAILURES]
    drop = ""
    if failed:
        trajectory, reward = failed[0]
        reason = (
            f"{reward.outcome} on trajectory {trajectory.id} of '{group.problem.id}': {reward.explanation}"
        )
        if config.on_error == "raise":
            raise RunError(f"a reward failed and rewards.on_error is 'raise': {reason}")
        if config.on_error in ("drop_group", "defer_group"):
            drop = f"reward:{reward.outcome}"
            log.warning("%s; its group is not trained on", " ".join(reason.split()))
        else:
            rewards = [replace(r, total=0.0) if r.outcome in FAILURES else r for r in rewards]
    for trajectory, reward in zip(group.trajectories, rewards, strict=True):
        trajectory.reward = reward
    return ScoredGroup(group, step, drop)


def slim(group: Group) -> Group:
    """The group without the engine's routing, which no reward reads and which is large."""
    return replace(group, trajectories=[replace(t, routing=None) for t in group.trajectories])


def task_rewards(groups: Sequence[ScoredGroup]) -> dict[str, list[float]]:
    """By domain: what the trajectories' tasks were worth before the budget rule."""
    found: dict[str, list[float]] = {}
    for trajectory in (t for scored in groups for t in scored.group.trajectories):
        reward = trajectory.reward
        if reward is not None and reward.total is not None:
            found.setdefault(trajectory.domain, []).append(reward.components.get("task", reward.total))
    return found


class RewardService:
    """See the module's docstring. Needs a running Ray."""

    def __init__(
        self,
        config: RewardConfig,
        tokenizer: str,
        thinking: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """``environment``: variables of the reward workers and their processes."""
        self.config, self.tokenizer, self.thinking = config, tokenizer, thinking
        self.environment = dict(environment or {})
        self.workers = [self._start() for _ in range(config.workers)]
        self.load = [0] * config.workers
        self.waiting: dict[ObjectRef, _Ticket] = {}
        self.tau: Tau | None = None
        self.curriculum: Curriculum | None = None
        self.step = -1
        self.deferred: list[_Ticket] = []
        self.counts = {"groups": 0, "trajectories": 0, "dropped": 0, "deferred": 0, "worker_deaths": 0}
        self.latency_s = 0.0
        self.deepest = 0

    def _start(self) -> Any:
        import ray

        options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": max(2, self.config.processes)}
        if self.environment:
            options["runtime_env"] = {"env_vars": self.environment}
        actor = ray.remote(**options)(_Actor)
        return actor.remote(self.config, self.tokenizer, self.thinking)

    def follow_curriculum(self, run: Path, first_step: int) -> None:
        """Take tau from the curriculum of the config, where it has one; its trail is in the run's folder.
        ``first_step`` is the step that the run begins or goes on with."""
        budgets = self.config.budgets
        if isinstance(budgets, ReplaceOverBudget) and budgets.curriculum is not None:
            self.curriculum = Curriculum(budgets, run, first_step)

    def submit(self, group: Group, step: int = 0) -> None:
        """Hand a group over to the least busy worker. Returns at once."""
        if self.curriculum is not None and step != self.step:
            self.tau = self.curriculum.begin_step(step)
        self.step = step
        self._send(_Ticket(group, step, self.tau, time.monotonic()))

    def again(self, step: int) -> None:
        """Hand over once more what could not be scored in earlier steps and was deferred (``on_error``)."""
        late, self.deferred = self.deferred, []
        for ticket in late:
            self._send(
                replace(ticket, step=step, submitted_s=time.monotonic(), deferrals=ticket.deferrals + 1)
            )

    def _send(self, ticket: _Ticket) -> None:
        ticket.worker = min(range(len(self.workers)), key=self.load.__getitem__)
        self.load[ticket.worker] += 1
        ticket.actor = self.workers[ticket.worker]
        reference = ticket.actor.score.remote(slim(ticket.group), ticket.step, ticket.tau)
        self.waiting[reference] = ticket
        self.deepest = max(self.deepest, len(self.waiting))

    @property
    def queue_depth(self) -> int:
        """Groups handed over and not given back."""
        return len(self.waiting)

    def poll(self, timeout_s: float = 0.0) -> list[ScoredGroup]:
        """Groups that are scored by now; waits up to ``timeout_s`` for the first."""
        import ray

        if not self.waiting:
            return []
        ready, _ = ray.wait(list(self.waiting), num_returns=1, timeout=timeout_s)
        if ready:
            ready, _ = ray.wait(list(self.waiting), num_returns=len(self.waiting), timeout=0)
        return [done for reference in ready for done in self._collect(reference)]

    def _collect(self, reference: ObjectRef) -> list[ScoredGroup]:
        import ray

        ticket = self.waiting.pop(reference)
        self.load[ticket.worker] -= 1
        try:
            rewards = ray.get(reference)
        except ray.exceptions.RayActorError as error:
            return self._worker_died(ticket, error)
        self.counts["groups"] += 1
        self.counts["trajectories"] += len(rewards)
        self.latency_s += time.monotonic() - ticket.submitted_s
        return self._settled(ticket, rewards)

    def _settled(self, ticket: _Ticket, rewards: list[Reward]) -> list[ScoredGroup]:
        done = settle(ticket.group, rewards, self.config, ticket.step)
        if done.drop and self.config.on_error == "defer_group" and ticket.deferrals < self.config.deferrals:
            self.counts["deferred"] += 1
            self.deferred.append(ticket)  # open in the ledger: a resumed run hands it over again
            return []
        self.counts["dropped"] += bool(done.drop)
        return [done]

    def _worker_died(self, ticket: _Ticket, error: Exception) -> list[ScoredGroup]:
        if self.workers[ticket.worker] is ticket.actor:  # the first of its groups to notice replaces it
            self.counts["worker_deaths"] += 1
            self.workers[ticket.worker] = self._start()
        ticket.deaths += 1
        if ticket.deaths < MAX_WORKER_DEATHS:
            self._send(ticket)
            return []
        text = f"the reward worker died {ticket.deaths} times on this group: {error}"
        rewards = [Reward(None, {}, Outcome.GRADER_FAILED, text) for _ in ticket.group.trajectories]
        return self._settled(ticket, rewards)

    def drain(self, timeout_s: float | None = None, last: bool = False) -> list[ScoredGroup]:
        """All groups that were handed over; ``last``: no step follows, so what is deferred is tried again at once.
        Raises `RunError` that names what is missing when the wait is over."""
        limit_s = self.config.drain_timeout_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + limit_s
        done: list[ScoredGroup] = []
        while self.waiting:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                names = ", ".join(
                    f"'{t.group.problem.id}' (draw {t.group.draw})" for t in list(self.waiting.values())[:5]
                )
                raise RunError(f"{len(self.waiting)} groups have no reward after {limit_s:g} s: {names}")
            done += self.poll(min(left_s, 5.0))
            if last and not self.waiting:
                self.again(self.step)
        if self.curriculum is not None and done:
            self.curriculum.end_step(self.step, task_rewards(done))
        return done

    def set_tau(self, tau: Tau | None) -> None:
        """tau by domain and effort in the place of the config's, for groups handed over from now on."""
        self.tau = tau

    def fingerprint(self) -> str:
        """The tokenizer's, as the workers loaded it; compare it with the engine's."""
        import ray

        found = set(ray.get([w.fingerprint.remote() for w in self.workers], timeout=120))
        if len(found) != 1:
            raise RunError(f"the reward workers loaded different tokenizers: {found}")
        return found.pop()

    def metrics(self) -> dict[str, float]:
        """``rewards/...``: counts since the start, sums over workers; ``queue_depth`` is of now, its maximum since
        the last call; ``per_s`` are trajectories per second of a worker's time."""
        import ray

        totals: dict[str, float] = {}
        for one in ray.get([w.metrics.remote() for w in self.workers], timeout=60):
            for name, value in one.items():
                totals[name] = totals.get(name, 0.0) + value
        totals |= {k: float(v) for k, v in self.counts.items()}
        totals["queue_depth"] = float(self.queue_depth)
        totals["queue_depth_max"], self.deepest = float(self.deepest), len(self.waiting)
        totals["per_s"] = totals["trajectories"] / max(totals.get("seconds_s/score", 0.0), 1e-9)
        totals["latency_s_mean"] = self.latency_s / max(1, self.counts["groups"])
        named = {f"rewards/{name}": value for name, value in totals.items()}
        return {**named, **self.curriculum.metrics()} if self.curriculum is not None else named

    def close(self) -> None:
        """Stop the workers and their processes."""
        import ray

        try:
            ray.get([w.close.remote() for w in self.workers], timeout=20)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            pass  # a dead worker's processes died with it
        for worker in self.workers:
            ray.kill(worker)
        self.waiting.clear()
