"""What a reward function is: ``@reward`` above a function that gets `Scored` and returns a number.

    from rewards import Scored, reward

    @reward(name="brevity")
    def brevity(scored: Scored, limit: int = 200) -> float:
        return 1.0 if len(scored.content) <= limit else 0.0

A function returns a float, a bool, a mapping of named components (their sum is the value, unless there is one
named ``total``), or a `Score` where it wants to explain itself. With ``scope="group"`` it gets the list of a
problem's trajectories and returns a list as long. It may be ``async``. Arguments after the first are taken
from the problem's reward and the config by name.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from k3rl.errors import UserError, nearest
from k3rl.types import Channel, Effort, Outcome, ParsedResponse, Problem, ToolCall, Trajectory

F = TypeVar("F", bound=Callable[..., Any])
Scope = Literal["trajectory", "group"]
Depends = Literal["content", "response", "trajectory"]


@dataclass(frozen=True, slots=True)
class Scored:
    """What a reward function sees of one trajectory. ``response`` is its last turn, ``turns`` are all of
    them."""

    problem: Problem
    response: ParsedResponse
    trajectory: Trajectory
    turns: tuple[ParsedResponse, ...] = ()

    @property
    def content(self) -> str:
        """The response channel of the last turn."""
        return self.response.content

    @property
    def reasoning(self) -> str:
        """The think channel of the last turn."""
        return self.response.reasoning

    @property
    def tool_calls(self) -> list[ToolCall]:
        """All calls of all turns."""
        return [call for turn in self.turns or (self.response,) for call in turn.tool_calls]

    @property
    def question(self) -> str:
        """The last user message as text."""
        for message in reversed(self.problem.messages):
            if message.get("role") == "user":
                return text_of(message.get("content"))
        return ""

    @property
    def effort(self) -> Effort | None:
        return self.trajectory.effort

    @property
    def thinking_tokens(self) -> int:
        return self.trajectory.channel_tokens(Channel.THINK)

    @property
    def sampled_tokens(self) -> int:
        return self.trajectory.sampled_tokens


def text_of(content: Any) -> str:
    """The text of a message's content, be it a string or a list of parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(str(p.get("text", "")) for p in content if isinstance(p, Mapping) and "text" in p)
    return ""


@dataclass(frozen=True, slots=True)
class Score:
    """A verdict with its parts and its reasons. ``trace``: JSON of what a judge did, for the viewer."""

    value: float
    components: dict[str, float] = field(default_factory=dict)
    explanation: str = ""
    trace: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one call: a `Score`, or why there is none."""

    outcome: Outcome
    score: Score | None = None
    explanation: str = ""
    seconds_s: float = 0.0
    cached: bool = False


class GraderError(Exception):
    """Raised by a reward that cannot judge: the trajectory is marked as not scored, not as wrong."""


class JudgeError(GraderError):
    """Raised by a reward whose judge model failed."""


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A registered reward. ``address`` is by what `rewards.registry.get_reward` finds it in another process;
    empty: its name."""

    name: str
    function: Callable[..., Any]
    scope: Scope = "trajectory"
    depends: Depends = "trajectory"
    trusted: bool = False
    deterministic: bool = False
    timeout_s: float | None = None
    fresh: bool = False
    sandbox: bool = False
    origin: str = ""
    address: str = ""
    check: Callable[..., None] | None = None

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    @property
    def doc(self) -> str:
        return inspect.getdoc(self.function) or ""

    def bind(self, arguments: Mapping[str, Any], where: str = "") -> dict[str, Any]:
        """The arguments that the function takes. Raises `UserError` for one that is missing or unknown.

        An ``answer`` that the function does not ask for is left out: data sets carry answers for all
        rewards."""
        parameters = list(inspect.signature(self.function).parameters.values())[1:]
        if self.sandbox:
            parameters = [p for p in parameters if p.name != "sandbox"]
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return dict(arguments)
        names = [p.name for p in parameters]
        place = f"{where}: " if where else ""
        for name in arguments:
            if name not in names and name != "answer":
                raise UserError(f"{place}the reward '{self.name}' takes no '{name}'{nearest(name, names)}")
        for p in parameters:
            if p.default is p.empty and p.name not in arguments:
                raise UserError(f"{place}the reward '{self.name}' needs '{p.name}'")
        bound = {name: value for name, value in arguments.items() if name in names}
        if self.check is not None:
            self.check(**bound)
        return bound


