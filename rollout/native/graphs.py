"""One decode step, from token to token, on the device; on a GPU as a CUDA graph.

A step is a forward of one token a row, logits, a draw. On a GPU its hundreds of launches are captured once for each
batch size and cache and then replayed by one call, so that a step costs what its bytes cost. Rows are filled up to the
next size with a spare slot, which nobody reads. The first step of a size runs plainly (kernels are compiled there),
the second captures.

Legend: N rows, B rows filled up, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rollout.sampling import RowSampling, sample, uniform_torch

log = logging.getLogger(__name__)

Logits = Callable[[Tensor, Tensor], Tensor]
"""From tokens [N] and slots [N] to float32 logits [N, V]; the cache grows by a token a row."""


class Rows(Protocol):
    """The rows that decode together, as device tensors. See `rollout.native.engine`."""

    tokens_N: Tensor
    slots_N: Tensor
    keys_N: Tensor
    positions_N: Tensor
    settings: RowSampling

    def advance(self, tokens_N: Tensor) -> None: ...


def draw(
    logits_NV: Tensor, keys_N: Tensor, positions_N: Tensor, settings: RowSampling
) -> tuple[Tensor, Tensor]:
    """Tokens [N], and float64 [2, N] of tokens and log-probs for one copy to the host: float64 holds every token id
    and every float32 exactly."""
    tokens_N, logprobs_N = sample(logits_NV, settings, uniform_torch(keys_N, positions_N))
    return tokens_N, torch.stack([tokens_N.double(), logprobs_N.double()])


def plain_step(rows: Rows, logits: Logits) -> Tensor:
    """One step without a graph."""
    tokens_N, out_2N = draw(logits(rows.tokens_N, rows.slots_N), rows.keys_N, rows.positions_N, rows.settings)
    rows.advance(tokens_N)
    return out_2N


def bucket(rows: int) -> int:
    """Rows are filled up to so many: few sizes to capture, and at most an eighth of the rows for nothing beyond
    sixteen."""
    if rows <= 16:
        return 1 << (rows - 1).bit_length()
    unit = max(8, (1 << (rows - 1).bit_length()) // 16)
    return -(-rows // unit) * unit


@dataclass(slots=True)
class _Step:
    """Static inputs of one size, and the graph over them. ``holds`` are the rows whose state is in them."""

    tokens_B: Tensor
    slots_B: Tensor
    keys_B: Tensor
    positions_B: Tensor
    settings: RowSampling
    graph: Any = None
    out: Tensor | None = None  # [2, B]; or logits [B, V] where the distribution is cut
    holds: Any = None


class DecodeGraphs:
    """For one cache: `forget` when it goes. ``spare_slot`` is a slot of it that no sequence has."""

    def __init__(self, logits: Logits, lengths_S: Tensor, spare_slot: int) -> None:
        self._logits, self._lengths_S, self._spare = logits, lengths_S, spare_slot
        self._steps: dict[tuple[int, bool, bool, bool], _Step] = {}
        self._pool = torch.cuda.graph_pool_handle() if lengths_S.is_cuda else None
        self._broken = False

    def __call__(self, rows: Rows) -> Tensor:
        """One step: float64 [2, N]. The rows' own tensors are not advanced: they are taken in once, and live on in
        the graph's inputs until other rows come."""
        if self._broken:
            return plain_step(rows, self._logits)
        count, kind = rows.tokens_N.shape[0], rows.settings
        key = (bucket(count), kind.truncated, kind.any_greedy, kind.scaled)
        step = self._steps.get(key)
        first = step is None
        if step is None:
            step = self._steps[key] = self._empty(*key)
        if step.holds is not rows:
            self._take_in(step, rows, count)
        if first:
            out = self._run(step)
        else:
            if step.graph is None and not self._capture(step):
                return plain_step(rows, self._logits)
            step.graph.replay()
            out = step.out
        if not kind.truncated:
            return out[:, :count]
        tokens_N, out_2N = draw(out[:count], rows.keys_N, step.positions_B[:count], kind)
        step.tokens_B[:count] = tokens_N
        step.positions_B += 1
        return out_2N

    def _empty(self, size: int, truncated: bool, any_greedy: bool, scaled: bool) -> _Step:
        device = self._lengths_S.device
        zeros, ones = (lambda t: torch.zeros(size, dtype=t, device=device)), torch.ones(size, device=device)
        settings = RowSampling(
            ones,
            ones,
            zeros(torch.int64),
            zeros(torch.float32),
            zeros(torch.bool),
            truncated,
            0,
            any_greedy,
            scaled,
        )
        slots_B = torch.full((size,), self._spare, dtype=torch.int64, device=device)
        return _Step(zeros(torch.int64), slots_B, zeros(torch.int64), zeros(torch.int64), settings)

    def _take_in(self, step: _Step, rows: Rows, count: int) -> None:
        for mine, theirs in (
            (step.tokens_B, rows.tokens_N),
            (step.slots_B, rows.slots_N),
            (step.keys_B, rows.keys_N),
            (step.positions_B, rows.positions_N),
            (step.settings.temperature_N, rows.settings.temperature_N),
            (step.settings.greedy_N, rows.settings.greedy_N),
        ):
            mine[:count] = theirs
        step.slots_B[count:] = self._spare
        for other in self._steps.values():
            other.holds = None
        step.holds = rows

    def _run(self, step: _Step) -> Tensor:
        """What is captured. The spare slot starts from nothing each time, lest it outgrow the cache."""
        logits_BV = self._logits(step.tokens_B, step.slots_B)
        self._lengths_S[self._spare].zero_()
        if step.settings.truncated:
            return logits_BV
        tokens_B, out_2B = draw(logits_BV, step.keys_B, step.positions_B, step.settings)
        step.tokens_B.copy_(tokens_B)
        step.positions_B.add_(1)
        return out_2B

    def _capture(self, step: _Step) -> bool:
        """False, once and for all, where the model does something that a graph cannot hold."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                step.out = self._run(step)
        except RuntimeError as error:
            log.warning("decode steps are not captured as CUDA graphs: %s", str(error).splitlines()[0])
            self._broken = True
            return False
        step.graph = graph
        return True
