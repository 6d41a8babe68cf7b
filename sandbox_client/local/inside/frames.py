"""Frames of a sandbox's init: a type byte, a 4-byte big-endian length, a payload. `wire` is the host's side.

``Q`` a request in JSON. Back: ``J`` the JSON answer, ``F`` a JSON error {"kind", "message"}, ``D`` data, ``Z`` end of
data, and for exec ``S`` {"pid"}, ``O`` stdout, ``E`` stderr, ``X`` {"exit_code", "timed_out"}. To an exec: ``I``
stdin, ``C`` close stdin, ``K`` signal.
"""

import json
import struct

HEADER = struct.Struct("!cI")
MAX_FRAME = 8 * 1024 * 1024
PIECE = 64 * 1024
BUFFER = 1024 * 1024


def send(conn, kind, payload=b""):
    conn.sendall(HEADER.pack(kind, len(payload)) + payload)


def send_json(conn, kind, value):
    send(conn, kind, json.dumps(value).encode("utf-8", "surrogateescape"))


def receive_exactly(conn, size):
    data = bytearray()
    while len(data) < size:
        piece = conn.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def receive(conn):
    kind, size = HEADER.unpack(receive_exactly(conn, HEADER.size))
    if size > MAX_FRAME:
        raise ValueError("frame too long")
    return kind, receive_exactly(conn, size)


class FrameWriter:
    """A file that sends what is written as ``D`` frames."""

    def __init__(self, conn):
        self.conn = conn

    def write(self, data):
        for start in range(0, len(data), BUFFER):
            send(self.conn, b"D", bytes(data[start : start + BUFFER]))
        return len(data)


class FrameReader:
    """A file that reads the ``D`` frames up to ``Z``."""

    def __init__(self, conn):
        self.conn, self.rest, self.ended = conn, b"", False

    def read(self, size=-1):
        while not self.ended and (size < 0 or len(self.rest) < size):
            kind, payload = receive(self.conn)
            if kind == b"Z":
                self.ended = True
            else:
                self.rest += payload
        size = len(self.rest) if size < 0 else size
        data, self.rest = self.rest[:size], self.rest[size:]
        return data
