"""One generation inside the engine, and the table of per-slot sampling settings.

Owner of both: the engine. A sequence is created by `submit` and dropped when its generation finishes or
leaves. Legend: S slots, N rows of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from k3rl.types import StopReason
from rollout.engine import Generation, SamplingParams
from rollout.sampling import RowSampling

_CHARACTER_BYTES = (
    4  # of UTF-8, at most; so an unfinished character is finished, or broken, after as many tokens
)


class StopStrings:
    """Finds stop strings in a response as it grows, across the borders of tokens.

    Text is decoded in pieces: a piece ends where decoding shows no unfinished character (U+FFFD), so a
    character spread over several tokens is read whole. ``decode`` turns token ids into text.
    """

    def __init__(self, strings: tuple[str, ...], decode: Callable[[list[int]], str]) -> None:
        self._strings, self._decode = strings, decode
        self._keep = max(map(len, strings)) - 1
        self._anchor = self._read = 0  # tokens before `_read` are in `_tail`; decoding starts at `_anchor`
        self._tail = ""

    def hit(self, token_ids: list[int]) -> bool:
        """Whether the response so far holds one; call it after every token."""
        before = self._decode(token_ids[self._anchor : self._read])
        text = self._decode(token_ids[self._anchor :])
        seen = self._tail + text[len(before) :]
        whole = not text.endswith("\ufffd") or len(token_ids) - self._read >= _CHARACTER_BYTES
        if len(text) > len(before) and whole:
            self._anchor, self._read = self._read, len(token_ids)
            self._tail = seen[-self._keep :] if self._keep else ""
        return any(s in seen for s in self._strings)


@dataclass(slots=True, eq=False)
class Sequence:
    """``ids`` are context and response so far; the first ``filled`` of them are in cache slot ``slot``.

    Whoever lacks one token samples in the next step; whoever lacks more is being prefilled. ``twins`` have
    the same ids and wait in their own slots for a copy of this one's state.
    """

    generation: Generation
    ids: list[int]
    order: int  # age: the youngest gives way first
    limit: int  # response tokens at which it must end
    stops: frozenset[int]
    strings: StopStrings | None
    slot: int = -1
    filled: int = 0
    leader: Sequence | None = None
    twins: list[Sequence] = field(default_factory=list)

    @property
    def missing(self) -> int:
        return len(self.ids) - self.filled

    def stop_reason(self) -> StopReason | None:
        """Why the response ends with its newest token, if it does."""
        tokens = self.generation.token_ids
        if tokens and tokens[-1] in self.stops:
            return StopReason.END_OF_TURN
        if self.strings is not None and self.strings.hit(tokens):
            return StopReason.STOP_STRING
        if len(tokens) >= self.limit:
            budget_spent = len(tokens) >= self.generation.sampling.max_tokens
            return StopReason.MAX_TOKENS if budget_spent else StopReason.MAX_CONTEXT
        return None


class SlotTable:
    """Sampling settings and stream positions by slot, in numpy columns, so that a batch is put together by
    `take`."""

    def __init__(self, num_slots: int) -> None:
        self.key_S = np.zeros(num_slots, np.int64)
        self.offset_S = np.zeros(num_slots, np.int64)
        self._columns = RowSampling.build([SamplingParams(max_tokens=1)] * num_slots)

    def set(self, slot: int, generation: Generation) -> None:
        self.key_S[slot], self.offset_S[slot] = generation.key, generation.offset
        self._columns.set(slot, RowSampling.build([generation.sampling]))

    def streams(
        self, slots: np.ndarray, counts: np.ndarray, device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        """Keys and positions [N] of the draws that follow ``counts`` response tokens."""
        key, position = self.key_S[slots], self.offset_S[slots] + counts
        return torch.from_numpy(key).to(device), torch.from_numpy(position).to(device)

    def rows(self, slots: np.ndarray, device: torch.device) -> RowSampling:
        return self._columns.take(torch.from_numpy(slots), device)
