"""Weights over a process group: nccl between GPUs, gloo between CPUs. Double-buffered, a bucket at a time.

The sender's thread waits for its receivers, so that `send` returns at once and the publication can be
handed out; each receiver joins from `receive`. The group belongs to one publication and dies with it: a
lost receiver can't hang the next.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from k3rl.weights.buckets import bucket_plan, flat_bytes, flatten, split
from k3rl.weights.publication import TensorInfo, as_bytes


def _group(backend: str, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    if backend == "nccl":
        return dist.ProcessGroupNCCL(store, rank, size, timeout)
    return dist.ProcessGroupGloo(store, rank, size, timeout)


class Broadcast:
    """``receivers`` must all call `receive`. ``host`` is this machine as receivers reach it."""

    def __init__(
        self,
        backend: str,
        receivers: int,
        host: str = "127.0.0.1",
        bucket_bytes: int = 256 << 20,
        timeout_s: float = 300.0,
    ) -> None:
        if backend not in ("nccl", "gloo"):
            raise ValueError(f"broadcast backend must be nccl or gloo, got '{backend}'")
        self.name, self._receivers, self._host = backend, receivers, host
        self._bucket_bytes, self._timeout = bucket_bytes, timedelta(seconds=timeout_s)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._store: Any = None

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> tuple[dict[str, Any], tuple[TensorInfo, ...]]:
        self.release()
        held = [(name, tensor.detach()) for name, tensor in weights]
        infos = tuple(TensorInfo.of(name, tensor) for name, tensor in held)
        self._store = dist.TCPStore(self._host, 0, None, True, self._timeout, wait_for_workers=False)
        key = uuid4().hex
        payload = {
            "backend": self.name,
            "host": self._host,
            "port": self._store.port,
            "key": key,
            "size": self._receivers + 1,
            "bucket_bytes": self._bucket_bytes,
            "timeout_s": self._timeout.total_seconds(),
        }
        self._thread = threading.Thread(
            target=self._run, args=(held, infos, key), name="weights", daemon=True
        )
        self._thread.start()
        return payload, infos

    def _run(self, held: list[tuple[str, Tensor]], infos: Sequence[TensorInfo], key: str) -> None:
        try:
            store = dist.PrefixStore(key, self._store)
            group = _group(self.name, store, 0, self._receivers + 1, self._timeout)
            tensors = iter(held)
            for bucket in bucket_plan(infos, self._bucket_bytes):
                flat = flatten([as_bytes(next(tensors)[1]) for _ in bucket])
                group.broadcast([flat], _root()).wait()
        except BaseException as error:  # re-raised in `release`, by the thread that owns this object
            self._error = error

    def release(self) -> None:
        """Wait until all receivers have everything; raises what went wrong in the meantime."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._store = None
        if self._error is not None:
            error, self._error = self._error, None
            raise RuntimeError(f"the broadcast of weights failed: {error}") from error

    @staticmethod
    def receive(
        payload: dict[str, Any], infos: Sequence[TensorInfo], device: torch.device | str = "cpu"
    ) -> Iterator[tuple[str, Tensor]]:
        """Take part in the broadcast; every tensor is yielded on ``device``."""
        timeout = timedelta(seconds=payload["timeout_s"])
        store = dist.TCPStore(payload["host"], payload["port"], None, False, timeout)
        scoped = dist.PrefixStore(payload["key"], store)
        rank = scoped.add("rank", 1)
        group = _group(payload["backend"], scoped, rank, payload["size"], timeout)
        for bucket in bucket_plan(infos, payload["bucket_bytes"]):
            flat = torch.empty(flat_bytes(bucket), dtype=torch.uint8, device=device)
            group.broadcast([flat], _root()).wait()
            yield from split(flat, bucket)


def _root() -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return options
