"""XTML back from token ids, whole or as it streams (spec/01-xtml.md §5).

Markers are single ids, so a literal ``<|close|>`` inside a string is text and the real one is not: nothing is
guessed from strings. One state machine reads both ways: a stream cut anywhere gives what the whole gives.
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
from k3rl.chat.vocabulary import Vocabulary, join_bytes
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
_TOOL_STATES = frozenset((State.TOOLS, State.CALL, State.ARGUMENT, State.JSON))
_CHANNEL = {State.THINK: Channel.THINK, State.RESPONSE: Channel.RESPONSE} | dict.fromkeys(
    _TOOL_STATES, Channel.TOOL_CALL
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

    Both conventions are read: a message that begins within its first channel (``opened``: the prompt held the
    opener), and one that begins with the opener; whichever is expected, the other is understood. After a
    malformed tag the machine goes on, and notes it in ``errors``.
    """

    def __init__(self, vocabulary: Vocabulary, thinking: bool = True, opened: bool = True) -> None:
        if vocabulary.token_bytes is None:
            raise ValueError("XTML is read from byte-level vocabularies only")
        special = vocabulary.special_ids
        self._bytes = vocabulary.token_bytes
        self._open, self._close = special[fmt.OPEN], special[fmt.CLOSE]
        self._sep, self._end = special[fmt.SEP], special[fmt.END_OF_MESSAGE]
        self._special = {i: token for token, i in special.items()}
        self.thinking = thinking
        self.state = (State.THINK if thinking else State.RESPONSE) if opened else State.MESSAGE
        self.opened: set[State] = {self.state} if opened else set()  # channels
        self.channels: list[Channel] = []
        self.errors: list[str] = []
        self.calls: list[ToolCall] = []
        self._unclosed = False  # has an element been closed by what is around it?
        self._tag: tuple[int, bytearray, int] | None = None  # marker, text so far, first token's position
        self._texts: dict[State, list[str]] = {State.THINK: [], State.RESPONSE: []}
        self._value: list[str] = []  # of the open argument
        self._argument: tuple[str, str] = ("", "")  # key, type
        self._call: _OpenCall | None = None
        self._call_count = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._deltas: list[Delta] = []

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        """Read more ids; returns what they brought, in order."""
        special, start = self._special, 0
        for position, token in enumerate(ids):
            if token in special:
                if position > start:
                    self._ordinary(ids[start:position])
                self._structure(token)
                start = position + 1
        if start < len(ids):
            self._ordinary(ids[start:])
        deltas, self._deltas = self._deltas, []
        return deltas

    def result(self) -> ParsedResponse:
        """What has been read, as if the response ended here. The stream can go on."""
        errors = list(self.errors)
        texts = {state: "".join(parts) for state, parts in self._texts.items()}
        if self.state in texts and self._tag is None:
            buffered, _ = self._decoder.getstate()
            texts[self.state] += buffered.decode("utf-8", "replace")
        if self.state is not State.DONE:
            errors.append(
                "the message does not end" if self._tag is None else "the message ends within a tag"
            )
        whole = self.state is State.DONE and State.RESPONSE in self.opened and not self._unclosed
        return ParsedResponse(
            reasoning=texts[State.THINK],
            content=texts[State.RESPONSE],
            tool_calls=tuple(self.calls),
            complete=whole,
            channels=tuple(self.channels),
            errors=tuple(errors),
        )

    @property
    def pending_tag(self) -> tuple[str, str] | None:
        """Marker and text of a tag that is not finished, or ``None``."""
        if self._tag is None:
            return None
        return self._special[self._tag[0]], self._tag[1].decode("utf-8", "replace")

    def _ordinary(self, ids: Sequence[int]) -> None:
        """Tokens of ordinary text, one or more."""
        data = join_bytes(self._bytes, ids)
        if self._tag is not None:
            self._tag[1].extend(data)
            self.channels += [self._structure_channel()] * len(ids)
            return
        if self.state is State.MESSAGE and not self.opened:
            self._note("the first channel is not opened")
            self.state = State.THINK if self.thinking else State.RESPONSE
            self.opened.add(self.state)
        self.channels += [_CHANNEL.get(self.state, Channel.STRUCTURE)] * len(ids)
        if self.state in _TEXT_STATES:
            self._append(self._decoder.decode(data))
        else:
            self._note("text stands between tags")

    def _structure(self, token: int) -> None:
        position = len(self.channels)
        self.channels.append(self._structure_channel())
        if token == self._open or token == self._close:
            if self._tag is not None:
                self._note("a tag begins within a tag")
            self._flush_text()
            self._tag = (token, bytearray(), position)
        elif token == self._end:
            self._finish()
        elif token == self._sep and self._tag is not None:
            marker, text, start = self._tag
            self._tag = None
            self._transition(marker == self._open, text.decode("utf-8", "replace"), start)
        else:
            self._note(f"{self._special[token]} stands where no structure belongs")

    def _structure_channel(self) -> Channel:
        return Channel.TOOL_CALL if self.state in _TOOL_STATES else Channel.STRUCTURE

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
        """``<|end_of_msg|>`` was read."""
        if self._tag is not None:
            self._note("the message ends within a tag")
            self._tag = None
        self._flush_text()
        if self.state is State.DONE:
            self._note("tokens follow the end of the message")
        elif self.state is not State.CLOSED:
            self._unclosed = True
            self._note(f"the message ends within its {self.state} element")
            if self._call is not None:
                self._note(f"a call of '{self._call.name}' is not finished and is dropped")
                self._call = None
        self.channels[-1] = Channel.STRUCTURE
        self.state = State.DONE

    def _note(self, error: str) -> None:
        if error not in self.errors:
            self.errors.append(error)

    def _transition(self, opens: bool, text: str, start: int) -> None:
        """A whole tag has been read: move to where it leads, and give its tokens their channel."""
        before = self.state
        match = _TAG.match(text)
        name = match[1] if match else ""
        attributes = {k: fmt.unescape(v) for k, v in _ATTRIBUTE.findall(match[2])} if match else {}
        if opens and start == 0 and name in ("think", "response"):
            self.state, self.opened = State.MESSAGE, set()  # the prompt held no opener after all
        known = self._start(name, attributes) if opens else self._stop(name)
        if not known:
            sign = fmt.OPEN if opens else fmt.CLOSE
            self._note(f"{sign}{text[:40]}{fmt.SEP} does not belong into the {before} element")
        inner = before in _TOOL_STATES and self.state in _TOOL_STATES
        channel = Channel.TOOL_CALL if inner else Channel.STRUCTURE
        self.channels[start:] = [channel] * (len(self.channels) - start)

    def _start(self, name: str, attributes: dict[str, str]) -> bool:
        if name in ("think", "response", "tools") and self.state in (
            State.MESSAGE,
            State.THINK,
            State.RESPONSE,
        ):
            return self._start_channel(State(name))
        if name == "call" and self.state is State.TOOLS:
            self._call = _OpenCall(attributes.get("tool", ""))
            self._call_count += 1
            if attributes.get("index") != str(self._call_count):
                self._note(f"call {self._call_count} has the index {attributes.get('index')!r}")
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

    def _start_channel(self, channel: State) -> bool:
        """Channels come once each, thinking first. One that is still open is closed by the next."""
        if channel in self.opened or (channel is State.THINK and self.opened):
            return False
        if self.state is not State.MESSAGE:
            self._unclosed = True
            self._note(f"the {self.state} element is not closed")
        self.opened.add(channel)
        self.state = channel
        return True

    def _stop(self, name: str) -> bool:
        """Close the element `name`; elements left open within it are closed too, and noted."""
        path = [self.state]
        while path[-1] in _PARENT and path[-1] != name:
            path.append(_PARENT[path[-1]])
        if path[-1] != name or path[-1] not in _PARENT:
            return False
        for state in path:
            if state != name:
                self._unclosed = True
                self._note(f"the {state} element is not closed")
            self._leave(state)
        self.state = _PARENT[path[-1]]
        return True

    def _leave(self, state: State) -> None:
        if state is State.ARGUMENT:
            self._end_argument()
        elif state is State.JSON and self._call is not None:
            self._call.raw = "".join(self._value)
            self._call.malformed = "its arguments stand in a JSON block, which is for text that is no JSON"
        elif state is State.CALL:
            self._end_call()
        elif state is State.MESSAGE and State.RESPONSE not in self.opened:
            self._note("the message has no response")

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
            self._note("a call names no tool and is dropped")
            return
        arguments = {} if call.raw else call.arguments
        done = ToolCall(call.name, arguments, len(self.calls) + 1, call.malformed, call.raw)
        self.calls.append(done)
        self._deltas.append(Delta(Channel.TOOL_CALL, tool_call=done))


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
