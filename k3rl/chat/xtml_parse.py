"""XTML back from token ids, whole or as it streams (spec/01-xtml.md §5).

Markers are single ids, so a literal ``<|close|>`` inside a string is text and the real one is not: nothing is guessed
from strings. One state machine reads both ways, so that a stream cut anywhere gives what the whole gives.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from k3rl.chat import xtml_format as fmt
from k3rl.chat.vocabulary import Vocabulary
from k3rl.types import Channel, ParsedResponse, ToolCall

_TAG = re.compile(r'(\w+)((?: [\w-]+="[^"]*")*)\Z', re.DOTALL)
_ATTRIBUTE = re.compile(r' ([\w-]+)="([^"]*)"', re.DOTALL)
_TYPES: dict[str, tuple[type, ...]] = {
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}


class State(StrEnum):
    """Where in an assistant's message the next token stands."""

    MESSAGE = "message"  # between channels
    THINK = "think"
    RESPONSE = "response"
    TOOLS = "tools"  # between calls
    CALL = "call"  # between arguments
    ARGUMENT = "argument"
    JSON = "json"
    CLOSED = "closed"  # after the message's closing tag
    DONE = "done"  # after <|end_of_msg|>


_PARENT = {
    State.THINK: State.MESSAGE,
    State.RESPONSE: State.MESSAGE,
    State.TOOLS: State.MESSAGE,
    State.CALL: State.TOOLS,
    State.ARGUMENT: State.CALL,
    State.JSON: State.CALL,
    State.MESSAGE: State.CLOSED,
}
_CHANNEL = {State.THINK: Channel.THINK, State.RESPONSE: Channel.RESPONSE} | dict.fromkeys(
    (State.TOOLS, State.CALL, State.ARGUMENT, State.JSON), Channel.TOOL_CALL
)
_TEXT_STATES = (State.THINK, State.RESPONSE, State.ARGUMENT, State.JSON)


@dataclass(frozen=True, slots=True)
class Delta:
    """News from a stream: more text of a channel, or a call that is now complete."""

    channel: Channel
    text: str = ""
    tool_call: ToolCall | None = None


@dataclass(slots=True)
class _OpenCall:
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    raw: str = ""
    malformed: str = ""


