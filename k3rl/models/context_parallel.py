"""One long sequence over several ranks: each holds a piece of equal length, in order.

    with sharded(group):
        hidden = model(ids_of_this_rank, cu_seqlens)

KDA needs the state that the ranks before leave. The state enters a piece linearly, S_end = A S_start + B, so each rank
works out its own A [K, K] and B [K, V] at once, all exchange them, and each folds what came before it: what is
exchanged does not grow with the sequence (report §10.2). Its short convolution needs the last inputs of the rank
before. MLA gathers latents, which are small. K3 has no positions, and all else is by token.

Legend: T tokens of this rank, R ranks, H heads, K key width, V value width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class Shard:
    """This rank's place among those that share a sequence; ``sent`` counts the bytes it has given to others.

    ``tokens``: of its piece, how many are the sequence's; what follows fills up the last pieces. None: all are.
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    tokens: int | None = None
    sent: int = 0


_active: ContextVar[Shard | None] = ContextVar("context_parallel", default=None)


def active_shard() -> Shard | None:
    return _active.get()


@contextmanager
def sharded(group: dist.ProcessGroup, tokens: int | None = None) -> Iterator[Shard]:
    """Forwards inside take their tokens as one piece of a sequence that the group's ranks hold in rank order."""
    shard = Shard(group, dist.get_rank(group), dist.get_world_size(group), tokens)
    token = _active.set(shard)
    try:
        yield shard
    finally:
        _active.reset(token)


class _Gather(torch.autograd.Function):
    """[...] of each rank to [R, ...] on all; backwards each gets the sum of what all want of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Shard) -> Tensor:
        ctx.shard = shard
        out = [torch.empty_like(x) for _ in range(shard.size)]
        dist.all_gather(out, x.contiguous(), group=shard.group)
        shard.sent += x.numel() * x.element_size()
        return torch.stack(out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        shard = ctx.shard
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=shard.group)
        shard.sent += gradient.numel() * gradient.element_size()
        return gradient[shard.rank], None


def gather(x: Tensor, shard: Shard) -> Tensor:
    """[R, ...], differentiable. Every rank must use the result: the backward pass is a collective too."""
    return _Gather.apply(x, shard)


def tail_before(x_TC: Tensor, width: int, shard: Shard) -> Tensor:
    """The last ``width`` rows of the rank before, [1, width, C]; zeros on the first rank."""
    if x_TC.shape[0] < width:
        raise ValueError(
            f"a piece of {x_TC.shape[0]} tokens is shorter than a convolution's {width} inputs before it"
        )
    tails = gather(x_TC[-width:], shard)
    before = tails[max(shard.rank - 1, 0)]
    return torch.where(torch.tensor(shard.rank > 0), before, torch.zeros_like(before))[None]


Scan = Callable[[Tensor, Tensor], Tensor]
"""(values [T, H, V'], first state [1, H, K, V']) to the state after the last token: KDA over this rank's tokens."""


def state_before(v_THV: Tensor, width: int, scan: Scan, shard: Shard) -> Tensor:
    """KDA's state before this rank's first token, [1, H, K, V]. ``width`` is K.

    Columns of the state do not mix, so A and B come out of one scan: of the values from zero, and of no values from
    the identity.
    """
    T, H, V = v_THV.shape
    values = torch.cat([v_THV, v_THV.new_zeros(T, H, width)], -1)
    unit = torch.eye(width, dtype=v_THV.dtype, device=v_THV.device).expand(1, H, width, width)
    first = torch.cat([v_THV.new_zeros(1, H, width, V), unit], -1)
    state = v_THV.new_zeros(H, width, V)
    for r, end in enumerate(gather(scan(values, first)[0], shard)):
        B, A = end.split([V, width], -1)
        state = torch.where(torch.tensor(r < shard.rank, device=state.device), B + A @ state, state)
    return state[None]
