"""HTTP with AgentENV's habits: the true code hides in the body, gateways answer in plain text, transitions
say 409."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx

from sandbox_client.errors import (
    AuthenticationFailed,
    Conflict,
    InvalidRequest,
    OutOfSpace,
    SandboxError,
    SandboxNotFound,
    SandboxPaused,
    SandboxTimeout,
    ServerFault,
    Unavailable,
)

T = TypeVar("T")
_KINDS: dict[int, type[SandboxError]] = {
    400: InvalidRequest,
    401: AuthenticationFailed,
    403: AuthenticationFailed,
    404: SandboxNotFound,
    409: Conflict,
    410: SandboxPaused,
    429: Unavailable,
    502: Unavailable,
    503: Unavailable,
    504: Unavailable,
    507: OutOfSpace,
}


class NeverSent(Unavailable):
    """The connection could not be made, so the request has had no effect."""


def classify(status: int, body: bytes, label: str) -> SandboxError:
    """The error of a response: by the code in its body if there is one, else by its status (spec/07 §1)."""
    code, message = status, body[:500].decode("utf-8", "replace").strip()
    try:
        said = json.loads(body)
    except ValueError:
        said = None
    if isinstance(said, dict):
        if isinstance(said.get("code"), int) and 400 <= said["code"] < 600:
            code = said["code"]
        message = str(said.get("message", message))[:500]
    kind = _KINDS.get(code, ServerFault if code >= 500 else InvalidRequest)
    return kind(f"{label}: {message or 'no message'} (code {code})", code=code)


async def send(client: httpx.AsyncClient, request: httpx.Request, label: str) -> httpx.Response:
    """One request, its body read. Transport failures become typed; answers of 400 and above raise."""
    try:
        response = await client.send(request)
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
        raise NeverSent(f"{label}: cannot connect: {error!r}") from error
    except httpx.TimeoutException as error:
        raise SandboxTimeout(f"{label}: no answer in time ({type(error).__name__})") from error
    except httpx.TransportError as error:
        raise Unavailable(f"{label}: connection lost: {error!r}") from error
    if response.status_code >= 400:
        raise classify(response.status_code, response.content, label)
    return response


def json_of(response: httpx.Response, label: str) -> Any:
    try:
        return response.json()
    except ValueError as error:
        raise ServerFault(f"{label}: an answer that is not JSON") from error


async def patiently(
    call: Callable[[], Awaitable[T]],
    patience_s: float,
    again: Callable[[SandboxError], bool] = lambda error: (
        error.retryable or isinstance(error, SandboxTimeout)
    ),
) -> T:
    """Repeat a call that may be repeated, with growing, jittered pauses, for ``patience_s`` at most."""
    began, pause_s = time.monotonic(), 0.05
    while True:
        try:
            return await call()
        except SandboxError as error:
            if not again(error) or time.monotonic() - began + pause_s > patience_s:
                raise
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
        pause_s = min(2 * pause_s, 2.0)
