"""A micro-batch of one sequence, cut along its length over the ranks that share it.

Every rank of the group holds the whole sequence's ids and records, runs the model over its own piece, and
gets the log-probs of all: so that losses which look at whole sequences (a sequence's ratio, its mask) need not
know of the cut. Only a rank's own rows carry its gradient; the sum over ranks is the whole gradient.

Suffixes: T tokens of this rank's piece, U of the whole sequence, P tokens with loss of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from k3rl.models.context_parallel import sharded
from k3rl.trainer.distributed import World
from k3rl.trainer.packing import MicroBatch

SHORTEST = 4
"""Tokens of the shortest piece: a convolution looks three back, and one token alone would be a decode step."""


@dataclass(frozen=True, slots=True)
class Part:
    """What this rank computes of a micro-batch; all of it where ``group`` is None.

    ``tokens`` of ``ids_T`` are the sequence's, the others fill up the piece, and nothing is read of them. Rows
    ``ends[r]`` to ``ends[r + 1]`` of P are rank r's. ``first``: index in the sequence of the piece's first token.
    """

    ids_T: Tensor
    cu_N1: Tensor
    predict_P: Tensor
    targets_P: Tensor
    tokens: int
    first: int = 0
    ends: tuple[int, ...] = ()
    rank: int = 0
    group: dist.ProcessGroup | None = None

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Around the model's forward pass."""
        if self.group is None:
            yield
        else:
            with sharded(self.group, self.tokens):
                yield

    def of_tokens(self, x_U: Tensor | None) -> Tensor | None:
        """This piece's rows of something by token, the last one repeated for what fills up."""
        return x_U if x_U is None or self.group is None else _piece(x_U, self.first, len(self.ids_T))

    def of_rows(self, x_P: Tensor | None) -> Tensor | None:
        """This rank's rows of something by token with loss."""
        if x_P is None or self.group is None:
            return x_P
        return x_P[self.ends[self.rank] : self.ends[self.rank + 1]]

    def whole(self, own: Tensor | None) -> Tensor | None:
        """[P, ...] from every rank's own rows. Gradients reach this rank's own."""
        if own is None or self.group is None:
            return own
        return _Whole.apply(own, self)


def part_of(micro: MicroBatch, world: World) -> Part:
    """Pieces are of one length, in rank order. The rank that holds the token before predicts a token, so a target may
    be another rank's. `ValueError` for several sequences to share.
    """
    if world.context is None:
        return Part(micro.ids_T, micro.cu_N1, micro.predict_P, micro.targets_P, micro.tokens)
    if len(micro.examples) != 1:
        raise ValueError(f"ranks share one sequence at a time, not {len(micro.examples)}")
    length = max(-(-micro.tokens // world.context_size), SHORTEST)
    first = world.context_rank * length
    starts = [r * length for r in range(world.context_size + 1)]
    predict = micro.examples[0].position - 1  # rising
    ends = tuple(int(e) for e in predict.searchsorted(starts))
    rows = slice(ends[world.context_rank], ends[world.context_rank + 1])
    return Part(
        ids_T=_piece(micro.ids_T, first, length),
        cu_N1=micro.cu_N1.new_tensor([0, length]),
        predict_P=micro.predict_P[rows] - first,
        targets_P=micro.targets_P[rows],
        tokens=min(max(micro.tokens - first, 0), length),
        first=first,
        ends=ends,
        rank=world.context_rank,
        group=world.context,
    )


def _piece(x_U: Tensor, first: int, length: int) -> Tensor:
    index = torch.arange(first, first + length, device=x_U.device).clamp_(max=len(x_U) - 1)
    return x_U[index]


class _Whole(torch.autograd.Function):
    """Gather rows of which each rank has another number; backwards, the own rows' gradient."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, part: Part) -> Tensor:
        ctx.rows = slice(part.ends[part.rank], part.ends[part.rank + 1])
        counts = [b - a for a, b in zip(part.ends, part.ends[1:], strict=False)]
        padded = own.new_zeros(max(counts), *own.shape[1:])
        padded[: len(own)] = own
        gathered = [torch.empty_like(padded) for _ in counts]
        if max(counts):
            dist.all_gather(gathered, padded, group=part.group)
        return torch.cat([g[:n] for g, n in zip(gathered, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[ctx.rows], None


def check(model: object, world: World) -> str | None:
    """Why this model's ranks cannot share sequences, or None."""
    if world.context is None or getattr(model, "shares_sequences", False):
        return None
    return f"trainer.parallel.context: {type(model).__name__} cannot share a sequence between ranks, only K3 models can"