REGISTERED: dict[str, RewardFunction] = {}
CLASHES: dict[str, list[str]] = {}
"""Names that two rewards claim. They can be used by path; asking for one by name is refused."""


def reward(
    name: str | None = None,
    *,
    scope: Scope = "trajectory",
    depends: Depends = "trajectory",
    trusted: bool = False,
    deterministic: bool = False,
    timeout_s: float | None = None,
    fresh: bool = False,
    sandbox: bool = False,
    check: Callable[..., None] | None = None,
) -> Callable[[F], F]:
    """Register a reward function.

    Args:
        name: Name in configs and data sets; else the function's.
        scope: ``trajectory`` (called once for each) or ``group`` (called once with all of a problem).
        depends: What the verdict depends on besides the arguments: the response channel, all channels of the
            last turn, or the whole trajectory. Decides what may share a cached verdict.
        trusted: Runs in the worker itself, without a process of its own. For code whose time and memory are
            bounded by the size of its input; everything else runs in a process that can be killed.
        deterministic: Equal inputs always get equal verdicts: they may be cached.
        timeout_s: Wall-clock limit of a call where it differs from the config's.
        fresh: A new process for every call. For rewards that run what the model wrote: nothing it changes
            outlives its own verdict.
        sandbox: Give the function a fresh sandbox (`sandbox_client.SyncSandbox`) as the keyword ``sandbox``, killed
            after the call. For plain trajectory functions.
        check: Called with the arguments before a run starts; raises `UserError` for those that cannot work.
    """

    def register(function: F) -> F:
        key = str(name or getattr(function, "__name__", ""))
        if sandbox and (scope == "group" or inspect.iscoroutinefunction(function)):
            raise UserError(
                f"the reward '{key}' wants a sandbox: it must be a plain function of one trajectory"
            )
        found = REGISTERED.get(key)
        origin = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', '')}"
        record = RewardFunction(
            key, function, scope, depends, trusted, deterministic, timeout_s, fresh, sandbox, origin,
            check=check,
        )  # fmt: skip
        if found is not None and found.origin != origin and not _same_source(found.function, function):
            CLASHES.setdefault(key, [found.origin]).append(origin)
        REGISTERED[key] = record
        function.__k3rl_reward__ = record  # type: ignore[attr-defined]
        return function

    return register


def _same_source(a: Callable[..., Any], b: Callable[..., Any]) -> bool:
    """A file that was edited and loaded again replaces its own rewards."""
    file_a, file_b = inspect.getsourcefile(a), inspect.getsourcefile(b)
    return file_a is not None and file_a == file_b and a.__qualname__ == b.__qualname__


def as_score(result: Any) -> Score:
    """A function's result as a `Score`. Raises `GraderError` where it is no finite number."""
    if isinstance(result, Score):
        value = _number(result.value, "value")
        parts = {str(k): _number(v, f"component '{k}'") for k, v in result.components.items()}
        return Score(value, parts, str(result.explanation), str(result.trace))
    if isinstance(result, Mapping):
        if not result:
            raise GraderError("the reward returned an empty mapping")
        parts = {str(k): _number(v, f"component '{k}'") for k, v in result.items()}
        total = parts.pop("total", None)
        return Score(sum(parts.values()) if total is None else total, parts)
    return Score(_number(result, "value"))


def as_scores(result: Any, count: int) -> list[Score]:
    """A group function's result. Raises `GraderError` where its length is not the group's."""
    if isinstance(result, str | bytes | Mapping) or not isinstance(result, Sequence):
        raise GraderError(f"the group reward returned a {type(result).__name__}, not a list")
    if len(result) != count:
        raise GraderError(f"the group reward returned {len(result)} values for {count} trajectories")
    return [as_score(r) for r in result]


def _number(value: Any, what: str) -> float:
    if value is None:
        raise GraderError(f"the reward's {what} is None")
    if isinstance(value, str | bytes):
        raise GraderError(f"the reward's {what} is text, not a number")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise GraderError(f"the reward's {what} is a {type(value).__name__}, not a number") from error
    if not math.isfinite(number):
        raise GraderError(f"the reward's {what} is {number}")
    return number
