"""Expert load, and how often trainer and engine send a token to other experts.

Suffixes: T packed tokens, L expert layers, K experts a token, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from k3rl.algorithms import Sum
from k3rl.models import LanguageModel
from k3rl.trainer.packing import MicroBatch


def engine_routing(micro: MicroBatch) -> Tensor | None:
    """int16 [T, L, K] where every sequence brought the engine's choices; `ValueError` where only some did."""
    have = [e.routing is not None for e in micro.examples]
    if not any(have):
        return None
    if not all(have):
        missing = micro.examples[have.index(False)].key
        raise ValueError(f"trajectory {missing} has no routing, and others of its batch have")
    return torch.from_numpy(np.concatenate([e.routing for e in micro.examples if e.routing is not None]))


def engine_read(micro: MicroBatch) -> Tensor | None:
    """bool [T], beside `engine_routing`: did the engine read the token?"""
    if any(e.routing is None for e in micro.examples):
        return None
    return torch.from_numpy(np.concatenate([np.arange(len(e)) < e.read for e in micro.examples]))


class ExpertWatch:
    """Collects the choices of a step's forward passes. Does nothing for models without experts."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model if hasattr(model, "record_routing") else None
        self.reset()

    def reset(self) -> None:
        """Begin a step."""
        self._load_LE: Tensor | None = None
        self._disagreeing = self._compared = self._recorded = 0

    @contextmanager
    def watch(
        self, recorded_TLK: Tensor | None, read_T: Tensor | None = None, tokens: int | None = None
    ) -> Iterator[None]:
        """Around one forward pass; ``recorded_TLK`` are the engine's choices for its tokens, compared where ``read_T``
        (None: everywhere). The first ``tokens`` of all count (None: all).
        """
        if self._model is None:
            yield
            return
        with self._model.record_routing() as record:
            yield
        if record.forwards and record.forwards[-1].chosen:
            theirs = None if recorded_TLK is None else recorded_TLK[:tokens]
            self._count(record.ids_TLK()[:tokens], theirs, None if read_T is None else read_T[:tokens])

    def _count(self, ids_TLK: Tensor, recorded_TLK: Tensor | None, read_T: Tensor | None) -> None:
        experts = self._model.config.num_experts if self._model is not None else 0
        layers = ids_TLK.shape[1]
        offset_L = torch.arange(layers, device=ids_TLK.device)[:, None] * experts
        flat = (ids_TLK.long() + offset_L).reshape(-1)
        counts = torch.bincount(flat, minlength=layers * experts).unflatten(0, (layers, experts))
        self._load_LE = counts if self._load_LE is None else self._load_LE + counts
        if recorded_TLK is not None:
            other_TL = (ids_TLK.sort(-1).values != recorded_TLK.to(ids_TLK.device).sort(-1).values).any(-1)
            read_TL = torch.ones_like(other_TL) if read_T is None else read_T.to(other_TL.device)[:, None]
            self._disagreeing += int((other_TL & read_TL).sum())
            self._compared += int(read_TL.expand_as(other_TL).sum())
            self._recorded += other_TL.numel()

    def metrics(self, sharing: dist.ProcessGroup | None = None) -> dict[str, Sum]:
        """Means over layers: largest load over the mean load, share of experts without a token; where an engine
        recorded its choices, the share of (token, layer) that it recorded and that of those where others were taken.
        Counts of ranks ``sharing`` the sequences are added up first.
        """
        if self._load_LE is None:
            return {}
        if sharing is not None:
            self._add_over(sharing)
        load = self._load_LE.double()
        found = {
            "moe/load_max_over_mean": Sum.over(load.max(1).values / load.mean(1)),
            "moe/unused_share": Sum.over((load == 0).double().mean(1)),
        }
        if self._compared:
            found["moe/replay_disagreement"] = _share(self._disagreeing, self._compared)
            found["moe/recorded_share"] = _share(self._compared, self._recorded)
        return found

    def _add_over(self, group: dist.ProcessGroup) -> None:
        assert self._load_LE is not None
        replayed = self._load_LE.new_tensor([self._disagreeing, self._compared, self._recorded])
        flat = torch.cat([self._load_LE.flatten(), replayed])
        dist.all_reduce(flat, group=group)
        self._load_LE = flat[:-3].view_as(self._load_LE)
        self._disagreeing, self._compared, self._recorded = map(int, flat[-3:])


def _share(part: int, whole: int) -> Sum:
    return Sum(
        torch.tensor(float(part), dtype=torch.float64), torch.tensor(float(whole), dtype=torch.float64)
    )
