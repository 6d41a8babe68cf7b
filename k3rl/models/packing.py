"""How a packed batch is laid out, computed once per forward and shared by all layers.

Legend: T tokens packed back to back, N sequences, S cache slots, M chunks, C tokens a chunk, W conv width.

A batch where every sequence brings one token (T == N) is a decode step. Its layout needs nothing from the host,
so a decode step makes no device synchronisation and can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from k3rl.models.context_parallel import active_shard

if TYPE_CHECKING:
    from k3rl.models.cache import Cache
    from k3rl.models.k3.routing import Routing


@dataclass(frozen=True)
class Chunks:
    """Sequences cut into chunks of C tokens, ordered so that chunk j of every sequence is one contiguous slice.

    ``index_MC`` points into the packed tokens (clamped where ``valid_MC`` is false). Chunks are ordered by their
    position in their sequence; within a position by ``order_N``, the sequences sorted by number of chunks, longest
    first. ``counts[j]`` sequences have a chunk j. ``slot_T`` finds token t in the flattened [M*C] chunks.
    """

    index_MC: Tensor
    valid_MC: Tensor
    slot_T: Tensor
    order_N: Tensor
    counts: list[int]


class Layout:
    """Packed batch of N sequences, optionally continuing from cache slots.

    ``cu_seqlens`` is [N+1] integers from 0 to T, on any device. Raises ValueError where it does not describe T
    tokens or has an empty sequence (checked whenever it is read on the host).
    """

    def __init__(
        self,
        num_tokens: int,
        cu_seqlens: Tensor,
        device: torch.device,
        cache: Cache | None = None,
        slots_N: Tensor | None = None,
    ) -> None:
        self.num_tokens = num_tokens
        self.num_sequences = cu_seqlens.shape[0] - 1
        self.device = device
        self.cu_seqlens = cu_seqlens
        self.cache = cache
        self.decode = num_tokens == self.num_sequences
        self.routing: Routing | None = None
        self.shard = active_shard()
        if self.shard is not None and (self.num_sequences != 1 or cache is not None):
            raise ValueError("ranks share one sequence at a time, without a cache")
        self._chunks: dict[int, Chunks] = {}
        self._head_chunks: dict[tuple[int, int], tuple[Chunks, Tensor, Tensor, Tensor]] = {}
        self.slots_N: Tensor | None = None
        if cache is not None:
            self._take_slots(cache, slots_N)
        if device.type == "cpu" or not self.decode:
            self._check()

    def _take_slots(self, cache: Cache, slots_N: Tensor | None) -> None:
        every = self.num_sequences == cache.num_slots
        if slots_N is None:
            if self.num_sequences > cache.num_slots:
                raise ValueError(f"{self.num_sequences} sequences for a cache of {cache.num_slots} slots")
            slots_N = torch.arange(self.num_sequences, device=self.device)
        else:
            slots_N = slots_N.to(self.device, torch.int64)
            if slots_N.shape[0] != self.num_sequences:
                raise ValueError(f"{slots_N.shape[0]} slots for {self.num_sequences} sequences")
            if self.device.type == "cpu":
                if torch.unique(slots_N).numel() != slots_N.numel():
                    raise ValueError("the same cache slot is named twice in one batch")
                every = every and bool((slots_N == torch.arange(self.num_sequences)).all())
            else:
                every = False
        self.slots_N = slots_N
        self.all_slots = every  # slot i is sequence i: caches are used in place, without gathering
        self.past_N = cache.lengths if every else cache.lengths[slots_N]

    def _check(self) -> None:
        cu = self.cu
        if cu[0] != 0 or cu[-1] != self.num_tokens or (np.diff(cu) < 1).any():
            raise ValueError(
                f"cu_seqlens must rise from 0 to {self.num_tokens} with no empty sequence, got {cu.tolist()[:16]}"
            )
        if self.cache is not None and self.max_total > self.cache.max_tokens:
            raise ValueError(
                f"a sequence of {self.max_total} tokens overflows a cache of {self.cache.max_tokens}"
            )

    @cached_property
    def cu(self) -> np.ndarray:
        """cu_seqlens on the host."""
        if self.decode:
            return np.arange(self.num_sequences + 1)
        return self.cu_seqlens.detach().cpu().numpy().astype(np.int64)

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.diff(self.cu)

    @cached_property
    def past(self) -> np.ndarray:
        """Tokens already cached for each sequence, on the host."""
        if self.cache is None:
            return np.zeros(self.num_sequences, dtype=np.int64)
        return self.past_N.cpu().numpy()

    @cached_property
    def max_total(self) -> int:
        return int((self.past + self.lengths).max())

    @cached_property
    def lengths_N(self) -> Tensor:
        return torch.from_numpy(self.lengths).to(self.device)

    @cached_property
    def sequence_T(self) -> Tensor:
        """Index of the sequence each token belongs to."""
        if self.decode:
            return torch.arange(self.num_tokens, device=self.device)
        return torch.from_numpy(np.repeat(np.arange(self.num_sequences), self.lengths)).to(self.device)

    @cached_property
    def positions_T(self) -> Tensor:
        """Position of each token in its whole sequence, cached tokens included."""
        if self.decode:
            return self.past_N if self.cache is not None else torch.zeros_like(self.sequence_T)
        start = np.repeat(self.cu[:-1] - self.past, self.lengths)
        return torch.from_numpy(np.arange(self.num_tokens) - start).to(self.device)

    @cached_property
    def kernel_cu(self) -> tuple[Tensor, Tensor]:
        """cu_seqlens as int64 on the device and on the host: one pair for all layers, which kernels cache by."""
        host = torch.from_numpy(self.cu)
        return host.to(self.device), host

    @cached_property
    def last_T(self) -> Tensor:
        """Packed index of each sequence's last token, [N]."""
        return torch.from_numpy(self.cu[1:] - 1).to(self.device)

    def conv(self, width: int) -> tuple[Tensor, Tensor, Tensor, int]:
        """Layout of a causal convolution: each sequence preceded by its width-1 earlier inputs.

        Returns (place of each token, [T]; places of the earlier inputs, [N*(W-1)]; places of the inputs that the
        next call needs, [N*(W-1)]; total length T + N*(W-1)).
        """
        extra = width - 1
        starts = self.cu[:-1] + extra * np.arange(self.num_sequences)
        tokens = np.arange(self.num_tokens) + extra * np.repeat(
            np.arange(1, self.num_sequences + 1), self.lengths
        )
        before = (starts[:, None] + np.arange(extra)).reshape(-1)
        after = ((starts + self.lengths)[:, None] + np.arange(extra)).reshape(-1)
        tensors = [torch.from_numpy(a).to(self.device) for a in (tokens, before, after)]
        return tensors[0], tensors[1], tensors[2], self.num_tokens + extra * self.num_sequences

    @cached_property
    def conv4(self) -> tuple[Tensor, Tensor, Tensor, int]:
        return self.conv(4)

    def chunks(self, size: int) -> Chunks:
        """Sequences cut into chunks of ``size`` tokens; see `Chunks`."""
        if size not in self._chunks:
            self._chunks[size] = self._cut(size)
        return self._chunks[size]

    def chunks_of_heads(self, size: int, heads: int) -> tuple[Chunks, Tensor, Tensor, Tensor]:
        """Chunks with each head apart, for rows t * H + h of the packed tokens' heads.

        Returns (the chunks; row of each place of [M, H, C], flattened; place of each row; padding [M * H, C, 1]).
        """
        key = (size, heads)
        if key not in self._head_chunks:
            cut = self.chunks(size)
            head = torch.arange(heads, device=self.device)
            index = (cut.index_MC[:, None] * heads + head[:, None]).flatten()
            chunk_T, within_T = cut.slot_T // size, cut.slot_T % size
            slot = ((chunk_T[:, None] * heads + head) * size + within_T[:, None]).flatten()
            padding = ~cut.valid_MC.repeat_interleave(heads, 0)[..., None]
            self._head_chunks[key] = (cut, index, slot, padding)
        return self._head_chunks[key]

    def _cut(self, size: int) -> Chunks:
        number = -(-self.lengths // size)
        order = np.argsort(-number, kind="stable")
        sorted_number = number[order]
        counts = [int((sorted_number > j).sum()) for j in range(int(sorted_number[0]))]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        position = np.repeat(np.arange(len(counts)), counts)
        sequence = order[np.concatenate([np.arange(c) for c in counts])]
        within = position[:, None] * size + np.arange(size)
        valid = within < self.lengths[sequence][:, None]
        index = self.cu[sequence][:, None] + np.minimum(within, self.lengths[sequence][:, None] - 1)
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        t_within = np.arange(self.num_tokens) - np.repeat(self.cu[:-1], self.lengths)
        t_rank = np.repeat(rank, self.lengths)
        slot = (offsets[t_within // size] + t_rank) * size + t_within % size
        place = lambda a: torch.from_numpy(a).to(self.device)  # noqa: E731
        return Chunks(place(index), place(valid), place(slot), place(order), counts)
