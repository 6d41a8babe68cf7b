"""How the bytes travel. Each transport: `send` on the trainer's side, `receive` on the engine's.

    name       from and to                         copies                    lives until
    shm        CPU processes of one node or Ray    one, into Ray's store     the publication is garbage
    disk       anything that sees the folder       two                       the next publication
    cuda_ipc   two processes on one GPU            one of small tensors      the next publication
    nccl/gloo  devices of a process group          one bucket at a time      all receivers have read it

Tensors travel under checkpoint names, each once, tied ones once; a receiver checks this (`exactly_once`).
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import torch
from torch import Tensor

from k3rl.weights.buckets import bucket_plan, flatten, split
from k3rl.weights.publication import TensorInfo, as_bytes, from_bytes

BUCKET_BYTES = 256 << 20
Named = Iterable[tuple[str, Tensor]]


class Transport(Protocol):
    """``send`` returns what `receive` needs; ``release`` lets go of what the last publication held."""

    name: str

    def send(self, weights: Named) -> tuple[Any, tuple[TensorInfo, ...]]: ...

    def release(self) -> None: ...


class Shm:
    """Ray's shared-memory object store: readers on the node map the bytes instead of copying them.

    ``put`` and ``get`` are Ray's unless others are given (a single process can pass the identity).
    """

    name = "shm"

    def __init__(self, put: Callable[[Any], Any] | None = None, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._put, self._bucket_bytes = put or _ray_put, bucket_bytes

    def send(self, weights: Named) -> tuple[Any, tuple[TensorInfo, ...]]:
        infos: list[TensorInfo] = []
        refs: list[Any] = []
        bucket: list[Any] = []
        size = 0
        for name, tensor in weights:
            infos.append(TensorInfo.of(name, tensor))
            data = as_bytes(tensor).cpu().numpy()
            if bucket and size + data.nbytes > self._bucket_bytes:
                refs.append(self._put(bucket))
                bucket, size = [], 0
            bucket.append(data)
            size += data.nbytes
        if bucket:
            refs.append(self._put(bucket))
        return refs, tuple(infos)

    def release(self) -> None:
        """Ray frees the buckets when the last reference goes."""

    @staticmethod
    def receive(
        payload: Sequence[Any], infos: Sequence[TensorInfo], get: Callable[[Any], Any] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Read-only views of shared memory: copy them, don't write to them."""
        fetch = get or _ray_get
        wanted = iter(infos)
        for ref in payload:
            for data in fetch(ref):
                info = next(wanted, None)
                if info is None:
                    raise ValueError(f"more tensors came than the {len(infos)} that were announced")
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch warns that the array is read-only, which is meant
                    yield info.name, from_bytes(torch.from_numpy(data), info)


class Disk:
    """Safetensors files in a folder of their own per publication; the one before is deleted at the next."""

    name = "disk"

    def __init__(self, root: Path | str, bucket_bytes: int = 4 << 30) -> None:
        self._root, self._bucket_bytes = Path(root), bucket_bytes
        self._last: Path | None = None

    def send(self, weights: Named) -> tuple[str, tuple[TensorInfo, ...]]:
        from k3rl.models.checkpoint import write_shards

        infos: list[TensorInfo] = []

        def noted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                infos.append(TensorInfo.of(name, tensor))
                yield name, tensor

        folder = self._root / f".{uuid4().hex}"
        write_shards(folder, noted(), self._bucket_bytes)
        final = self._root / folder.name.removeprefix(".")
        os.replace(folder, final)
        self.release()
        self._last = final
        return str(final), tuple(infos)

    def release(self) -> None:
        if self._last is not None:
            shutil.rmtree(self._last)
            self._last = None

    @staticmethod
    def receive(payload: str, infos: Sequence[TensorInfo]) -> Iterator[tuple[str, Tensor]]:
        from safetensors import safe_open

        from k3rl.models.checkpoint import weight_map

        where = weight_map(Path(payload))
        announced = {i.name for i in infos}
        if extra := where.keys() - announced:
            raise ValueError(f"{payload}: tensor '{min(extra)}' was not announced")
        handles: dict[Path, Any] = {}
        for info in infos:
            if info.name not in where:
                raise ValueError(f"{payload}: tensor '{info.name}' was announced and isn't there")
            path = where[info.name]
            if path not in handles:
                handles[path] = safe_open(path, framework="pt")
            yield info.name, handles[path].get_tensor(info.name)


class CudaIpc:
    """Device memory of the trainer, opened by another process on the same GPU: nothing goes through the host.

    To open one takes the driver longer than to copy a layer, so small tensors are gathered in shared buckets and only
    those of a bucket's size travel as they are. What was sent is kept alive here until the next `send` or `release`.
    """

    name = "cuda_ipc"

    def __init__(self, bucket_bytes: int = 64 << 20) -> None:
        self._bucket_bytes = bucket_bytes
        self._held: list[Tensor] = []

    def send(self, weights: Named) -> tuple[list[tuple[Any, ...]], tuple[TensorInfo, ...]]:
        """The payload: what opens a bucket, and how many tensors lie in it."""
        from torch.multiprocessing.reductions import reduce_tensor

        self._held = []
        tensors: list[Tensor] = []
        infos: list[TensorInfo] = []
        for name, tensor in weights:
            if not tensor.is_cuda:
                raise ValueError(f"cuda_ipc: tensor '{name}' is on {tensor.device}")
            tensors.append(as_bytes(tensor))
            infos.append(TensorInfo.of(name, tensor))
        payload: list[tuple[Any, ...]] = []
        parts = iter(tensors)
        for bucket in bucket_plan(infos, self._bucket_bytes):
            flat = flatten([next(parts) for _ in bucket])
            self._held.append(flat)
            payload.append((reduce_tensor(flat)[1], len(bucket)))
        torch.cuda.synchronize()
        return payload, tuple(infos)

    def release(self) -> None:
        self._held = []

    @staticmethod
    def receive(
        payload: Sequence[tuple[Any, ...]], infos: Sequence[TensorInfo]
    ) -> Iterator[tuple[str, Tensor]]:
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        wanted = iter(infos)
        for arguments, count in payload:
            yield from split(rebuild_cuda_tensor(*arguments), [next(wanted) for _ in range(count)])


def _ray_put(value: Any) -> Any:
    import ray

    return ray.put(value)


def _ray_get(ref: Any) -> Any:
    import ray

    return ray.get(ref)
