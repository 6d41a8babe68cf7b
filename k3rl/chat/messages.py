"""Messages as people write them, read into one shape. Every mistake names the message it is in."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from k3rl.errors import UserError, nearest
from k3rl.types import Message, ParsedResponse, ToolCall

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Call:
    """An assistant's call to be rendered: ``arguments``, or ``raw`` text that could not be read as JSON."""

    name: str
    id: str
    arguments: dict[str, Any]
    raw: str = ""


def check_messages(messages: Sequence[Message]) -> None:
    """Raise `UserError` unless every message is a dict with a known role."""
    for position, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise UserError(f"message {position} is not a mapping but a {type(message).__name__}")
        role = message.get("role")
        if role not in ROLES:
            raise UserError(
                f"message {position} has the role {role!r}, which does not exist{nearest(str(role), ROLES)}"
            )


def reasoning_of(message: Message) -> str:
    """``reasoning_content``, else ``reasoning``; blank counts as none, anything else is kept as it is."""
    text = message.get("reasoning_content") or message.get("reasoning") or ""
    if not isinstance(text, str):
        raise UserError(f"an assistant message's reasoning is a {type(text).__name__}, not a string")
    return text if text.strip() else ""


def calls_of(message: Message) -> list[Call]:
    """The calls of an assistant message, in OpenAI's form, in the flat form, or as `ToolCall`."""
    return [_call(c, position) for position, c in enumerate(message.get("tool_calls") or (), 1)]


def _call(call: Any, position: int) -> Call:
    if isinstance(call, ToolCall):
        return Call(call.name, "", call.arguments, call.raw)
    if not isinstance(call, dict):
        raise UserError(f"tool call {position} is not a mapping but a {type(call).__name__}")
    function = call.get("function", call)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise UserError(f"tool call {position} has no function name")
    arguments, raw = _arguments(function.get("arguments"), name)
    return Call(name, str(call.get("id") or ""), arguments, raw)


def _arguments(arguments: Any, name: str) -> tuple[dict[str, Any], str]:
    if arguments is None:
        return {}, ""
    if isinstance(arguments, str):
        if not arguments.strip():
            return {}, ""
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            return {}, arguments
        arguments = value
    if not isinstance(arguments, dict):
        raise UserError(
            f"the arguments of the call of '{name}' are a {type(arguments).__name__}, not an object"
        )
    for key in arguments:
        if not isinstance(key, str):
            raise UserError(f"an argument of the call of '{name}' is named by {key!r}, which is not a string")
    return arguments, ""


def as_message(response: ParsedResponse) -> Message:
    """A parsed response as the assistant message that renders to it. Its calls get the ids ``name:0``, ..."""
    message: Message = {"role": "assistant", "content": response.content}
    if response.reasoning:
        message["reasoning_content"] = response.reasoning
    if response.tool_calls:
        message["tool_calls"] = [
            {
                "id": f"{call.name}:{n}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.raw or call.arguments},
            }
            for n, call in enumerate(response.tool_calls)
        ]
    return message


def runs(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Consecutive tool messages together, every other message alone."""
    run: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            run.append(message)
            continue
        if run:
            yield run
            run = []
        yield [message]
    if run:
        yield run


def tool_results(run: Sequence[Message], calls: Sequence[Call]) -> list[tuple[str, Message]]:
    """A run of consecutive tool messages in the order in which it is rendered, each with its tool's name.

    Results are matched to the last assistant's calls by ``tool_call_id`` (or ``id``; ``name:0`` counts as the
    id of the first call, if that is of ``name``) and stand in the calls' order, under the calls' names. If
    one result of the run matches nothing, the run keeps its own order.
    """
    positions = {f"{call.name}:{n}": n for n, call in enumerate(calls)}
    positions |= {call.id: n for n, call in enumerate(calls) if call.id}
    keyed = [(positions.get(str(m.get("tool_call_id") or m.get("id") or "")), m) for m in run]
    if all(n is not None for n, _ in keyed):
        keyed.sort(key=lambda pair: pair[0] or 0)
    named: list[tuple[str, Message]] = []
    for n, message in keyed:
        name = calls[n].name if n is not None else message.get("tool") or message.get("name")
        if not isinstance(name, str) or not name:
            known = ", ".join(sorted(positions)) or "none"
            raise UserError(
                "a tool result names no tool: it has no 'name', and its 'tool_call_id' "
                f"{message.get('tool_call_id')!r} is not the id of a call before it (ids: {known})"
            )
        named.append((name, message))
    return named
