"""`XtmlRenderer`: K3's own format over any byte-level tokenizer that has its structure tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from k3rl.chat import xtml_format as fmt
from k3rl.chat.messages import Call, check_messages
from k3rl.chat.renderer import Encoded
from k3rl.chat.vocabulary import Vocabulary
from k3rl.chat.xtml_parse import State, XtmlStream
from k3rl.chat.xtml_render import PieceWriter, XtmlWriter
from k3rl.errors import UserError
from k3rl.types import Effort, Message, ParsedResponse

Convention = Literal["channel", "message"]
Tags = dict[tuple[str, tuple[tuple[str, str], ...] | None], tuple[int, ...]]
CACHED_TAGS = 4096


class XtmlRenderer:
    """A `Renderer`. ``convention`` says where a prompt ends: ``channel`` (`…think<|sep|>`, as K3's checkpoint
    and vLLM do) or ``message`` (`…assistant"<|sep|>`, as the hosted API does: the policy samples the opener).

    ``effort=None`` writes no effort message. Raises `UserError` where the tokenizer lacks a structure token.
    """

    def __init__(
        self, vocabulary: Vocabulary, name: str = "xtml", convention: Convention = "channel"
    ) -> None:
        missing = [token for token in fmt.MARKERS if token not in vocabulary.special_ids]
        if missing:
            raise UserError(f"tokenizer '{name}' lacks the structure tokens {', '.join(missing)}")
        if vocabulary.token_bytes is None:
            raise UserError(f"tokenizer '{name}' is not byte-level, which XTML needs")
        if convention not in ("channel", "message"):
            raise UserError(f"generation prompt convention '{convention}' is neither 'channel' nor 'message'")
        self.name = name
        self.convention = convention
        self.vocabulary = vocabulary
        self.vocab_size = vocabulary.size
        ends = (fmt.END_OF_MESSAGE, fmt.EOS)
        self.stop_token_ids = tuple(vocabulary.special_ids[t] for t in ends if t in vocabulary.special_ids)
        self._special = frozenset(vocabulary.special_ids.values())
        self._tags: Tags = {}

    def encode_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        effort: Effort | str | None = None,
        thinking: bool = True,
        tool_choice: str | dict[str, Any] | None = None,
        response_format: dict[str, Any] | None = None,
    ) -> list[int]:
        """See `Renderer`. A last assistant message with ``partial: true`` is left open."""
        writer = self._writer(thinking)
        writer.context(messages, tools, effort, tool_choice, response_format)
        if not (messages and messages[-1].get("partial")):
            writer.generation_prompt(self.convention)
        return writer.ids

    def encode_conversation(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        effort: Effort | str | None = None,
        thinking: bool = True,
        tool_choice: str | dict[str, Any] | None = None,
        response_format: dict[str, Any] | None = None,
    ) -> Encoded:
        """See `Renderer`. Loss is on each assistant message after its opening tag, channel openers and
        ``<|end_of_msg|>`` included, and not on arguments that are no JSON (spec/01-xtml.md §4)."""
        writer = self._writer(thinking)
        writer.context(messages, tools, effort, tool_choice, response_format)
        return Encoded(writer.ids, writer.mask)

    def extend(
        self, sampled_ids: Sequence[int], new_messages: Sequence[Message], thinking: bool = True
    ) -> list[int]:
        check_messages(new_messages)
        stream = self.stream(thinking)
        stream.feed(sampled_ids)
        ids = self._closers(stream)
        writer = self._writer(thinking, [Call(call.name, "", call.arguments) for call in stream.calls])
        writer.messages(new_messages)
        writer.generation_prompt(self.convention)
        return ids + writer.ids

    def parse(self, response_ids: Sequence[int], thinking: bool = True) -> ParsedResponse:
        stream = self.stream(thinking)
        stream.feed(response_ids)
        return stream.result()

    def stream(self, thinking: bool = True) -> XtmlStream:
        return XtmlStream(self.vocabulary, thinking, opened=self.convention == "channel")

    def decode(self, ids: Iterable[int]) -> str:
        return self.vocabulary.decode(ids)

    def decode_text(self, ids: Iterable[int]) -> str:
        return self.vocabulary.decode(i for i in ids if i not in self._special)

    def fingerprint(self) -> str:
        text = f"xtml\x1f{self.convention}\x1f{self.vocabulary.content_hash()}"
        return hashlib.sha256(text.encode()).hexdigest()

    def _writer(self, thinking: bool, calls: Sequence[Call] = ()) -> _IdWriter:
        if len(self._tags) > CACHED_TAGS:
            self._tags = {}
        return _IdWriter(self.vocabulary, self._tags, thinking, calls)

    def _closers(self, stream: XtmlStream) -> list[int]:
        """Feed `stream` what ends its message in good form, and return those ids."""
        ids: list[int] = []
        while stream.state is not State.DONE:
            writer = self._writer(stream.thinking)
            pending = stream.pending_tag
            if pending is not None:
                writer.text(_rest_of_tag(stream, *pending))
                writer.mark(fmt.SEP)
            elif stream.state is State.CLOSED:
                writer.mark(fmt.END_OF_MESSAGE)
            elif stream.state is State.MESSAGE and State.RESPONSE not in stream.opened:
                writer.start(_next_channel(stream))
            else:
                writer.end(stream.state)
            stream.feed(writer.ids)
            ids += writer.ids
        return ids


class _IdWriter(XtmlWriter):
    """Writes token ids. Piece by piece as `PieceWriter` cuts them, but a tag seen before is one look-up."""

    def __init__(
        self, vocabulary: Vocabulary, tags: Tags, thinking: bool, calls: Sequence[Call] = ()
    ) -> None:
        super().__init__(thinking, calls)
        self.ids: list[int] = []
        self.mask: list[bool] = []
        self._encode, self._special, self._tags = vocabulary.encode, vocabulary.special_ids, tags

    def mark(self, token: str) -> None:
        if token not in self._special:
            raise UserError(f"the tokenizer has no token {token}, which a picture needs")
        self._add((self._special[token],))

    def text(self, text: str) -> None:
        if text:
            self._add(self._encode(text))

    def start(self, name: str, /, **attributes: str) -> None:
        key = (name, tuple(attributes.items()))
        if key not in self._tags:
            pieces = PieceWriter()
            pieces.start(name, **attributes)
            self._tags[key] = self._piece_ids(pieces)
        self._add(self._tags[key])

    def end(self, name: str) -> None:
        key = (name, None)
        if key not in self._tags:
            pieces = PieceWriter()
            pieces.end(name)
            self._tags[key] = self._piece_ids(pieces)
        self._add(self._tags[key])

    def _piece_ids(self, writer: PieceWriter) -> tuple[int, ...]:
        cut = [(self._special[p.text],) if p.structure else self._encode(p.text) for p in writer.pieces]
        return tuple(i for ids in cut for i in ids)

    def _add(self, ids: tuple[int, ...]) -> None:
        self.ids += ids
        self.mask += [self.loss] * len(ids)


def _next_channel(stream: XtmlStream) -> str:
    return "think" if stream.thinking and not stream.opened else "response"


def _rest_of_tag(stream: XtmlStream, marker: str, text: str) -> str:
    """What completes a tag that was cut: the likeliest tag at this place, if it begins with `text`."""
    if marker == fmt.CLOSE:
        likely = str(stream.state)
    elif stream.state in (State.TOOLS, State.CALL):
        likely = "call" if stream.state is State.TOOLS else "argument"
    else:
        likely = "tools" if State.RESPONSE in stream.opened else _next_channel(stream)
    return likely[len(text) :] if likely.startswith(text) else ""
