"""Problems of `reasoning-gym`: a problem is its task, config, seed and index, and is generated when asked
for."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from k3rl.data.config import GymTask, ReasoningGymData
from k3rl.errors import UserError, nearest
from k3rl.types import Effort, Problem


@functools.lru_cache(maxsize=64)
def _dataset(name: str, arguments: str) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise UserError(f"reasoning-gym has no task '{name}'{nearest(name, DATASETS)}")
    try:
        return reasoning_gym.create_dataset(name, **json.loads(arguments))
    except (TypeError, AssertionError, ValueError) as error:
        raise UserError(f"reasoning-gym's task '{name}' refuses its config {arguments}: {error}") from error


def gym_dataset(name: str, arguments: Mapping[str, Any]) -> Any:
    """The generator and scorer of a task, made once per process and arguments (``seed`` and ``size`` among
    them)."""
    return _dataset(name, json.dumps(arguments, sort_keys=True))


class GymProblems:
    """``size`` problems of each task. Ids are ``task-seed-index`` (and the config's hash where it is not the
    default)."""

    def __init__(self, config: ReasoningGymData) -> None:
        self.config = config
        self.places: list[tuple[GymTask, int]] = []
        self.names: dict[int, str] = {}
        labels: set[str] = set()
        for task in config.tasks:
            gym_dataset(task.name, self.arguments(task))[0]  # refuse a bad task before anything runs
            self.names[id(task)] = self._label(task)
            if self.names[id(task)] in labels:
                raise UserError(f"reasoning-gym's task '{task.name}' is listed twice with the same config")
            labels.add(self.names[id(task)])
            self.places += [(task, index) for index in range(task.size or config.size)]
        self.places = self.places[: config.limit]

    def arguments(self, task: GymTask) -> dict[str, Any]:
        return {**task.config, "seed": self.config.seed, "size": task.size or self.config.size}

    def _label(self, task: GymTask) -> str:
        if not task.config:
            return f"{task.name}-{self.config.seed}"
        text = json.dumps(task.config, sort_keys=True)
        return f"{task.name}-{hashlib.blake2b(text.encode(), digest_size=3).hexdigest()}-{self.config.seed}"

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Problem:
        task, local = self.places[index]
        arguments = self.arguments(task)
        entry = gym_dataset(task.name, arguments)[local]
        question = entry["question"]
        if self.config.instruction:
            question = f"{question}\n\n{self.config.instruction}"
        messages = [{"role": "user", "content": question}]
        if self.config.system is not None:
            messages.insert(0, {"role": "system", "content": self.config.system})
        own = {
            "name": "reasoning_gym",
            "task": task.name,
            "arguments": arguments,
            "index": local,
            "answer": entry["answer"],
            "extract": self.config.extract,
        }
        reward = self.config.reward
        if isinstance(reward, str):
            own["name"] = reward
        elif reward is not None:
            own |= reward
        return Problem(
            id=f"{self.names[id(task)]}-{local}",
            domain=self.config.domain,
            messages=messages,
            reward=own,
            metadata={"task": task.name}
            | ({"environment": named} if (named := self.config.environment) else {}),
        )

    def efforts(self, index: int) -> Mapping[Effort, float]:
        return self.config.efforts

    def fingerprint(self) -> str:
        text = self.config.model_dump_json(
            include={"tasks", "size", "seed", "instruction", "system", "limit"}
        )
        return hashlib.blake2b(f"{version('reasoning-gym')} {text}".encode(), digest_size=16).hexdigest()
