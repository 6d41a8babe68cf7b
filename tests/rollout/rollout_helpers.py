"""What the scheduler's, pool's and fault tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scripted_engine import ScriptedEngine

from k3rl.chat import load_renderer
from k3rl.config.rollout import RolloutConfig
from k3rl.types import Effort, Group, Problem
from rollout.pool import Progress, RolloutPool
from rollout.transport import InlineTransport
from rollout.worker import RolloutWorker

MAX_CONTEXT = 4096


def problem(number: int, **fields: Any) -> Problem:
    efforts = (Effort.LOW, Effort.HIGH, Effort.MAX)
    messages = [{"role": "user", "content": f"What is {number} + {number}?"}]
    return Problem(
        **(
            {"id": f"p{number}", "domain": "general", "messages": messages, "reward": {"name": "math"}}
            | {"effort": efforts[number % 3]}
            | fields
        )
    )


class Draws:
    """A stream of problems; ``only`` of them."""

    def __init__(
        self, only: int | None = None, make: Callable[[int], Problem] = problem, first: int = 0
    ) -> None:
        self.next, self.only, self.make = first, only, make

    def __call__(self) -> tuple[int, Problem] | None:
        if self.only is not None and self.next >= self.only:
            return None
        draw = self.next
        self.next += 1
        return draw, self.make(draw)


def config(**fields: Any) -> RolloutConfig:
    base: dict[str, Any] = {"groups": 4, "samples": 3, "lambda": 0.75, "slice_s": 0.005, "max_tokens": 200}
    return RolloutConfig.model_validate(base | fields)


def make_worker(config: RolloutConfig, index: int, **engine: Any) -> RolloutWorker:
    renderer = load_renderer("k3-nano")
    scripted = ScriptedEngine(end_id=renderer.stop_token_ids[0], **engine)
    return RolloutWorker(config, scripted, renderer, MAX_CONTEXT, name=f"rollout-{index}", get=lambda x: x)


def inline_pool(config: RolloutConfig, run_seed: int = 7, **engine: Any) -> RolloutPool:
    def make(index: int) -> RolloutWorker:
        return make_worker(config, index, **engine)

    return RolloutPool(config, make, run_seed=run_seed, transport=InlineTransport(make))


def run_step(pool: RolloutPool, step: int, draws: Draws, settle: bool = True) -> list[Group]:
    """One step's groups, each settled as trained."""
    groups = []
    for event in pool.rollout(step, draws):
        if isinstance(event, Progress):
            continue
        groups.append(event)
        if settle:
            pool.settle(event.draw)
    return groups


def by_id(groups: list[Group]) -> dict[str, Any]:
    """What may not depend on workers, timing or faults."""
    out = {}
    for group in groups:
        for t in group.trajectories:
            assert t.id not in out, f"{t.id} came twice"
            out[t.id] = (
                t.token_ids,
                t.sampled_mask,
                t.logprobs,
                t.status,
                t.stop_reason,
                t.turns,
                t.prompt_ids,
            )
    return out
