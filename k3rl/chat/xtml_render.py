"""Conversations to XTML, as pieces that are tokenised one by one (spec/01-xtml.md §2-4)."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from k3rl.chat import xtml_format as fmt
from k3rl.chat.messages import Call, calls_of, check_messages, reasoning_of, runs, tool_results
from k3rl.errors import UserError, nearest
from k3rl.types import Effort, Message


class Piece(NamedTuple):
    """What is tokenised on its own. ``structure``: the text is one special token, else ordinary text only."""

    text: str
    structure: bool
    loss: bool = False


def context_pieces(
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] = (),
    effort: Effort | str | None = None,
    thinking: bool = True,
    tool_choice: str | dict[str, Any] | None = None,
    response_format: dict[str, Any] | None = None,
) -> list[Piece]:
    """A whole context, without the generation prompt: global options, messages, one-shot options."""
    writer = PieceWriter(thinking)
    writer.context(messages, tools, effort, tool_choice, response_format)
    return writer.pieces


def compact_json(value: Any) -> str:
    """JSON with sorted keys at every depth and no blanks: how tools and schemas are declared."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"a tool declaration or schema is not JSON: {error}") from error


class XtmlWriter(ABC):
    """Writes messages one after another; a subclass says what becomes of `mark` and `text`.

    ``calls`` are those of the last assistant message, for the tool results that follow. ``loss`` is true
    while what is written is what a policy should learn to write.
    """

    def __init__(self, thinking: bool = True, calls: Sequence[Call] = ()) -> None:
        self.thinking = thinking
        self.calls = list(calls)
        self.loss = False

    @abstractmethod
    def mark(self, token: str) -> None:
        """Write one special token."""

    @abstractmethod
    def text(self, text: str) -> None:
        """Write ordinary text that is tokenised on its own. Empty text writes nothing."""

    def start(self, name: str, /, **attributes: str) -> None:
        self.mark(fmt.OPEN)
        self.text(name)
        for key, value in attributes.items():
            self.text(f" {key}")
            self.text('="')
            self.text(fmt.escape(value))
            self.text('"')
        self.mark(fmt.SEP)

    def end(self, name: str) -> None:
        self.mark(fmt.CLOSE)
        self.text(name)
        self.mark(fmt.SEP)

    def context(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        effort: Effort | str | None = None,
        tool_choice: str | dict[str, Any] | None = None,
        response_format: dict[str, Any] | None = None,
    ) -> None:
        """Global options, messages, one-shot options."""
        check_messages(messages)
        effort = fmt.check_effort(effort)
        if tools:
            self.option("tool-declare", fmt.TOOLS_TEXT.replace("{}", compact_json(tools)))
        if self.thinking and effort is not None:
            self.option("thinking-effort", fmt.EFFORT_TEXT.format(effort))
        self.messages(messages)
        self.tool_choice(tool_choice)
        self.response_format(response_format)

    def end_message(self) -> None:
        self.end("message")
        self.mark(fmt.END_OF_MESSAGE)

    def option(self, kind: str, body: str) -> None:
        self.start("message", role="system", type=kind)
        self.text(body.strip())
        self.end_message()

    def generation_prompt(self, convention: str) -> None:
        """``message``: opens the assistant's message; ``channel``: opens its first channel too."""
        self.start("message", role="assistant")
        if convention == "channel":
            self.start("think" if self.thinking else "response")

    def messages(self, messages: Sequence[Message]) -> None:
        position = 1
        for run in runs(messages):
            try:
                if run[0]["role"] == "tool":
                    self.tool_run(run)
                else:
                    self.message(run[0])
            except UserError as error:
                raise UserError(f"message {position}: {error}") from error
            position += len(run)

    def tool_run(self, run: Sequence[Message]) -> None:
        for index, (name, message) in enumerate(tool_results(run, self.calls), 1):
            self.start("message", role="tool", tool=name, index=str(index))
            self.content(message.get("content"))
            self.end_message()

    def message(self, message: Message) -> None:
        role = "system" if message["role"] == "developer" else message["role"]
        if role == "assistant":
            self.assistant(message)
        elif role == "system" and message.get("tools"):
            if message.get("content"):
                raise UserError("a system message that declares 'tools' must have no content")
            self.option("tool-declare", fmt.MORE_TOOLS_TEXT.replace("{}", compact_json(message["tools"])))
        else:
            self.start("message", role=role, **_name(message))
            self.content(message.get("content"))
            self.end_message()

    def assistant(self, message: Message) -> None:
        """Everything after the message's opening tag carries loss, except a `json_block`."""
        self.calls = calls_of(message)
        self.start("message", role="assistant", **_name(message))
        self.loss = True
        if self.thinking:
            self.start("think")
            self.text(reasoning_of(message))
            self.end("think")
        self.start("response")
        self.content(message.get("content"))
        if message.get("partial"):
            if self.calls:
                raise UserError("a partial assistant message must have no tool calls")
        else:
            self.end("response")
            self.tool_calls(self.calls)
            self.end_message()
        self.loss = False

    def tool_calls(self, calls: Sequence[Call]) -> None:
        if not calls:
            return
        self.start("tools")
        for index, call in enumerate(calls, 1):
            self.start("call", tool=call.name, index=str(index))
            if call.raw:
                self.json_block(call.raw)
            for key, value in call.arguments.items():
                kind, text = typed_value(value, f"argument '{key}' of the call of '{call.name}'")
                self.start("argument", key=key, type=kind)
                self.text(text)
                self.end("argument")
            self.end("call")
        self.end("tools")

    def json_block(self, raw: str) -> None:
        """Arguments that no JSON parser reads. No model shall learn to write them: no loss."""
        loss, self.loss = self.loss, False
        self.start("json", type="object")
        self.text(raw)
        self.end("json")
        self.loss = loss

    def content(self, content: Any) -> None:
        if isinstance(content, str):
            self.text(content)
        elif content is not None:
            for part in _parts(content):
                self.part(part)

    def part(self, part: Any) -> None:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, str) or kind == "text":
            text = part if isinstance(part, str) else part.get("text")
            if not isinstance(text, str):
                raise UserError(f"a content part of type 'text' has no text: {part!r:.80}")
            self.text(text)
        elif kind in ("image", "image_url"):
            width, height = part.get("width"), part.get("height")
            if not (isinstance(width, int) and isinstance(height, int)):
                raise UserError(f"a content part of type '{kind}' needs 'width' and 'height', whole pixels")
            self.image(width, height)
        else:
            raise UserError(
                f"a content part has the type {kind!r}{nearest(str(kind), ('text', 'image', 'image_url'))}"
            )

    def image(self, width: int, height: int) -> None:
        """One picture: one pad token, which the model replaces by its vision tokens."""
        self.mark(fmt.MEDIA_BEGIN)
        self.text(f"image {width}x{height}")
        self.mark(fmt.MEDIA_CONTENT)
        self.mark(fmt.MEDIA_PAD)
        self.mark(fmt.MEDIA_END)

    def tool_choice(self, choice: str | dict[str, Any] | None) -> None:
        if choice is None or choice == "auto":
            return
        fixed = {"required": fmt.CHOICE_REQUIRED_TEXT, "none": fmt.CHOICE_NONE_TEXT}
        if isinstance(choice, dict):
            function = choice.get("function", choice)
            name = function.get("name") if isinstance(function, dict) else None
            if not isinstance(name, str) or not name:
                raise UserError(f"tool_choice names no function: {choice!r:.80}")
            self.option("tool-choice", fmt.CHOICE_NAMED_TEXT.replace("{}", name))
        elif choice in fixed:
            self.option("tool-choice", fixed[choice])
        else:
            raise UserError(f"tool_choice '{choice}' does not exist{nearest(choice, ['auto', *fixed])}")

    def response_format(self, form: dict[str, Any] | None) -> None:
        kind = "text" if form is None else form.get("type")
        if kind == "json_object":
            self.option("response-format", fmt.JSON_OBJECT_TEXT)
        elif kind == "json_schema":
            wrapper = (form or {}).get("json_schema")
            if not isinstance(wrapper, dict):
                raise UserError("response_format of type 'json_schema' has no 'json_schema' mapping")
            schema = wrapper.get("schema") or wrapper.get("json_schema") or wrapper
            self.option("response-format", fmt.JSON_SCHEMA_TEXT.replace("{}", compact_json(schema)))
        elif kind != "text":
            known = ("text", "json_object", "json_schema")
            raise UserError(f"response_format type {kind!r} does not exist{nearest(str(kind), known)}")


class PieceWriter(XtmlWriter):
    """Collects ``pieces``, for a reader who wants to see them."""

    def __init__(self, thinking: bool = True, calls: Sequence[Call] = ()) -> None:
        super().__init__(thinking, calls)
        self.pieces: list[Piece] = []

    def mark(self, token: str) -> None:
        self.pieces.append(Piece(token, True, self.loss))

    def text(self, text: str) -> None:
        if text:
            self.pieces.append(Piece(text, False, self.loss))


def typed_value(value: Any, what: str) -> tuple[str, str]:
    """An argument's type word and text: strings as they are, others as JSON with Python's blanks."""
    if isinstance(value, str):
        return "string", value
    if isinstance(value, bool):
        kind = "boolean"
    elif value is None:
        kind = "null"
    elif isinstance(value, int | float):
        kind = "number"
    else:
        kind = "object" if isinstance(value, dict) else "array"
    try:
        return kind, json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{what} is not JSON: {error}") from error


def _parts(content: Any) -> Sequence[Any]:
    if not isinstance(content, list | tuple):
        raise UserError(f"a message's content is a {type(content).__name__}, not a string or a list of parts")
    return content


def _name(message: Message) -> dict[str, str]:
    return {"name": str(message["name"])} if message.get("name") else {}