class XtmlStream:
    """Reads one assistant message. `feed` it ids as they come; `result` says what has been read so far.

    Both conventions are read: a message that begins within its first channel (the prompt held the opener), and one
    that begins with the opener. After a malformed tag the machine goes on and notes it in ``errors``.
    """

    def __init__(self, vocabulary: Vocabulary, thinking: bool = True) -> None:
        if vocabulary.token_bytes is None:
            raise ValueError("XTML is read from byte-level vocabularies only")
        special = vocabulary.special_ids
        self._bytes = vocabulary.token_bytes
        self._open, self._close = special[fmt.OPEN], special[fmt.CLOSE]
        self._sep, self._end = special[fmt.SEP], special[fmt.END_OF_MESSAGE]
        self._special = {i: token for token, i in special.items()}
        self.state = State.THINK if thinking else State.RESPONSE
        self.channels: list[Channel] = []
        self.errors: list[str] = []
        self.calls: list[ToolCall] = []
        self.opened: set[State] = {self.state}
        self._prefilled = True  # no token read yet: an opener now means that the prompt held none
        self._tag: tuple[int, bytearray, int] | None = None  # marker, text so far, first token's position
        self._texts: dict[State, list[str]] = {State.THINK: [], State.RESPONSE: []}
        self._value: list[str] = []
        self._argument: tuple[str, str] = ("", "")
        self._call: _OpenCall | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._deltas: list[Delta] = []

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        """Read more ids; returns what they brought, in order."""
        for token in ids:
            self._read(token)
        deltas, self._deltas = self._deltas, []
        return deltas

    def result(self) -> ParsedResponse:
        """What has been read, as if the response ended here. The stream can go on."""
        errors = list(self.errors)
        pending = self._decoder.decode(b"", False) if self.state not in _TEXT_STATES else self._pending_text()
        texts = {state: "".join(parts) for state, parts in self._texts.items()}
        if self.state in texts:
            texts[self.state] += pending
        if self.state is not State.DONE:
            errors.append(
                "the message does not end" if self._tag is None else "the message ends within a tag"
            )
        return ParsedResponse(
            reasoning=texts[State.THINK],
            content=texts[State.RESPONSE],
            tool_calls=tuple(self.calls),
            complete=self.state is State.DONE and self._closed_properly,
            channels=tuple(self.channels),
            errors=tuple(errors),
        )

    _closed_properly = False

    @property
    def pending_tag(self) -> tuple[str, str] | None:
        """Marker and text of a tag that is not finished, or ``None``."""
        if self._tag is None:
            return None
        return self._special[self._tag[0]], self._tag[1].decode("utf-8", "replace")

    def _pending_text(self) -> str:
        buffered, _ = self._decoder.getstate()
        return buffered.decode("utf-8", "replace")

    def _read(self, token: int) -> None:
        position = len(self.channels)
        self.channels.append(_CHANNEL.get(self.state, Channel.STRUCTURE))
        prefilled, self._prefilled = self._prefilled, False
        if token == self._open or token == self._close:
            if self._tag is not None:
                self._bad_tag("a tag begins within a tag")
            if prefilled and token == self._open:
                self.state, self.opened = State.MESSAGE, set()
            self._flush_text()
            self._tag = (token, bytearray(), position)
        elif token == self._end:
            self._finish()
        elif token == self._sep and self._tag is not None:
            marker, text, start = self._tag
            self._tag = None
            self._transition(marker == self._open, text.decode("utf-8", "replace"), start)
        elif token in self._special:
            self.errors.append(f"{self._special[token]} stands where no structure belongs")
            self.channels[-1] = Channel.STRUCTURE
        elif self._tag is not None:
            self._tag[1].extend(self._bytes[token])
        else:
            self._text(self._bytes[token])

    def _text(self, data: bytes) -> None:
        if self.state in _TEXT_STATES:
            self._append(self._decoder.decode(data))
        elif not self.errors or self.errors[-1] != "text stands between tags":
            self.errors.append("text stands between tags")

    def _append(self, text: str) -> None:
        if not text:
            return
        if self.state in self._texts:
            self._texts[self.state].append(text)
            self._deltas.append(Delta(_CHANNEL[self.state], text))
        else:
            self._value.append(text)

    def _flush_text(self) -> None:
        if self.state in _TEXT_STATES:
            self._append(self._decoder.decode(b"", True))
        self._decoder.reset()

    def _finish(self) -> None:
        if self._tag is not None:
            self._bad_tag("the message ends within a tag")
        self._flush_text()
        self._closed_properly = self.state is State.CLOSED
        if self.state is State.DONE:
            self.errors.append("tokens follow the end of the message")
        elif not self._closed_properly:
            self.errors.append(f"the message ends within its {self.state} element")
            self._drop_call()
        self.channels[-1] = Channel.STRUCTURE
        self.state = State.DONE

    def _bad_tag(self, why: str) -> None:
        self.errors.append(why)
        self._tag = None

    def _transition(self, opens: bool, text: str, start: int) -> None:
        """A whole tag has been read: move to where it leads, and give its tokens their channel."""
        before = self.state
        match = _TAG.match(text)
        name = match[1] if match else ""
        attributes = {k: fmt.unescape(v) for k, v in _ATTRIBUTE.findall(match[2])} if match else {}
        if opens:
            known = self._start(name, attributes)
        else:
            known = self._stop(name)
        if not known:
            sign = fmt.OPEN if opens else fmt.CLOSE
            self.errors.append(f"{sign}{text[:40]}{fmt.SEP} does not belong into the {before} element")
        inner = {before, self.state} <= {State.TOOLS, State.CALL, State.ARGUMENT, State.JSON}
        channel = Channel.TOOL_CALL if inner else Channel.STRUCTURE
        self.channels[start:] = [channel] * (len(self.channels) - start)

    def _start(self, name: str, attributes: dict[str, str]) -> bool:
        if name in ("think", "response", "tools") and self.state in (
            State.MESSAGE,
            State.THINK,
            State.RESPONSE,
        ):
            channel = State(name)
            if channel in self.opened or (channel is State.THINK and self.opened):
                return False
            if self.state is not State.MESSAGE:
                self.errors.append(f"the {self.state} element is not closed")
            self.opened.add(channel)
            self.state = channel
        elif name == "call" and self.state is State.TOOLS:
            self._call = _OpenCall(attributes.get("tool", ""))
            if attributes.get("index") != str(len(self.calls) + 1):
                self.errors.append(f"call {len(self.calls) + 1} has the index {attributes.get('index')!r}")
            self.state = State.CALL
        elif name == "argument" and self.state is State.CALL:
            self._argument = (attributes.get("key", ""), attributes.get("type", ""))
            self._value = []
            self.state = State.ARGUMENT
        elif name == "json" and self.state is State.CALL:
            self._value = []
            self.state = State.JSON
        else:
            return False
        return True

    def _stop(self, name: str) -> bool:
        """Close the element `name`; elements left open within it are closed too, and noted."""
        path = [self.state]
        while path[-1] in _PARENT and path[-1] != name:
            path.append(_PARENT[path[-1]])
        if path[-1] != name or name == State.CLOSED:
            return False
        for state in path:
            if state != name:
                self.errors.append(f"the {state} element is not closed")
            self._leave(state)
        self.state = _PARENT[State(name)]
        return True

    def _leave(self, state: State) -> None:
        if state is State.ARGUMENT:
            self._end_argument()
        elif state is State.JSON and self._call is not None:
            self._call.raw = "".join(self._value)
            self._call.malformed = "its arguments are not a JSON object"
        elif state is State.CALL:
            self._end_call()

    def _end_argument(self) -> None:
        key, kind = self._argument
        value, problem = typed_argument("".join(self._value), kind)
        if self._call is None:
            return
        if key in self._call.arguments:
            problem = "is given twice"
        if problem and not self._call.malformed:
            self._call.malformed = f"argument '{key}' {problem}"
        self._call.arguments[key] = value

    def _end_call(self) -> None:
        call, self._call = self._call, None
        if call is None:
            return
        if not call.name:
            self.errors.append("a call names no tool and is dropped")
            return
        done = ToolCall(call.name, call.arguments, len(self.calls) + 1, call.malformed, call.raw)
        self.calls.append(done)
        self._deltas.append(Delta(Channel.TOOL_CALL, tool_call=done))

    def _drop_call(self) -> None:
        if self._call is not None:
            self.errors.append(f"a call of '{self._call.name}' is not finished and is dropped")
            self._call = None


def typed_argument(text: str, kind: str) -> tuple[Any, str]:
    """An argument's value, and what is wrong with it (empty if nothing). What cannot be read stays text."""
    if kind == "string":
        return text, ""
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return text, f"is not the {kind or 'typed value'} that it says it is"
    if kind not in _TYPES:
        return value, f"has the type '{kind}', which does not exist"
    right = isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))
    if not right or (isinstance(value, float) and not math.isfinite(value)):
        return text, f"is not the {kind} that it says it is"
    return value, ""


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
