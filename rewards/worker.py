"""One scorer of groups: a plain class, made into a Ray actor by `rewards.service`.

A group goes through: parse the responses, call every part's reward (from the cache, in this process, in a
killable one, or over HTTP), combine, apply the length rule. Whatever a reward does, the answer is a `Reward`
for each trajectory.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from k3rl.chat.renderer import Renderer
from k3rl.config.rewards import PROBLEM, RewardConfig, RewardPart
from k3rl.errors import UserError
from k3rl.types import (
    Author,
    Channel,
    Group,
    Outcome,
    ParsedResponse,
    Problem,
    Reward,
    Status,
    Trajectory,
)
from rewards.api import RewardFunction, Score, Scored, Verdict
from rewards.budgets import Tau, apply_budgets
from rewards.calls import call_reward
from rewards.compose import combine
from rewards.isolation.pool import IsolatedPool
from rewards.registry import BUILT_IN, get_reward, is_remote, load_modules


def turns_of(trajectory: Trajectory, renderer: Renderer, thinking: bool = True) -> tuple[ParsedResponse, ...]:
    """The policy's turns, parsed. Observations divide turns; other tokens of the environment (forced
    closers, for instance) belong to the turn they stand in."""
    turns: list[list[int]] = [[]]
    sampled = [False]
    for segment in trajectory.segments:
        if segment.author is Author.ENVIRONMENT and segment.channel is Channel.OBSERVATION:
            turns.append([])
            sampled.append(False)
        else:
            turns[-1] += segment.token_ids
            sampled[-1] = sampled[-1] or segment.author is Author.MODEL
    return tuple(renderer.parse(ids, thinking) for ids, own in zip(turns, sampled, strict=True) if own)


def scored_view(
    problem: Problem, trajectory: Trajectory, renderer: Renderer, thinking: bool = True
) -> Scored:
    turns = turns_of(trajectory, renderer, thinking)
    response = turns[-1] if turns else ParsedResponse("", "", complete=False, errors=("nothing was sampled",))
    return Scored(problem, response, trajectory, turns)


def arguments_of(part: RewardPart, problem: Problem) -> tuple[str, dict[str, Any]]:
    """The name of a part's reward for a problem, and its arguments."""
    own = {k: v for k, v in (problem.reward or {}).items() if k != "name"}
    if part.reward == PROBLEM:
        return problem.reward["name"], {**own, **part.arguments}
    answer = {"answer": own["answer"]} if "answer" in own else {}
    return part.reward, {**answer, **part.arguments}


def check_rewards(config: RewardConfig, problems: Iterable[Problem]) -> None:
    """Every reward exists and gets the arguments that it needs, for every problem. Raises `UserError`."""
    load_modules(config.modules)
    functions: dict[str, RewardFunction] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    for problem in problems:
        for part in config.parts:
            if part.reward == PROBLEM and not (problem.reward or {}).get("name"):
                raise UserError(
                    f"problem '{problem.id}' names no reward: give its row a 'reward', its source one, or list "
                    "rewards.parts"
                )
            name, arguments = arguments_of(part, problem)
            key = (name, frozenset(arguments))
            if key in seen:
                continue
            seen.add(key)
            try:
                functions[name] = functions.get(name) or get_reward(name)
                functions[name].bind(arguments)
            except UserError as error:
                raise UserError(f"problem '{problem.id}': {error}") from error


