"""Experts that an engine sent tokens to, gathered while a trajectory grows.

Legend: T tokens, L expert layers, K experts a token. Always int16, in token order, prompt first.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

_FIRST_ROWS = 64


class RoutingRows:
    """Rows by token, appended at the cost of what is appended. ``held_TLK`` are the first ones; they are not
    changed. What was appended never changes either, so `array` can be handed out without a copy."""

    def __init__(self, held_TLK: np.ndarray | None = None) -> None:
        self._buffer = held_TLK
        self._count = 0 if held_TLK is None else len(held_TLK)
        self._owned = False

    def __len__(self) -> int:
        return self._count

    @property
    def array(self) -> np.ndarray | None:
        """int16 [T, L, K]; ``None`` where nothing was ever noted."""
        return None if self._buffer is None else self._buffer[: self._count]

    def append(self, rows_TLK: np.ndarray) -> None:
        """`ValueError` where they are of other layers or experts than those before."""
        held, count = self._buffer, self._count + len(rows_TLK)
        if held is not None and held.shape[1:] != rows_TLK.shape[1:]:
            raise ValueError(
                f"routing of {rows_TLK.shape[1:]} after {held.shape[1:]} (layers, experts a token)"
            )
        if held is None or not self._owned or count > len(held):
            self._buffer = np.empty((max(_FIRST_ROWS, 2 * count), *rows_TLK.shape[1:]), np.int16)
            self._owned = True
            if held is not None:
                self._buffer[: self._count] = held[: self._count]
        assert self._buffer is not None
        self._buffer[self._count : count] = rows_TLK
        self._count = count


def routing_to_json(routing_TLK: np.ndarray | None) -> dict[str, Any] | None:
    """Exact, and without pickle: little-endian int16 in base64, and the shape."""
    if routing_TLK is None:
        return None
    data = np.ascontiguousarray(routing_TLK, "<i2").tobytes()
    return {"shape": list(routing_TLK.shape), "int16": base64.b64encode(data).decode()}


def routing_from_json(data: dict[str, Any] | None) -> np.ndarray | None:
    """`ValueError` where the bytes do not make the shape."""
    if data is None:
        return None
    values = np.frombuffer(base64.b64decode(data["int16"], validate=True), "<i2")
    return values.reshape(data["shape"]).astype(np.int16)
