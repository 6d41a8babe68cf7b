"""`XtmlRenderer`: K3's own format over any byte-level tokenizer that has its structure tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from k3rl.chat import xtml_format as fmt
from k3rl.chat.messages import Call
from k3rl.chat.renderer import Encoded
from k3rl.chat.vocabulary import Vocabulary
from k3rl.chat.xtml_parse import State, XtmlStream
from k3rl.chat.xtml_render import Piece, XtmlWriter, context_pieces
from k3rl.errors import UserError
from k3rl.types import Effort, Message, ParsedResponse

Convention = Literal["channel", "message"]

# What closes an element, from the innermost outwards; a message always has a response.
_CLOSER = {
    State.THINK: "think",
    State.RESPONSE: "response",
    State.ARGUMENT: "argument",
    State.JSON: "json",
    State.CALL: "call",
    State.TOOLS: "tools",
    State.MESSAGE: "message",
}


class XtmlRenderer:
    """A `Renderer`. ``convention`` says where a prompt ends: ``channel`` (`…think<|sep|>`, as K3's checkpoint and vLLM
    do) or ``message`` (`…assistant"<|sep|>`, as the hosted API does: the policy samples the opener itself).

    ``effort=None`` writes no effort message. Raises `UserError` where the tokenizer lacks a structure token.
    """

    def __init__(
        self, vocabulary: Vocabulary, name: str = "xtml", convention: Convention = "channel"
    ) -> None:
        missing = [token for token in fmt.MARKERS if token not in vocabulary.special_ids]
        if missing:
            raise UserError(
                f"tokenizer '{name}' lacks the structure tokens {', '.join(missing)}, which XTML needs"
            )
        if vocabulary.token_bytes is None:
            raise UserError(f"tokenizer '{name}' is not byte-level, which XTML needs")
        if convention not in ("channel", "message"):
            raise UserError(
                f"generation prompt convention '{convention}' does not exist; known: channel, message"
            )
        self.name = name
        self.convention = convention
        self.vocabulary = vocabulary
        self.vocab_size = vocabulary.size
        ends = (fmt.END_OF_MESSAGE, fmt.EOS)
        self.stop_token_ids = tuple(vocabulary.special_ids[t] for t in ends if t in vocabulary.special_ids)
        self._special = frozenset(vocabulary.special_ids.values())

    def encode_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        effort: Effort | str | None = None,
        thinking: bool = True,
        tool_choice: str | dict[str, Any] | None = None,
        response_format: dict[str, Any] | None = None,
    ) -> list[int]:
        """See `Renderer`. A last assistant message with ``partial: true`` is left open for the policy to go on."""
        pieces = context_pieces(messages, tools, effort, thinking, tool_choice, response_format)
        if not (messages and messages[-1].get("partial")):
            writer = XtmlWriter(thinking)
            writer.generation_prompt(self.convention)
            pieces += writer.pieces
        return self._ids(pieces)

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
        ``<|end_of_msg|>`` included, and not on arguments that are no JSON."""
        ids: list[int] = []
        mask: list[bool] = []
        for piece in context_pieces(messages, tools, effort, thinking, tool_choice, response_format):
            piece_ids = self._piece_ids(piece)
            ids += piece_ids
            mask += [piece.loss] * len(piece_ids)
        return Encoded(ids, mask)

    def extend(
        self, sampled_ids: Sequence[int], new_messages: Sequence[Message], thinking: bool = True
    ) -> list[int]:
        stream = self.stream(thinking)
        stream.feed(sampled_ids)
        ids = self._closers(stream)
        calls = [Call(call.name, "", call.arguments) for call in stream.calls]
        writer = XtmlWriter(thinking, calls)
        writer.messages(new_messages)
        writer.generation_prompt(self.convention)
        return ids + self._ids(writer.pieces)

    def parse(self, response_ids: Sequence[int], thinking: bool = True) -> ParsedResponse:
        stream = self.stream(thinking)
        stream.feed(response_ids)
        return stream.result()

    def stream(self, thinking: bool = True) -> XtmlStream:
        return XtmlStream(self.vocabulary, thinking)

    def decode(self, ids: Iterable[int]) -> str:
        return self.vocabulary.decode(ids)

    def decode_text(self, ids: Iterable[int]) -> str:
        return self.vocabulary.decode(i for i in ids if i not in self._special)

    def fingerprint(self) -> str:
        text = f"xtml\x1f{self.convention}\x1f{self.vocabulary.content_hash()}"
        return hashlib.sha256(text.encode()).hexdigest()

    def _ids(self, pieces: Sequence[Piece]) -> list[int]:
        ids: list[int] = []
        for piece in pieces:
            ids += self._piece_ids(piece)
        return ids

    def _piece_ids(self, piece: Piece) -> tuple[int, ...]:
        if not piece.structure:
            return self.vocabulary.encode(piece.text)
        try:
            return (self.vocabulary.special_ids[piece.text],)
        except KeyError:
            raise UserError(
                f"tokenizer '{self.name}' has no token {piece.text}, which a picture needs"
            ) from None

    def _closers(self, stream: XtmlStream) -> list[int]:
        """Feed `stream` what ends its message in good form, and return those ids."""
        ids: list[int] = []
        while stream.state is not State.DONE:
            writer = XtmlWriter()
            pending = stream.pending_tag
            if pending is not None:
                writer.text(_rest_of_tag(stream, *pending))
                writer.mark(fmt.SEP)
            elif stream.state is State.CLOSED:
                writer.mark(fmt.END_OF_MESSAGE)
            elif stream.state is State.MESSAGE and State.RESPONSE not in stream.opened:
                writer.start("response")
            else:
                writer.end(_CLOSER[stream.state])
            added = self._ids(writer.pieces)
            stream.feed(added)
            ids += added
        return ids


def _rest_of_tag(stream: XtmlStream, marker: str, text: str) -> str:
    """What completes a tag that was cut: the likeliest tag at this place, if it begins with `text`."""
    likely = _CLOSER.get(stream.state, "")
    if marker == fmt.OPEN:
        likely = "response" if State.RESPONSE not in stream.opened else "tools"
    return likely[len(text) :] if likely.startswith(text) else ""
