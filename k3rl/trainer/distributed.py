"""The ranks that train one policy: process group, sharding, and sums over all of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from k3rl.config.trainer import ParallelConfig


class World:
    """One rank by itself: nothing is sharded, every sum is its own."""

    rank = 0
    size = 1
    context_rank = 0
    context_size = 1
    context: dist.ProcessGroup | None = None
    """The ranks that share each sequence with this one, where there are others."""

    @property
    def leads(self) -> bool:
        """What ranks that share a sequence would all report is this one's to report."""
        return self.context_rank == 0

    def shard(self, policy: nn.Module, config: ParallelConfig) -> nn.Module:
        return policy

    def total(self, value: float) -> float:
        """Sum over ranks; those that share their sequences, and so hold the same value, count once."""
        return value

    def most(self, value: int) -> int:
        """Largest over ranks."""
        return value

    def union(self, values: Iterable[int]) -> list[int]:
        """Sorted union over ranks."""
        return sorted(set(values))

    def barrier(self) -> None:
        """Wait for all ranks."""

    def close(self) -> None:
        """Leave the process group."""


class ShardedWorld(World):
    """Several ranks of one torch process group (gloo on CPUs, nccl on GPUs), parameters sharded by FSDP2.

    Join it once per process; `close` leaves. ``address`` is rank 0's ``host:port``. ``context`` neighbours share
    each sequence: ranks 0 to context - 1 are the first such group.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        address: str,
        device: torch.device,
        timeout_s: float = 1800.0,
        context: int = 1,
    ) -> None:
        from datetime import timedelta

        self.rank, self.size, self.device = rank, size, device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"tcp://{address}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
        self.mesh = init_device_mesh(device.type, (size,))
        self.context_rank, self.context_size = rank % context, context
        if context > 1:
            for first in range(0, size, context):  # every rank must make every group
                group = dist.new_group(list(range(first, first + context)))
                if first == rank - self.context_rank:
                    self.context = group

    def shard(self, policy: nn.Module, config: ParallelConfig) -> nn.Module:
        """Each decoder layer is a unit, the rest another. Gradients are summed in float32, never averaged."""
        precision = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        kwargs = {
            "mesh": self.mesh,
            "mp_policy": precision,
            "reshard_after_forward": config.reshard_after_forward,
        }
        for layer in layers_of(policy):
            fully_shard(layer, **kwargs)
        fully_shard(policy, **kwargs)
        for module in policy.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        return policy

    def total(self, value: float) -> float:
        t = torch.tensor(value if self.leads else 0.0, dtype=torch.float64, device=self.device)
        dist.all_reduce(t)
        return float(t)

    def most(self, value: int) -> int:
        t = torch.tensor(value, dtype=torch.int64, device=self.device)
        dist.all_reduce(t, op=dist.ReduceOp.MAX)
        return int(t)

    def union(self, values: Iterable[int]) -> list[int]:
        gathered: list[list[int] | None] = [None] * self.size
        dist.all_gather_object(gathered, sorted(set(values)))
        return sorted({v for part in gathered for v in part or []})

    def barrier(self) -> None:
        dist.barrier()

    def close(self) -> None:
        dist.destroy_process_group()


def layers_of(module: nn.Module) -> list[nn.Module]:
    """The decoder layers: the members of the largest module list."""
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList)]
    return list(max(lists, key=len)) if lists else []
