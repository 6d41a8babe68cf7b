"""Length-prefixed messages over a stream socket.

Caller to child: pickled, since the caller is trusted and trajectories are plain dataclasses. Child to
caller: JSON, since what a reward's process says is foreign data.
"""

from __future__ import annotations

import socket
import struct
import time

HEADER = struct.Struct("!I")
MAX_REPLY_BYTES = 16 << 20


class Closed(Exception):
    """The other side is gone."""


class TooLate(Exception):
    """Nothing complete arrived before the deadline."""


def send_frame(sock: socket.socket, payload: bytes, deadline_s: float | None = None) -> None:
    """Send one message. ``deadline_s`` is on the monotonic clock."""
    _arm(sock, deadline_s)
    try:
        sock.sendall(HEADER.pack(len(payload)) + payload)
    except TimeoutError as error:
        raise TooLate from error
    except OSError as error:
        raise Closed(str(error)) from error


def receive_frame(sock: socket.socket, deadline_s: float | None = None, limit_bytes: int = 1 << 32) -> bytes:
    """Receive one message. Raises `Closed`, also for one that claims to be above the limit, or `TooLate`."""
    (length,) = HEADER.unpack(_exactly(sock, HEADER.size, deadline_s))
    if length > limit_bytes:
        raise Closed(f"a reply of {length} bytes")
    return _exactly(sock, length, deadline_s)


def _exactly(sock: socket.socket, count: int, deadline_s: float | None) -> bytes:
    parts: list[bytes] = []
    while count:
        _arm(sock, deadline_s)
        try:
            part = sock.recv(min(count, 1 << 20))
        except TimeoutError as error:
            raise TooLate from error
        except OSError as error:
            raise Closed(str(error)) from error
        if not part:
            raise Closed("end of stream")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _arm(sock: socket.socket, deadline_s: float | None) -> None:
    if deadline_s is None:
        sock.settimeout(None)
        return
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TooLate
    sock.settimeout(left_s)
