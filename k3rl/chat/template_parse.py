"""Responses of models with a chat template: ``<think>…</think>``, text, ``<tool_call>{…}</tool_call>``.

Where a tag is a token of its own, only that token is the tag: the same characters spelled in pieces are text.
Where it is not, the characters are the tag. One state machine reads whole responses and streams.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from enum import StrEnum

from k3rl.chat.vocabulary import FastVocabulary
from k3rl.chat.xtml_parse import Delta
from k3rl.types import Channel, ParsedResponse, ToolCall

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
TAGS = (THINK_OPEN, THINK_CLOSE, CALL_OPEN, CALL_CLOSE)
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]+)"')


class TemplateState(StrEnum):
    START = "start"  # nothing but blanks yet: thinking can still open
    THINK = "think"
    RESPONSE = "response"
    CALL = "call"
    DONE = "done"  # a stop token was read


_CHANNEL = {
    TemplateState.START: Channel.RESPONSE,
    TemplateState.THINK: Channel.THINK,
    TemplateState.RESPONSE: Channel.RESPONSE,
    TemplateState.CALL: Channel.TOOL_CALL,
    TemplateState.DONE: Channel.STRUCTURE,
}
_EXPECTED = {  # tag: states in which it is one, state that it leads to
    THINK_OPEN: ((TemplateState.START,), TemplateState.THINK),
    THINK_CLOSE: ((TemplateState.THINK,), TemplateState.RESPONSE),
    CALL_OPEN: ((TemplateState.START, TemplateState.RESPONSE), TemplateState.CALL),
    CALL_CLOSE: ((TemplateState.CALL,), TemplateState.RESPONSE),
}


class TemplateStream:
    """Reads one response. ``thinking``: the prompt has opened the thinking already."""

    def __init__(self, vocabulary: FastVocabulary, stop_token_ids: Sequence[int], thinking: bool) -> None:
        self._special = {i: token for token, i in vocabulary.special_ids.items()}
        self._stop = frozenset(stop_token_ids)
        self._text_tags = [t for t in TAGS if t not in vocabulary.special_ids]
        self._decoder = vocabulary.text_stream()
        self.state = TemplateState.THINK if thinking else TemplateState.START
        self.errors: list[str] = []
        self.calls: list[ToolCall] = []
        self._whole = False
        self._pending = ""  # read, and perhaps the beginning of a tag
        self._held = ""  # blanks at an edge of a text: dropped if a tag follows
        self._trim = True  # newlines that begin a channel are layout
        self._texts: dict[Channel, list[str]] = {Channel.THINK: [], Channel.RESPONSE: []}
        self._call: list[str] = []
        self._position = 0  # characters read, tags included
        self._starts: list[int] = []  # by token: its first character
        self._regions: list[tuple[int, Channel]] = [(0, _CHANNEL[self.state])]
        self._deltas: list[Delta] = []

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        texts: list[str] = []
        at = self._position + len(self._pending)
        for token in ids:
            if token in self._stop or token in self._special:
                self._scan("".join(texts) + self._decoder.flush(), final=True)
                texts = []
                self._starts.append(self._position)
                self._structure(token)
                at = self._position
            else:
                self._starts.append(at)
                text = self._decoder.feed(token)
                at += len(text)
                texts.append(text)
        self._scan("".join(texts))
        deltas, self._deltas = self._deltas, []
        return deltas

    def result(self) -> ParsedResponse:
        """What has been read, as if the response ended here. The stream can go on."""
        texts = {channel: "".join(parts) for channel, parts in self._texts.items()}
        errors = list(self.errors)
        channel = _CHANNEL[self.state]
        if channel in texts:
            texts[channel] += self._cleaned(self._held + self._pending + self._decoder.pending())
        if self.state is TemplateState.CALL:
            errors.append("a tool call is not closed and is dropped")
        if self.state is not TemplateState.DONE:
            errors.append("the response does not end")
        return ParsedResponse(
            reasoning=texts[Channel.THINK],
            content=texts[Channel.RESPONSE],
            tool_calls=tuple(self.calls),
            complete=self._whole,
            channels=self._channels(),
            errors=tuple(errors),
        )

    def _channels(self) -> tuple[Channel, ...]:
        out: list[Channel] = []
        region = 0
        for start in self._starts:
            while region + 1 < len(self._regions) and self._regions[region + 1][0] <= start:
                region += 1
            out.append(self._regions[region][1])
        return tuple(out)

    def _structure(self, token: int) -> None:
        text = self._special.get(token, "")
        if self.state is TemplateState.DONE:
            self._note("tokens follow the end of the response")
        elif token in self._stop:
            self._enter(text or " ", self.state)
            self._end()
            return
        elif text in TAGS:
            states, target = _EXPECTED[text]
            if self.state in states:
                self._tag(text, target)
                return
            self._note(f"{text} does not belong into the {self.state} part")
        else:
            self._note(f"{text} stands where no structure belongs")
        self._enter(text, self.state)

    def _end(self) -> None:
        self._whole = self.state in (TemplateState.START, TemplateState.RESPONSE)
        channel = _CHANNEL[self.state]
        if channel in self._texts:
            self._say(channel, self._held)
        if self.state is TemplateState.CALL:
            self._note("a tool call is not closed and is dropped")
        if self.state is TemplateState.THINK:
            self._note("the thinking is not closed")
        self.state = TemplateState.DONE
        self._regions.append((self._position, Channel.STRUCTURE))

    def _scan(self, text: str, final: bool = False) -> None:
        """Ordinary text: find tags that are spelled in characters, keep back what may become one."""
        self._pending += text
        while True:
            tags = [t for t in self._text_tags if self.state in _EXPECTED[t][0]]
            found = [(at, t) for t in tags if (at := self._pending.find(t)) >= 0]
            if not found:
                break
            at, tag = min(found)
            before, self._pending = self._pending[:at], self._pending[at + len(tag) :]
            self._ordinary(before)
            if self.state in _EXPECTED[tag][0]:
                self._tag(tag, _EXPECTED[tag][1])
            else:  # text before it has ended the state that expects it
                self._ordinary(tag)
        keep = 0 if final else max((_overlap(self._pending, t) for t in tags), default=0)
        ready = len(self._pending) - keep
        text, self._pending = self._pending[:ready], self._pending[ready:]
        self._ordinary(text)

    def _ordinary(self, text: str) -> None:
        if not text:
            return
        self._position += len(text)
        if self.state is TemplateState.START and text.strip():
            self.state = TemplateState.RESPONSE
        if self.state is TemplateState.DONE:
            self._note("tokens follow the end of the response")
        elif self.state is TemplateState.CALL:
            self._call.append(text)
        elif self.state is TemplateState.START:
            self._held += text  # blanks, dropped if thinking follows
        else:
            text = self._held + text
            cleaned = self._cleaned(text)
            kept = cleaned.rstrip("\n")
            self._held = cleaned[len(kept) :] if kept or not self._trim else ""
            self._trim = self._trim and not kept
            self._say(_CHANNEL[self.state], kept)

    def _cleaned(self, text: str) -> str:
        return text.lstrip("\n") if self._trim else text

    def _say(self, channel: Channel, text: str) -> None:
        if text:
            self._texts[channel].append(text)
            self._deltas.append(Delta(channel, text))

    def _tag(self, tag: str, target: TemplateState) -> None:
        if self.state is TemplateState.CALL:
            self._end_call()
        elif self.state is TemplateState.START and tag == CALL_OPEN:
            self._say(Channel.RESPONSE, self._cleaned(self._held).rstrip("\n"))  # blanks, after all
        self._held = ""
        self._trim = tag != CALL_CLOSE
        self._enter(tag, target)
        self.state = target

    def _enter(self, tag: str, target: TemplateState) -> None:
        """Mark the characters of `tag` as structure, and those after it as `target`'s."""
        self._regions.append((self._position, Channel.STRUCTURE))
        self._position += len(tag)
        self._regions.append((self._position, _CHANNEL[target]))

    def _end_call(self) -> None:
        text = "".join(self._call)
        self._call = []
        call, problem = read_call(text, len(self.calls) + 1)
        if call is None:
            self._note(problem)
            return
        self.calls.append(call)
        self._deltas.append(Delta(Channel.TOOL_CALL, tool_call=call))

    def _note(self, error: str) -> None:
        if error not in self.errors:
            self.errors.append(error)


def read_call(text: str, index: int) -> tuple[ToolCall | None, str]:
    """A Hermes-style call, ``{"name": …, "arguments": {…}}``. Without a name: ``None`` and the reason."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        match = _NAME.search(text)
        if match is None:
            return None, "a call is no JSON and names no tool: it is dropped"
        return ToolCall(match[1], {}, index, "it is not JSON", text.strip()), ""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return None, "a call names no tool and is dropped"
    arguments = value.get("arguments", value.get("parameters", {}))
    raw = ""
    if isinstance(arguments, str):
        raw = arguments
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return ToolCall(name, {}, index, "its arguments are not JSON", raw), ""
    if not isinstance(arguments, dict):
        raw = raw or json.dumps(arguments, ensure_ascii=False)
        return ToolCall(name, {}, index, "its arguments are not a JSON object", raw), ""
    return ToolCall(name, arguments, index), ""


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that begins `tag`."""
    return next((k for k in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-k:])), 0)