class RewardWorker:
    """Scores groups. Safe to call from several threads.

    ``step`` counts the run's optimiser steps: Toggle's phases and warm-ups need it.
    """

    def __init__(self, config: RewardConfig, renderer: Renderer, thinking: bool = True) -> None:
        self.config, self.renderer, self.thinking = config, renderer, thinking
        load_modules(config.modules)
        self.pool = IsolatedPool(
            config.processes, config.memory_mb, config.retries, config.modules, config.sandbox
        )
        self.cache: OrderedDict[bytes, Verdict] = OrderedDict()
        self.lock = threading.Lock()
        self.functions: dict[str, RewardFunction] = {}
        self.counts: dict[str, int] = defaultdict(int)
        self.seconds_s: dict[str, float] = defaultdict(float)

    def score(self, group: Group, step: int = 0, tau: Tau | None = None) -> list[Reward]:
        """One reward for each trajectory of the group, in order. ``tau`` goes in the place of the
        config's."""
        start_s = time.perf_counter()
        gradable = [i for i, t in enumerate(group.trajectories) if t.status is not Status.FAILED]
        views = [
            scored_view(group.problem, group.trajectories[i], self.renderer, self.thinking) for i in gradable
        ]
        by_part = {part.key: self._part(part, group.problem, views) for part in self.config.parts}
        rewards = [
            Reward(None, {}, Outcome.SKIPPED, f"the trajectory failed: {t.error or t.stop_reason}")
            for t in group.trajectories
        ]
        for position, index in enumerate(gradable):
            rewards[index] = combine(self.config, {key: v[position] for key, v in by_part.items()})
        rewards = apply_budgets(self.config.budgets, group.problem, group.trajectories, rewards, step, tau)
        with self.lock:
            self.counts["groups"] += 1
            self.seconds_s["score"] += time.perf_counter() - start_s
            for reward in rewards:
                self.counts[f"outcome/{reward.outcome}"] += 1
        return rewards

    def _part(self, part: RewardPart, problem: Problem, views: Sequence[Scored]) -> list[Verdict]:
        if not views:
            return []
        name, arguments = arguments_of(part, problem)
        try:
            function = self.functions.get(name) or self.functions.setdefault(name, get_reward(name))
            bound = function.bind(arguments)
        except UserError as error:
            return [Verdict(Outcome.GRADER_FAILED, explanation=str(error))] * len(views)
        if not (function.deterministic and self.config.cache_entries) or function.scope == "group":
            return self._call(function, views, bound)
        return self._cached(function, views, bound)

    def _cached(
        self, function: RewardFunction, views: Sequence[Scored], bound: Mapping[str, Any]
    ) -> list[Verdict]:
        keys = [cache_key(function, view, bound) for view in views]
        with self.lock:
            known = {key: self.cache[key] for key in keys if key in self.cache}
        missing = {key: view for key, view in zip(keys, views, strict=True) if key not in known}
        fresh = dict(zip(missing, self._call(function, list(missing.values()), bound), strict=True))
        with self.lock:
            self.counts["cache_hits"] += len(views) - len(missing)
            for key, verdict in fresh.items():
                if verdict.outcome is Outcome.SCORED:
                    self.cache[key] = verdict
            for key in known:
                if key in self.cache:
                    self.cache.move_to_end(key)
            while len(self.cache) > self.config.cache_entries:
                self.cache.popitem(last=False)
        return [known.get(key) or fresh[key] for key in keys]

    def _call(
        self, function: RewardFunction, views: Sequence[Scored], bound: Mapping[str, Any]
    ) -> list[Verdict]:
        start_s = time.perf_counter()
        limit_s = function.timeout_s or self.config.timeout_s
        if (function.trusted and not function.sandbox) or is_remote(function.name):
            verdicts = [v for some in call_reward(function, views, bound, limit_s) for v in some]
        else:
            if function.name in BUILT_IN:
                self.pool.preload(BUILT_IN[function.name])
            verdicts = self.pool.run(function, views, bound, limit_s)
        with self.lock:
            self.counts[f"calls/{function.name}"] += len(views)
            self.counts[f"failures/{function.name}"] += sum(v.outcome is not Outcome.SCORED for v in verdicts)
            self.seconds_s[f"calls/{function.name}"] += time.perf_counter() - start_s
        return verdicts

    def metrics(self) -> dict[str, float]:
        """Counts and seconds since the worker started."""
        stats = self.pool.stats
        with self.lock:
            counted = {k: float(v) for k, v in self.counts.items()}
            timed = {f"seconds_s/{k}": v for k, v in self.seconds_s.items()}
        processes = {
            "processes/started": stats.started,
            "processes/killed": stats.killed,
            "processes/timed_out": stats.timed_out,
            "processes/died": stats.died,
            "retries": stats.retried,
        }
        return {**counted, **timed, **{k: float(v) for k, v in processes.items()}}

    def close(self) -> None:
        self.pool.close()


def cache_key(function: RewardFunction, view: Scored, bound: Mapping[str, Any]) -> bytes:
    """What the verdict depends on, hashed."""
    response, parts = view.response, [function.name, json.dumps(bound, sort_keys=True, default=repr)]
    parts += [view.problem.id, response.content]
    if function.depends != "content":
        parts += [
            response.reasoning,
            repr(response.tool_calls),
            repr(response.errors),
            str(response.complete),
        ]
    digest = hashlib.blake2b(
        "\x1f".join(f"{len(p)}:{p}" for p in parts).encode("utf-8", "replace"), digest_size=16
    )
    if function.depends == "trajectory":
        digest.update(pickle.dumps([view.trajectory.token_ids, view.trajectory.environment_state], 5))
    return digest.digest()


__all__ = ["RewardWorker", "Score", "check_rewards", "scored_view", "turns_of"]
