"""Where reward names lead: registered functions, the built-in ones, entry points, dotted paths, files,
addresses."""

from __future__ import annotations

import importlib
from dataclasses import replace
from importlib.metadata import entry_points

from k3rl.data.functions import find_object, load_file
from k3rl.errors import UserError, nearest
from rewards.api import CLASHES, REGISTERED, RewardFunction

ENTRY_POINT_GROUP = "k3rl.rewards"

BUILT_IN = {
    "exact": "rewards.verifiers.text",
    "regex": "rewards.verifiers.text",
    "contains": "rewards.verifiers.text",
    "numeric": "rewards.verifiers.numeric",
    "multiple_choice": "rewards.verifiers.choice",
    "math": "rewards.verifiers.math",
    "json_schema": "rewards.verifiers.json_schema",
    "constraints": "rewards.verifiers.constraints",
    "xtml_format": "rewards.verifiers.xtml_format",
    "language": "rewards.verifiers.language",
    "repetition": "rewards.verifiers.repetition",
    "reasoning_gym": "rewards.verifiers.gym",
    "environment": "rewards.verifiers.environment",
    "code": "rewards.verifiers.code",
    "grm": "rewards.grm.reward",
    "judged_quality": "rewards.grm.rules",
}
"""Built-in rewards and the modules that register them; imported when first asked for."""


def load_modules(modules: tuple[str, ...] | list[str]) -> None:
    """Import modules or ``.py`` files so that the rewards they register have names."""
    for name in modules:
        if name.endswith(".py"):
            load_file(name)
            continue
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise UserError(f"the reward module '{name}' cannot be imported: {error}") from error


def is_remote(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def get_reward(name: str) -> RewardFunction:
    """The reward called ``name``. Raises `UserError` with the nearest known name."""
    if name in BUILT_IN:
        importlib.import_module(BUILT_IN[name])
    if name in CLASHES:
        raise UserError(
            f"several rewards are called '{name}' ({', '.join(CLASHES[name])}): name one by its path"
        )
    if name in REGISTERED:
        return REGISTERED[name]
    if is_remote(name):
        from rewards.remote import remote_reward

        return remote_reward(name)
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name == name:
            return _as_reward(name, entry.load())
    if ":" in name or "." in name:
        return _as_reward(name, find_object(name))
    raise UserError(f"there is no reward '{name}'{nearest(name, known_names())}")


def _as_reward(name: str, value: object) -> RewardFunction:
    found = getattr(value, "__k3rl_reward__", None)
    if isinstance(found, RewardFunction):
        return replace(found, address=name)
    if not callable(value):
        raise UserError(f"the reward '{name}' is not a function but a {type(value).__name__}")
    return RewardFunction(name, value, origin=name, address=name)  # a bare function is a trajectory reward


def known_names() -> list[str]:
    """All names that exist without a path."""
    return sorted({*REGISTERED, *BUILT_IN, *(e.name for e in entry_points(group=ENTRY_POINT_GROUP))})
