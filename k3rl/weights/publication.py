"""A set of weights on its way: what it holds, which version it is, and how to know that it arrived.

The dtype of each tensor is part of the contract: nothing is cast on the way (a router's float32 bias stays
float32).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from k3rl.weights.handshake import Handshake


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """``dtype`` without the ``torch.`` in front."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorInfo:
        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def nbytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.torch_dtype.itemsize


@dataclass(frozen=True, slots=True)
class Canary:
    """Fixed sequences and the trainer's log-probs of ``sequence[start:]`` (temperature 1) under the
    published weights.
    """

    sequences: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    logprobs: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Publication:
    """``payload`` belongs to the transport; it stays valid until the publisher's next publication.

    ``checksum`` covers names, dtypes, shapes and contents in their order; an empty one wasn't asked for.
    """

    version: int
    transport: str
    payload: Any
    tensors: tuple[TensorInfo, ...]
    checksum: str = ""
    canary: Canary | None = None
    handshake: Handshake = field(default_factory=Handshake)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


@dataclass(frozen=True, slots=True)
class Ack:
    """What a receiver says after it loaded a publication."""

    receiver: str
    version: int
    checksum: str
    canary_logprobs: tuple[tuple[float, ...], ...] = ()
    seconds_s: float = 0.0
    handshake: Handshake = field(default_factory=Handshake)


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's bytes, flat uint8; a view where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def from_bytes(data: Tensor, info: TensorInfo) -> Tensor:
    """The reverse of `as_bytes`, without a copy."""
    return data.view(info.torch_dtype).reshape(info.shape)


class Checksum:
    """Of tensors in their order, on the device they are on: sums of their 64-bit words, plain and weighted by
    position, hashed.

    One changed, moved or swapped word changes it. It guards against a wrong delivery, not against a forger.
    """

    BLOCK = 1 << 20
    """Words that are summed at once."""
    BATCH = 64 << 20
    """Bytes that are laid end to end first: hundreds of sums of small tensors cost more in kernel launches than in
    reading."""
    FACTOR = 0x1E3779B97F4A7C15

    def __init__(self) -> None:
        self._infos: list[TensorInfo] = []
        self._waiting: list[Tensor] = []
        self._waiting_bytes = 0
        self._sums: list[Tensor] = []
        self._weights: dict[torch.device, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """The tensor must stay as it is until `hexdigest`."""
        data = as_bytes(tensor)
        self._infos.append(TensorInfo.of(name, tensor))
        self._waiting.append(data)
        self._waiting_bytes += data.numel()
        if self._waiting_bytes >= self.BATCH:
            self._sum_up()

    def _sum_up(self) -> None:
        """sum x_i, sum x_i (2 i F + 1) modulo 2^64 over what waits, and the sum of the bytes that fill no word."""
        if not self._waiting:
            return
        # Sender and receiver must cut alike, so batches end by bytes alone, wherever a tensor may lie.
        first = self._waiting[0]
        data = first if len(self._waiting) == 1 else torch.cat([d.to(first.device) for d in self._waiting])
        self._waiting, self._waiting_bytes = [], 0
        whole = data.numel() // 8 * 8
        words = data[:whole]
        words = (words if words.data_ptr() % 8 == 0 else words.clone()).view(torch.int64)
        weights = self._weights.get(data.device)
        if weights is None:
            index = torch.arange(self.BLOCK, dtype=torch.int64, device=data.device)
            weights = self._weights[data.device] = index * 2 * self.FACTOR + 1
        plain = torch.zeros((), dtype=torch.int64, device=data.device)
        placed = torch.zeros_like(plain)
        for number, block in enumerate(words.split(self.BLOCK)):
            part = block.sum()
            shift = (2 * number * self.BLOCK * self.FACTOR + (1 << 63)) % (1 << 64) - (1 << 63)
            placed += (block * weights[: len(block)]).sum() + part * shift
            plain += part
        self._sums.append(torch.stack([plain, placed, data[whole:].long().sum()]))

    def hexdigest(self) -> str:
        self._sum_up()
        digest = hashlib.blake2b(digest_size=16)
        for info in self._infos:
            digest.update(f"{info.name}\x1f{info.dtype}\x1f{info.shape}\x1f".encode())
        digest.update(str([sums.tolist() for sums in self._sums]).encode())
        return digest.hexdigest()


def checksum(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Of named tensors in their order."""
    total = Checksum()
    for name, tensor in weights:
        total.add(name, tensor)
    return total.hexdigest()


def exactly_once(
    weights: Iterable[tuple[str, Tensor]], expected: Sequence[TensorInfo]
) -> Iterator[tuple[str, Tensor]]:
    """Pass tensors on while checking that each expected one comes once, in order, with its dtype and shape.

    Raises `ValueError` naming the first that doesn't.
    """
    wanted = iter(expected)
    for name, tensor in weights:
        info = next(wanted, None)
        found = TensorInfo.of(name, tensor)
        if info is None:
            raise ValueError(f"tensor '{name}' came, and {len(expected)} tensors were announced without it")
        if found != info:
            raise ValueError(f"tensor {found} came where {info} was announced")
        yield name, tensor
    missing = next(wanted, None)
    if missing is not None:
        raise ValueError(f"tensor '{missing.name}' was announced and didn't come")
