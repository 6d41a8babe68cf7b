"""Calling one reward function on some trajectories, wherever that happens: worker, child process or
server."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from k3rl.config.rewards import RewardSandbox
from k3rl.errors import UserError
from k3rl.types import Outcome
from rewards.api import GraderError, JudgeError, RewardFunction, Score, Scored, Verdict, as_score, as_scores


def failure(error: BaseException, seconds_s: float) -> Verdict:
    """A typed verdict for what a reward raised."""
    if isinstance(error, TimeoutError):
        return Verdict(Outcome.TIMED_OUT, explanation="the call took too long", seconds_s=seconds_s)
    outcome = Outcome.JUDGE_FAILED if isinstance(error, JudgeError) else Outcome.GRADER_FAILED
    if isinstance(error, GraderError | UserError):
        return Verdict(outcome, explanation=str(error), seconds_s=seconds_s)
    place = traceback.extract_tb(error.__traceback__)
    where = f" ({place[-1].filename}:{place[-1].lineno})" if place else ""
    return Verdict(outcome, explanation=f"{type(error).__name__}: {error}{where}"[:2000], seconds_s=seconds_s)


def guarded(call: Callable[[], list[Any]], count: int) -> list[Verdict]:
    """Run ``call``, which gives ``count`` scores; whatever it raises becomes as many failures."""
    start = time.perf_counter()
    try:
        scores = call()
    except Exception as error:  # a reward is foreign code: any failure is a typed verdict
        return [failure(error, time.perf_counter() - start)] * count
    seconds_s = time.perf_counter() - start
    return [Verdict(Outcome.SCORED, s, s.explanation, seconds_s) for s in scores]


def call_reward(
    reward: RewardFunction,
    items: Sequence[Scored],
    arguments: Mapping[str, Any],
    timeout_s: float | None = None,
    sandbox: RewardSandbox | None = None,
) -> Iterator[list[Verdict]]:
    """Verdicts in the order of ``items``, in pieces as they come: one by one, or all at once for a group
    reward and for an async one (whose calls run concurrently, each under ``timeout_s``)."""
    function = reward.function
    if reward.scope == "group":

        def whole() -> list[Any]:
            result = function(list(items), **arguments)
            if reward.is_async:
                result = asyncio.run(asyncio.wait_for(result, timeout_s))
            return as_scores(result, len(items))

        yield guarded(whole, len(items))
    elif reward.is_async:
        yield asyncio.run(_together(reward, items, arguments, timeout_s))
    else:
        for item in items:
            yield guarded(lambda item=item: [_one(reward, item, arguments, timeout_s, sandbox)], 1)


def _one(
    reward: RewardFunction,
    item: Scored,
    arguments: Mapping[str, Any],
    timeout_s: float | None,
    config: RewardSandbox | None,
) -> Score:
    if not reward.sandbox:
        return as_score(reward.function(item, **arguments))
    from rewards.sandboxes import fresh_sandbox

    with fresh_sandbox(config or RewardSandbox(), timeout_s or 600.0) as sandbox:
        return as_score(reward.function(item, sandbox=sandbox, **arguments))


async def _together(
    reward: RewardFunction, items: Sequence[Scored], arguments: Mapping[str, Any], timeout_s: float | None
) -> list[Verdict]:
    async def one(item: Scored) -> Verdict:
        start = time.perf_counter()
        try:
            score = as_score(await asyncio.wait_for(reward.function(item, **arguments), timeout_s))
        except Exception as error:  # as in `guarded`
            return failure(error, time.perf_counter() - start)
        return Verdict(Outcome.SCORED, score, score.explanation, time.perf_counter() - start)

    return list(await asyncio.gather(*map(one, items)))
