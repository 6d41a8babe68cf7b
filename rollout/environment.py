"""What a multi-turn trajectory talks to. An environment gets the policy's turns and answers with messages.

Life of one: made for a problem; `reset`, or in another process `resume` with the state that was saved
last; `step` for each turn; `pause` when the trajectory rests, then `resume` on the same object, or the
object is dropped and another is made from the state; `close` at the end. `state` is plain JSON and holds
all that must survive the process; sandboxes are named in it by their ids.

Every call is awaited in the worker's event loop beside many others and has a time limit: nothing in it may
block. An exception from an environment fails its trajectory, never the worker.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from k3rl.config.rollout import AgentConfig
from k3rl.errors import UserError, nearest
from k3rl.types import Message, ParsedResponse, Problem, StopReason, ToolCall

if TYPE_CHECKING:
    from rollout.environments.sandboxes import Sandboxes


@dataclass(frozen=True, slots=True)
class Opening:
    """What the policy sees first. ``messages`` None: the problem's own."""

    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the policy. ``number`` counts from 1."""

    response: ParsedResponse
    number: int

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return self.response.tool_calls


@dataclass(frozen=True, slots=True)
class Reply:
    """Messages to append, or the end: ``done`` with nothing to say. ``failed_calls`` counts calls that
    brought nothing but an error."""

    messages: list[Message] = field(default_factory=list)
    done: bool = False
    stop_reason: StopReason = StopReason.END_OF_TURN
    failed_calls: int = 0


class Environment(Protocol):
    """See the module's docstring."""

    async def reset(self) -> Opening: ...

    async def step(self, turn: Turn) -> Reply: ...

    async def pause(self) -> None:
        """Free what can be had again. `state` afterwards is enough for `resume` anywhere."""

    async def resume(self, state: dict[str, Any]) -> None: ...

    async def close(self) -> None: ...

    def state(self) -> dict[str, Any]:
        """JSON."""

    def sandbox(self) -> dict[str, str] | None:
        """Ids by which a sandbox is found again, for rewards that look into it."""


@runtime_checkable
class HoldsSandbox(Protocol):
    """What an environment with a sandbox can do besides. Like the protocol's other calls, both are awaited between
    two steps."""

    async def save(self) -> None:
        """Snapshot the sandbox, and name the snapshot in `state`: what a checkpoint is made of."""

    async def leave(self) -> None:
        """The trajectory goes on elsewhere from its state: let go of what only this process can use."""


EnvironmentFactory = Callable[..., Environment]
"""Called with the problem and the config's ``arguments`` as keywords; with the worker's `Sandboxes` as ``sandboxes``
too where it has a true attribute ``uses_sandbox``."""

_registry: dict[str, EnvironmentFactory] = {}


def register_environment(name: str) -> Callable[[EnvironmentFactory], EnvironmentFactory]:
    """Decorator: make an environment known by name, to configs and to problems' ``metadata.environment``."""

    def decorate(factory: EnvironmentFactory) -> EnvironmentFactory:
        if name in _registry and _registry[name] is not factory:
            raise UserError(f"the environment '{name}' is registered twice")
        _registry[name] = factory
        return factory

    return decorate


def environment_factory(name: str) -> EnvironmentFactory:
    """By registered name or ``package.module:factory``. `UserError` where there is none."""
    import rollout.adapters
    import rollout.environments  # noqa: F401  (both register the built-in ones)

    if name in _registry:
        return _registry[name]
    module, separator, attribute = name.partition(":")
    if not separator:
        raise UserError(f"agent.environment: there is no environment '{name}'{nearest(name, _registry)}")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"agent.environment: '{name}' cannot be imported: {error}") from error
    if not callable(factory):
        raise UserError(f"agent.environment: '{name}' is not callable")
    return factory


def make_environment(
    problem: Problem, config: AgentConfig, sandboxes: Sandboxes | None = None
) -> Environment | None:
    """The problem's environment, or the config's, or none.

    A problem is data, which may come from anywhere: it can name registered environments only, and import
    nothing.
    """
    own = problem.metadata.get("environment")
    if own is None:
        if config.environment is None:
            return None
        return _make(environment_factory(config.environment), problem, config.arguments, sandboxes)
    name, arguments = (own, {}) if isinstance(own, str) else (own.get("name"), own.get("arguments", {}))
    if not isinstance(name, str) or ":" in name:
        raise UserError(
            f"problem '{problem.id}': metadata.environment must be a registered environment's name"
        )
    return _make(environment_factory(name), problem, arguments, sandboxes)


def _make(
    factory: EnvironmentFactory, problem: Problem, arguments: dict[str, Any], sandboxes: Sandboxes | None
) -> Environment:
    if not getattr(factory, "uses_sandbox", False):
        return factory(problem, **arguments)
    if sandboxes is None:
        raise UserError(f"problem '{problem.id}': its environment needs sandboxes, and there are none here")
    return factory(problem, sandboxes=sandboxes, **arguments)


def tool_message(call: ToolCall, content: str) -> Message:
    """A result as the chat formats expect it: matched to its call by ``name:position``."""
    return {
        "role": "tool",
        "tool_call_id": f"{call.name}:{call.index - 1}",
        "name": call.name,
        "content": content,
    }


def malformed_messages(calls: Sequence[ToolCall]) -> list[Message]:
    """Answers to calls that cannot be run."""
    return [tool_message(c, f"Error: the call could not be read: {c.malformed}") for c in calls]
