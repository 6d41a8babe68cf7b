"""From trainer to engines, with proof of arrival: version, every tensor once, changed checksum, canary
log-probs.

    publication = publisher.publish(worker.named_weights(), 3, worker.canary())   # in the trainer's process
    ack = deliver(publication, engine)                                            # in each engine's process
    metrics = verify(publication, acks, previous)                                 # in the recipe

Almost every serious bug of such platforms was a weight that never arrived (spec/10 G), so `verify` runs
after every publication.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from k3rl.errors import RunError, UserError, nearest
from k3rl.weights.broadcast import Broadcast
from k3rl.weights.handshake import Handshake
from k3rl.weights.publication import Ack, Canary, Checksum, Publication, exactly_once
from k3rl.weights.transports import CudaIpc, Disk, Shm, Transport

TRANSPORTS = ("shm", "disk", "cuda_ipc", "nccl", "gloo")


def make_transport(name: str, **options: Any) -> Transport:
    """By name, with the transport's own options. `UserError` for an unknown one."""
    if name == "shm":
        return Shm(**options)
    if name == "disk":
        return Disk(**options)
    if name == "cuda_ipc":
        return CudaIpc(**options)
    if name in ("nccl", "gloo"):
        return Broadcast(name, **options)
    raise UserError(f"weights: no transport '{name}'{nearest(name, TRANSPORTS)}")


class Publisher:
    """Lives in the trainer's process. At most one publication of it is valid at a time: publishing ends the
    last one.
    """

    def __init__(self, transport: Transport, handshake: Handshake | None = None) -> None:
        self.transport, self.handshake = transport, handshake or Handshake()

    def publish(
        self, weights: Iterable[tuple[str, Tensor]], version: int, canary: Canary | None = None
    ) -> Publication:
        """``weights`` by checkpoint name, tied tensors once. Raises `ValueError` where a name comes twice."""
        total, seen = Checksum(), set()

        def noted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                if name in seen:
                    raise ValueError(f"tensor '{name}' is published twice")
                seen.add(name)
                total.add(name, tensor)
                yield name, tensor

        payload, infos = self.transport.send(noted())
        return Publication(
            version, self.transport.name, payload, infos, total.hexdigest(), canary, self.handshake
        )

    def close(self) -> None:
        self.transport.release()


def receive(
    publication: Publication, device: torch.device | str = "cpu", get: Callable[[Any], Any] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors, each exactly once as announced. ``get`` replaces `ray.get` for `shm`."""
    payload, infos = publication.payload, publication.tensors
    if publication.transport == "shm":
        source = Shm.receive(payload, infos, get)
    elif publication.transport == "disk":
        source = Disk.receive(payload, infos)
    elif publication.transport == "cuda_ipc":
        source = CudaIpc.receive(payload, infos)
    else:
        source = Broadcast.receive(payload, infos, device)
    return exactly_once(source, infos)


def deliver(
    publication: Publication,
    engine: Any,
    *,
    receiver: str = "",
    handshake: Handshake | None = None,
    device: torch.device | str = "cpu",
    get: Callable[[Any], Any] | None = None,
) -> Ack:
    """Load a publication into an `Engine` and answer with what it now holds. Runs in the engine's process.

    Raises `RunError` where the two sides disagree on what numbers mean, `ValueError` from the engine's
    strict load.
    """
    started = time.monotonic()
    mine = handshake or Handshake()
    publication.handshake.require(mine, receiver or "engine")
    total = Checksum()

    def noted() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in receive(publication, device, get):
            total.add(name, tensor)
            yield name, tensor

    engine.load_weights(noted(), publication.version)
    scores: list[list[float]] = []
    if publication.canary is not None:
        canary = publication.canary
        scores = engine.score([list(s) for s in canary.sequences], list(canary.starts))
    rows = tuple(tuple(float(x) for x in row) for row in scores)
    seconds = time.monotonic() - started
    return Ack(receiver, engine.stats().version, total.hexdigest(), rows, seconds, mine)


def verify(
    publication: Publication,
    acks: Sequence[Ack],
    previous: Publication | None = None,
    *,
    changed: bool = True,
    tolerance: float = 1e-3,
) -> dict[str, float]:
    """`RunError` unless every engine holds exactly this publication; metrics of the delivery otherwise.

    ``changed``: weights were trained since ``previous``, so their checksum must differ. ``tolerance``
    bounds the mean absolute gap of the canary's log-probs, in nats: 1e-3 suits float32, about 0.05
    bfloat16.
    """
    if not acks:
        raise RunError(f"weights version {publication.version}: no engine took it")
    if previous is not None and changed and previous.checksum == publication.checksum:
        raise RunError(
            f"weights version {publication.version} is byte for byte version {previous.version}: "
            "what was trained isn't what is published"
        )
    worst = 0.0
    for ack in acks:
        who = ack.receiver or "an engine"
        if ack.version != publication.version:
            raise RunError(
                f"{who} serves weights version {ack.version} after {publication.version} was loaded"
            )
        if ack.checksum != publication.checksum:
            raise RunError(f"{who} received other bytes than were published as version {publication.version}")
        if publication.canary is not None:
            gap = canary_gap(publication.canary, ack)
            worst = max(worst, gap)
            if not gap <= tolerance:
                raise RunError(
                    f"{who} scores the canary prompt {gap:.3g} nats away from the trainer "
                    f"(bound {tolerance:g}): weights version {publication.version} did not arrive whole"
                )
    return {
        "weights/version": float(publication.version),
        "weights/bytes": float(publication.nbytes),
        "weights/load_seconds_s": max(a.seconds_s for a in acks),
        "weights/canary_gap": worst,
    }


def canary_gap(canary: Canary, ack: Ack) -> float:
    """Mean absolute log-prob difference; infinite where the shapes differ or a value is NaN."""
    if [len(r) for r in canary.logprobs] != [len(r) for r in ack.canary_logprobs]:
        return float("inf")
    pairs = [
        abs(a - b)
        for mine, theirs in zip(canary.logprobs, ack.canary_logprobs, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    ]
    mean = sum(pairs) / len(pairs) if pairs else 0.0
    return mean if mean == mean else float("inf")


def canary_sequences(vocab_size: int, count: int = 2, length: int = 24) -> tuple[tuple[int, ...], ...]:
    """Fixed pseudo-random ids below ``vocab_size``: the same for every process and run."""
    generator = torch.Generator().manual_seed(0x6B33)
    ids = torch.randint(0, vocab_size, (count, length), generator=generator)
    return tuple(tuple(row) for row in ids.tolist())
