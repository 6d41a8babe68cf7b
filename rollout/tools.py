"""An environment made of tools: plain functions, run in parallel, each with its time limit."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from k3rl.types import Message, Problem, StopReason, ToolCall
from rollout.environment import Opening, Reply, Turn, malformed_messages, tool_message

ToolFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Tool:
    """``function`` is sync or async and returns text, or anything JSON. ``parameters`` is a JSON schema."""

    name: str
    function: ToolFunction
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    timeout_s: float = 60.0

    def declaration(self) -> dict[str, Any]:
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": self.parameters,
            },
        }


class ToolEnvironment:
    """An `Environment`: a turn without calls is the answer and ends the trajectory; calls are run in
    parallel.

    ``memory`` is handed to tools that have a parameter of that name: a dict of JSON values that lives as
    long as the trajectory, pauses and worker deaths included. Errors and passed time limits are told to
    the policy.
    """

    def __init__(
        self, problem: Problem, tools: Sequence[Tool], memory: Mapping[str, Any] | None = None
    ) -> None:
        self.problem = problem
        self.tools = {tool.name: tool for tool in tools}
        self.memory: dict[str, Any] = dict(memory or {})

    async def reset(self) -> Opening:
        return Opening(tools=[*self.problem.tools, *(t.declaration() for t in self.tools.values())])

    async def step(self, turn: Turn) -> Reply:
        if not turn.calls:
            return Reply(done=True, stop_reason=StopReason.END_OF_TURN)
        answers = await asyncio.gather(*(self._call(call) for call in turn.calls))
        return Reply([message for message, _ in answers], failed_calls=sum(failed for _, failed in answers))

    async def _call(self, call: ToolCall) -> tuple[Message, bool]:
        if call.malformed:
            return malformed_messages([call])[0], True
        tool = self.tools.get(call.name)
        if tool is None:
            known = ", ".join(sorted(self.tools))
            return tool_message(call, f"Error: there is no tool '{call.name}'; there are: {known}"), True
        try:
            arguments = self._arguments(tool, call)
            result = await asyncio.wait_for(run_tool(tool.function, arguments), tool.timeout_s)
        except TimeoutError:
            return tool_message(call, f"Error: no result within {tool.timeout_s:g} seconds"), True
        except Exception as error:  # the policy's call made a tool fail: that is the observation
            return tool_message(call, f"Error: {type(error).__name__}: {error}"), True
        return tool_message(call, result if isinstance(result, str) else json.dumps(result)), False

    def _arguments(self, tool: Tool, call: ToolCall) -> dict[str, Any]:
        """Checked against the signature, so that a wrong name is told as such."""
        signature = inspect.signature(tool.function)
        arguments = {k: v for k, v in call.arguments.items() if k != "memory"}
        if "memory" in signature.parameters:
            arguments["memory"] = self.memory
        signature.bind(**arguments)
        return arguments

    async def pause(self) -> None:
        return None

    async def resume(self, state: dict[str, Any]) -> None:
        self.memory = dict(state.get("memory", {}))

    async def close(self) -> None:
        return None

    def state(self) -> dict[str, Any]:
        return {"memory": json.loads(json.dumps(self.memory))}

    def sandbox(self) -> dict[str, str] | None:
        return None


async def run_tool(function: ToolFunction, arguments: dict[str, Any]) -> Any:
    """Await an async function; run a plain one in a thread of its own.

    Of its own, not of a pool: a call that hangs past its time limit cannot be killed, and must not take a
    place from the others. Threads left behind are counted in `abandoned_tools`; untrusted or long work
    belongs in a sandbox.
    """
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(set_: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            set_(value)

    def work() -> None:
        try:
            value = function(**arguments)
        except BaseException as error:
            done: tuple[Callable[[Any], None], Any] = (future.set_exception, error)
        else:
            done = (future.set_result, value)
        finally:
            _alive.discard(threading.current_thread())
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *done)

    thread = threading.Thread(target=work, name=f"tool-{function.__name__}", daemon=True)
    _alive.add(thread)
    thread.start()
    try:
        result = await future
    except asyncio.CancelledError:
        _abandoned.add(thread)
        raise
    return await result if isinstance(result, Awaitable) else result


_alive: set[threading.Thread] = set()
_abandoned: set[threading.Thread] = set()


def abandoned_tools() -> int:
    """Threads whose call ran past its limit and still runs."""
    _abandoned.intersection_update(_alive)
    return len(_abandoned)
