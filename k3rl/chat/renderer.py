"""What every part of k3rl asks of a chat format. Two answers: `XtmlRenderer` and `TemplateRenderer`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from k3rl.chat.xtml_parse import Delta
from k3rl.types import Effort, Message, ParsedResponse


@dataclass(frozen=True, slots=True)
class Encoded:
    """A conversation as ids. ``loss_mask[i]``: is ``ids[i]`` what a policy should learn to write?"""

    ids: list[int]
    loss_mask: list[bool]

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.loss_mask):
            raise ValueError(f"{len(self.ids)} ids have {len(self.loss_mask)} mask values")


class ResponseStream(Protocol):
    """Reads a response while it is generated. `result` after all ids equals the renderer's `parse`."""

    def feed(self, ids: Sequence[int]) -> list[Delta]: ...

    def result(self) -> ParsedResponse: ...


class Renderer(Protocol):
    """Messages to token ids and back, for one tokenizer.

    Text that a user, a tool or a data set brings is ordinary text in every field: it never becomes a
    structure token. Bad messages raise `UserError`, which names the message by its position.
    """

    name: str
    stop_token_ids: tuple[int, ...]
    vocab_size: int

    def encode_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        effort: Effort | str | None = None,
        thinking: bool = True,
    ) -> list[int]:
        """Ids up to and with the generation prompt. ``effort=None`` asks for no particular effort."""

    def encode_conversation(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        effort: Effort | str | None = None,
        thinking: bool = True,
    ) -> Encoded:
        """A finished conversation for supervised training, with its loss mask."""

    def extend(
        self, sampled_ids: Sequence[int], new_messages: Sequence[Message], thinking: bool = True
    ) -> list[int]:
        """Ids to append after a sampled turn: closers that it lacks, the new messages, the next generation
        prompt. ``sampled_ids`` is the last turn alone; what was sampled is never tokenised again. A tool
        result names its tool by ``name``, or its call by a ``tool_call_id`` such as ``add:0`` (0: the turn's
        first call)."""

    def parse(self, response_ids: Sequence[int], thinking: bool = True) -> ParsedResponse:
        """One turn's ids, generation prompt excluded, read by channel."""

    def stream(self, thinking: bool = True) -> ResponseStream: ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text with special tokens visible."""

    def decode_text(self, ids: Iterable[int]) -> str:
        """Text with special tokens left out. Bytes that are not UTF-8 become U+FFFD."""

    def fingerprint(self) -> str:
        """Hash of vocabulary and format. Processes that exchange ids compare it and refuse a mismatch."""
