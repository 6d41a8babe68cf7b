"""Finished conversations for supervised training, from the same sources as problems."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from k3rl.data.config import Columns, DataConfig, MixData, ReasoningGymData, RowsConfig
from k3rl.data.problems import _json_list, read_messages
from k3rl.data.rows import open_rows
from k3rl.data.stream import _hash_64, permuted
from k3rl.errors import UserError, nearest
from k3rl.types import Effort, Message


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, at least one of them the assistant's, and what the renderer needs with them."""

    id: str
    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    effort: Effort | None = None
    domain: str = "general"


def read_conversation(row: Any, where: str, default_id: str, domain: str, columns: Columns) -> Conversation:
    """One row as a `Conversation`. Raises `UserError` that names ``where``."""
    if isinstance(row, Conversation):
        return row
    if not isinstance(row, Mapping):
        raise UserError(f"{where}: a row is a mapping of columns, not a {type(row).__name__}")
    messages = read_messages(row, where, columns)
    if not any(m["role"] == "assistant" for m in messages):
        raise UserError(f"{where}: no assistant message, so nothing to learn from")
    effort = row.get(columns.effort)
    if effort is not None and effort not in set(Effort):
        raise UserError(
            f"{where}: '{columns.effort}' is {effort!r}, not an effort{nearest(str(effort), Effort)}"
        )
    return Conversation(
        id=str(row.get(columns.id) or default_id),
        messages=messages,
        tools=_json_list(row.get(columns.tools), where, columns.tools),
        effort=Effort(effort) if effort is not None else None,
        domain=str(row.get(columns.domain) or domain),
    )


class ConversationSource:
    """Conversations with random access, all read and checked when opened."""

    def __init__(self, config: RowsConfig) -> None:
        if config.split is not None and config.split.rule != "last":
            raise UserError("conversations are split by the rule 'last' only")
        self.config, self.rows = config, open_rows(config)
        total = min(len(self.rows), config.limit or len(self.rows))
        self.start, self.end = 0, total
        if config.split is not None:
            border = total - max(1, round(total * config.split.held_out))
            self.start, self.end = (0, border) if config.split.part == "train" else (border, total)
        digest = hashlib.blake2b(digest_size=16)
        for index in range(len(self)):
            item = self[index]
            digest.update(json.dumps([item.id, item.messages], default=str).encode())
        self._digest = digest.hexdigest()

    def __len__(self) -> int:
        return self.end - self.start

    def __getitem__(self, index: int) -> Conversation:
        row = self.start + index
        if not self.start <= row < self.end:
            raise IndexError(index)
        where, name = self.rows.where(row), f"{self.rows.name}-{row}"
        return read_conversation(self.rows.row(row), where, name, self.config.domain, self.config.columns)

    def fingerprint(self) -> str:
        return self._digest


class MixedConversations:
    """Several sources of conversations in a row."""

    def __init__(self, sources: list[ConversationSource | MixedConversations]) -> None:
        self.sources = sources
        self.places = [(s, i) for s in sources for i in range(len(s))]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Conversation:
        source, local = self.places[index]
        return source[local]

    def fingerprint(self) -> str:
        return "+".join(s.fingerprint() for s in self.sources)


def load_conversations(config: DataConfig) -> ConversationSource | MixedConversations:
    """Open a source of conversations. Raises `UserError` that names file and row."""
    if isinstance(config, MixData):
        return MixedConversations([load_conversations(c) for c in config.sources])
    if isinstance(config, ReasoningGymData):
        raise UserError(
            "reasoning-gym gives problems, not finished conversations: it cannot feed supervised training"
        )
    return ConversationSource(config)


class ConversationStream:
    """Endless shuffled draws of conversations, resumable; the order is made as `ProblemStream` makes its
    own."""

    def __init__(self, source: ConversationSource | MixedConversations, seed: int) -> None:
        if not len(source):
            raise UserError("a stream of conversations needs at least one")
        self.source, self.seed, self.draw = source, seed, 0

    def next(self) -> Conversation:
        number, position = divmod(self.draw, len(self.source))
        self.draw += 1
        return self.source[permuted(position, len(self.source), _hash_64("pass", self.seed, number))]

    def state_dict(self) -> dict[str, Any]:
        return {
            "draw": self.draw,
            "seed": self.seed,
            "size": len(self.source),
            "fingerprint": self.source.fingerprint(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises `UserError` where the state is that of other conversations or another seed."""
        if state["seed"] != self.seed or state["size"] != len(self.source):
            raise UserError("the checkpoint's order of conversations is that of other data or another seed")
        if state["fingerprint"] != self.source.fingerprint():
            raise UserError("the checkpoint was made with other conversations than the data source now has")
        self.draw = int(state["draw"])
