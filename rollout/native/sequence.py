"""One generation inside the engine, and the table of per-slot sampling settings.

Owner of both: the engine. A sequence is created by `submit` and dropped when its generation finishes or
leaves. Legend: S slots, N rows of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from rollout.engine import Generation, SamplingParams
from rollout.native.stops import StopRules
from rollout.routing import RoutingRows
from rollout.sampling import RowSampling


@dataclass(slots=True, eq=False)
class Sequence:
    """``ids`` are context and response so far; the first ``filled`` of them are in cache slot ``slot``.

    Whoever lacks one token samples in the next step; whoever lacks more is being prefilled. ``twins`` have
    the same ids and wait in their own slots for a copy of this one's state.
    """

    generation: Generation
    ids: list[int]
    order: int  # age: the youngest gives way first
    stop: StopRules
    slot: int = -1
    filled: int = 0
    leader: Sequence | None = None
    twins: list[Sequence] = field(default_factory=list)
    routing: RoutingRows = field(init=False)

    def __post_init__(self) -> None:
        self.routing = RoutingRows(self.generation.routing)

    def record(self, routing_TLK: np.ndarray) -> None:
        """Note the routing of tokens that end at `filled`. What is noted already stays, though it be computed
        again: it is what the tokens after it were sampled with."""
        new = self.filled - len(self.routing)
        if new > len(routing_TLK):
            raise RuntimeError(
                f"generation {self.generation.id}: of {self.filled} tokens in the cache {len(self.routing)} have "
                f"their routing, and {len(routing_TLK)} were read"
            )
        if new > 0:
            self.routing.append(routing_TLK[len(routing_TLK) - new :])
            self.generation.routing = self.routing.array

    @property
    def missing(self) -> int:
        return len(self.ids) - self.filled


class SlotTable:
    """Sampling settings and stream keys by slot, in columns, so that a batch is put together by `take`."""

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
