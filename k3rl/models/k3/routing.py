"""Which experts each token took: recorded from one forward, replayed in another.

Router replay (spec/10 row 102): an engine and a trainer whose arithmetic differs in the last bit may choose other
experts. Replaying the engine's choice removes that difference; the weights still come from the live router.
Legend: T tokens, L mixture-of-experts layers, K experts a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Routing:
    """Choices of one forward. Recomputation in the backward pass finds here what the forward chose."""

    def __init__(self, replay_TLK: Tensor | None = None, counted: int | None = None) -> None:
        self.replay_TLK = replay_TLK
        self.counted = counted
        """The first so many tokens count for balance; the others fill up a piece. None: all."""
        self.chosen: dict[int, Tensor] = {}

    def choice(self, index: int) -> Tensor | None:
        """Experts already settled for the index-th expert layer: replayed, or chosen before recomputation."""
        if index in self.chosen:
            return self.chosen[index]
        return None if self.replay_TLK is None else self.replay_TLK[:, index].long()

    def first_time(self, index: int) -> bool:
        return index not in self.chosen


class RoutingRecord:
    """Filled by the forwards inside `record_routing`, one entry a forward."""

    def __init__(self) -> None:
        self.forwards: list[Routing] = []

    def ids_TLK(self, forward: int = -1) -> Tensor:
        """Expert ids of one forward as int16 [T, L, K], in the order of its packed tokens."""
        chosen = self.forwards[forward].chosen
        return torch.stack([chosen[i] for i in sorted(chosen)], 1).to(torch.int16)


class RoutingControl:
    """The recording and replaying switch of a model."""

    def __init__(self) -> None:
        self.record: RoutingRecord | None = None
        self.replay_TLK: Tensor | None = None

    def start(
        self,
        num_tokens: int,
        layers: int,
        experts_per_token: int,
        device: torch.device,
        counted: int | None = None,
    ) -> Routing:
        replay = self.replay_TLK
        if replay is not None:
            if replay.shape != (num_tokens, layers, experts_per_token):
                raise ValueError(
                    f"replayed routing has shape {tuple(replay.shape)}, this forward needs "
                    f"{(num_tokens, layers, experts_per_token)}"
                )
            replay = replay.to(device)
        routing = Routing(replay, counted)
        if self.record is not None:
            self.record.forwards.append(routing)
        return routing

    @contextmanager
    def recording(self) -> Iterator[RoutingRecord]:
        previous, self.record = self.record, RoutingRecord()
        try:
            yield self.record
        finally:
            self.record = previous

    @contextmanager
    def replaying(self, ids_TLK: Tensor) -> Iterator[None]:
        previous, self.replay_TLK = self.replay_TLK, ids_TLK
        try:
            yield
        finally:
            self.replay_TLK = previous
