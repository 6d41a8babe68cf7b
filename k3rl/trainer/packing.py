"""Sequences packed back to back into micro-batches of a token budget, and spread over ranks.

No padding exists anywhere: masks are index lists, ends are ``cu_seqlens``. Suffixes: T packed tokens, N
sequences, P tokens with loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from k3rl.trainer.examples import Example


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """``predict_P[i]`` is the packed index of the token whose hidden state predicts ``targets_P[i]``."""

    ids_T: Tensor
    cu_N1: Tensor
    predict_P: Tensor
    targets_P: Tensor
    examples: tuple[Example, ...]

    @property
    def tokens(self) -> int:
        return len(self.ids_T)

    def column(self, name: str, dtype: torch.dtype) -> Tensor:
        """A per-token field of the examples, [P] or [P, K]."""
        values = np.concatenate([getattr(e, name) for e in self.examples])
        return torch.from_numpy(values).to(self.ids_T.device, dtype)

    def repeat(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        """One value per example, for each of its tokens with loss, [P]."""
        counts = [e.sequence_tokens for e in self.examples]
        return torch.from_numpy(np.repeat(np.asarray(values), counts)).to(self.ids_T.device, dtype)


def build(examples: Sequence[Example], device: torch.device) -> MicroBatch:
    """The one place where tokens are laid out."""
    lengths = [len(e) for e in examples]
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = np.concatenate([e.ids for e in examples])
    target = np.concatenate([e.position + start for e, start in zip(examples, cu[:-1], strict=True)])
    to = lambda a: torch.from_numpy(a).to(device)  # noqa: E731
    return MicroBatch(to(ids), to(cu), to(target - 1), to(ids[target]), tuple(examples))


def plan(lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Indices by micro-batch: first fit of decreasing lengths, so that few passes are needed; ties keep
    their order.

    Deterministic. A sequence longer than the budget has a micro-batch of its own.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for b, free in enumerate(room):
            if lengths[i] <= free:
                bins[b].append(i)
                room[b] -= lengths[i]
                break
        else:
            bins.append([i])
            room.append(budget_tokens - lengths[i])
    return bins


def spread(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices by rank with about equal token counts: longest first, each to the rank with least so far."""
    load, out = [0] * ranks, [[] for _ in range(ranks)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = min(range(ranks), key=lambda r: (load[r], r))
        out[rank].append(i)
        load[rank] += lengths[i]
    return out
