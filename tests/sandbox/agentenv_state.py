"""What the AgentENV server for tests remembers, and the forms of its answers."""

from __future__ import annotations

import asyncio
import json
import struct
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from starlette.responses import JSONResponse, Response

ENVD_PORT = "49983"
ENVD_VERSION = "0.5.13"
NEVER_S = 10 * 365 * 86400.0


class Problem(Exception):
    """An error answer: HTTP status, and the code in its body where that differs."""

    def __init__(self, status: int, message: str, body_code: int | None = None) -> None:
        super().__init__(message)
        self.status, self.body_code = status, status if body_code is None else body_code

    def response(self) -> Response:
        return JSONResponse({"code": self.body_code, "message": str(self)}, self.status)


@dataclass
class Fault:
    """Applies to the next ``times`` requests that match.

    ``status``: answered like this, in plain text (a gateway) or as JSON with ``code``. ``delay_s`` before the
    work. ``drop``: the connection is cut, ``"before"`` or ``"after"`` the work, or ``"stream"``: after
    ``after_bytes`` of the body.
    """

    method: str
    path: str  # a regular expression, matched in full
    times: int = 1
    status: int = 0
    code: int = 0
    delay_s: float = 0.0
    drop: str = ""
    after_bytes: int = 0


@dataclass
class Record:
    id: str
    template: str
    sandbox: Any
    metadata: dict[str, str]
    env: dict[str, str]
    auto_pause: bool
    auto_resume: bool
    internet: bool | None
    network: dict[str, Any]
    ttl_s: float
    envd_token: str | None
    traffic_token: str | None
    started_at: float = field(default_factory=time.time)
    ends_at: float = 0.0
    state: str = "Running"
    busy_until: asyncio.Event = field(default_factory=asyncio.Event)
    processes: dict[int, Running] = field(default_factory=dict)
    ready_at: float = 0.0

    @property
    def shown(self) -> str:
        return "paused" if self.state in ("Paused", "Pausing", "Snapshotting", "Forking") else "running"


@dataclass
class Running:
    """A process of a sandbox. It goes on when its stream's client leaves."""

    config: dict[str, Any]
    process: Any
    tag: str | None
    events: list[dict[str, Any]] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    ended: bool = False
    task: asyncio.Task[None] | None = None


def rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def connect_frame(payload: Any, flags: int = 0) -> bytes:
    data = json.dumps(payload).encode()
    return struct.pack("!BI", flags, len(data)) + data


def connect_problem(code: str, message: str, status: int = 400) -> Response:
    return JSONResponse({"code": code, "message": message}, status)
