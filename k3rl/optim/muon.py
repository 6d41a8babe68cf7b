"""Muon over blocks, and AdamW for the rest, as one optimiser. Correct for plain and for FSDP2-sharded parameters.

Per matrix: m <- mu m + g; u = g + mu m (Nesterov); O = NS(u); w <- (1 - lr wd) w - lr 0.2 sqrt(max(R, C)) O.
The last factor gives an update the root mean square of AdamW's (Moonlight), so one rate serves both.
Legend: N matrices, R rows, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim.adamw import adamw

from k3rl.optim.blocks import Block
from k3rl.optim.config import MuonConfig
from k3rl.optim.newton_schulz import orthogonalise

RMS = 0.2
"""Root mean square of an update at learning rate 1, as AdamW's usually is."""
BATCH_NUMBERS = 1 << 27
"""Largest number of elements that are orthogonalised in one go."""


def muon_groups(
    config: MuonConfig, targets: Mapping[str, Tensor], plan: Mapping[str, Block]
) -> list[dict[str, Any]]:
    """Parameter groups for `Muon` from named tensors. Names outside ``plan`` are AdamW's; vectors do not decay."""
    matrices = [name for name in targets if name in plan]
    rest = [targets[name] for name in targets if name not in plan]
    adam = {"blocks": None, "betas": config.betas, "eps": config.eps}
    groups: list[dict[str, Any]] = [
        {
            "params": [targets[n] for n in matrices],
            "blocks": [plan[n] for n in matrices],
            "weight_decay": config.weight_decay,
        },
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": config.weight_decay, **adam},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0, **adam},
    ]
    return [g for g in groups if g["params"]]


class Muon(torch.optim.Optimizer):
    """Groups with ``blocks`` (one `Block` per parameter) are Muon's, groups with ``blocks=None`` are AdamW's.

    With sharded parameters every rank must call `step` with gradients for the same parameters. A rank orthogonalises
    only the matrices its shard has a part of; where shards end between matrices (heads, experts), nothing travels.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        iterations: int = 5,
    ) -> None:
        defaults = {
            "lr": lr, "momentum": momentum, "nesterov": nesterov, "iterations": iterations, "weight_decay": 0.0,
            "betas": (0.9, 0.95), "eps": 1e-8, "blocks": None,
        }  # fmt: skip
        super().__init__(groups, defaults)
        for group in self.param_groups:
            if group["blocks"] is not None and len(group["blocks"]) != len(group["params"]):
                raise ValueError(f"{len(group['blocks'])} blocks for {len(group['params'])} parameters")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("Muon takes no closure")
        for group in self.param_groups:
            if group["blocks"] is None:
                self._adamw(group)
            else:
                self._muon(group)

    def _muon(self, group: dict[str, Any]) -> None:
        live = [(p, b) for p, b in zip(group["params"], group["blocks"], strict=True) if p.grad is not None]
        if not live:
            return
        for p, _ in live:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        gradients = [p.grad for p, _ in live]
        buffers = [self.state[p]["momentum_buffer"] for p, _ in live]
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, gradients)
        wanted = (
            torch._foreach_add(gradients, buffers, alpha=group["momentum"]) if group["nesterov"] else buffers
        )
        if group["weight_decay"]:
            torch._foreach_mul_([p for p, _ in live], 1.0 - group["lr"] * group["weight_decay"])
        parts = [Part(p, u, block) for (p, block), u in zip(live, wanted, strict=True)]
        for batch in _by_shape(parts):
            joined = orthogonalise(torch.cat([p.matrices_NRC for p in batch]), group["iterations"])
            scale = RMS * math.sqrt(max(joined.shape[-2:]))
            for part, new in zip(batch, joined.split([len(p.matrices_NRC) for p in batch]), strict=True):
                part.add(new, -group["lr"] * scale)

    def _adamw(self, group: dict[str, Any]) -> None:
        live = [p for p in group["params"] if p.grad is not None]
        if not live:
            return
        for p in live:
            if "exp_avg" not in self.state[p]:
                self.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                self.state[p]["exp_avg"] = torch.zeros_like(p)
                self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
        kept = [[self.state[p][key] for p in live] for key in ("exp_avg", "exp_avg_sq", "step")]
        adamw(
            live, [p.grad for p in live], kept[0], kept[1], [], kept[2], fused=True, amsgrad=False,
            beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"], weight_decay=group["weight_decay"],
            eps=group["eps"], maximize=False,
        )  # fmt: skip


class Part:
    """The matrices of one parameter that this rank has to orthogonalise, and how they come back into its shard."""

    def __init__(self, parameter: Tensor, update: Tensor, block: Block) -> None:
        self.block = block
        if not isinstance(parameter, DTensor):
            self.target, self.skip, self.shape_of = parameter, 0, None
            self.matrices_NRC = block.cut(update)
            return
        assert isinstance(update, DTensor)
        self.target = parameter.to_local()
        rows, start = self.target.shape[0], _first_row(parameter)
        if block.kind in ("rows", "stack"):
            size = block.size if block.kind == "rows" else 1
            first, last = start // size, -(-(start + rows) // size)
            if _shards_end_between(parameter, size):
                local = update.to_local()
            else:
                local = update.full_tensor()[first * size : last * size]
            shape = (size, *update.shape[1:]) if block.kind == "rows" else update.shape[1:]
            self.matrices_NRC = block.cut(local) if rows else local.new_zeros(0, *shape)
            self.skip = start - first * size
        else:
            self.matrices_NRC = block.cut(update.full_tensor())
            self.skip = start

    def add(self, matrices_NRC: Tensor, factor: float) -> None:
        rows = self.target.shape[0]
        if rows:
            new = self.block.join(matrices_NRC)[self.skip : self.skip + rows]
            self.target.add_(new.to(self.target.dtype), alpha=factor)


def _by_shape(parts: list[Part]) -> list[list[Part]]:
    """Parts with matrices of one shape together, up to `BATCH_NUMBERS` elements."""
    batches: dict[tuple[int, ...], list[list[Part]]] = {}
    sizes: dict[tuple[int, ...], int] = {}
    for part in parts:
        key = tuple(part.matrices_NRC.shape[1:])
        number = part.matrices_NRC.numel()
        if key not in batches or sizes[key] + number > BATCH_NUMBERS:
            batches.setdefault(key, []).append([])
            sizes[key] = 0
        batches[key][-1].append(part)
        sizes[key] += number
    return [batch for same in batches.values() for batch in same]


def _sharding(parameter: DTensor) -> tuple[int, int]:
    """(ranks along the sharded mesh dimension, this rank's place). Raises ValueError for other layouts than FSDP2's."""
    split = [i for i, p in enumerate(parameter.placements) if isinstance(p, Shard)]
    if len(split) > 1 or any(isinstance(p, Shard) and p.dim != 0 for p in parameter.placements):
        raise ValueError(
            f"Muon takes parameters sharded over their first dimension, got {parameter.placements}"
        )
    if not split:
        return 1, 0
    return parameter.device_mesh.size(split[0]), parameter.device_mesh.get_local_rank(split[0])


def _first_row(parameter: DTensor) -> int:
    ranks, place = _sharding(parameter)
    return min(place * -(-parameter.shape[0] // ranks), parameter.shape[0])


def _shards_end_between(parameter: DTensor, size: int) -> bool:
    """The same answer on every rank: does each shard hold whole matrices?"""
    ranks, _ = _sharding(parameter)
    return -(-parameter.shape[0] // ranks) % size == 0
