"""Many tensors end to end in one buffer, and apart again: what a transport moves in one piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from k3rl.weights.publication import TensorInfo, from_bytes


def bucket_plan(infos: Sequence[TensorInfo], bucket_bytes: int) -> list[list[TensorInfo]]:
    """Consecutive tensors of at most so many bytes together; a larger one is alone. Both sides compute it."""
    plan: list[list[TensorInfo]] = []
    size = 0
    for info in infos:
        if not plan or size + info.nbytes > bucket_bytes:
            plan.append([])
            size = 0
        plan[-1].append(info)
        size += _aligned(info.nbytes)
    return plan


def flatten(parts: Sequence[Tensor]) -> Tensor:
    """Bytes (uint8, flat) end to end, each starting at a multiple of 16; a part that is alone is not copied."""
    if len(parts) == 1:
        return parts[0]
    flat = parts[0].new_zeros(sum(_aligned(len(p)) for p in parts))
    offset = 0
    for part in parts:
        flat[offset : offset + len(part)].copy_(part)
        offset += _aligned(len(part))
    return flat


def flat_bytes(bucket: Sequence[TensorInfo]) -> int:
    """Bytes of the buffer that `flatten` makes of such tensors."""
    return bucket[0].nbytes if len(bucket) == 1 else sum(_aligned(i.nbytes) for i in bucket)


def split(flat: Tensor, bucket: Sequence[TensorInfo]) -> Iterator[tuple[str, Tensor]]:
    """The reverse of `flatten`: named views into ``flat``."""
    offset = 0
    for info in bucket:
        yield info.name, from_bytes(flat[offset : offset + info.nbytes], info)
        offset += _aligned(info.nbytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 16) * 16
