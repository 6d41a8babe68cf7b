"""What this project's HTTP servers share: a token at the door, and bodies of bounded size."""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable
from typing import Any

from fastapi import HTTPException, Request


def guard(token: str) -> Callable[[Request], None]:
    """A dependency that lets requests with ``Authorization: Bearer TOKEN`` in, all where ``token`` is empty; else
    401."""

    def allowed(request: Request) -> None:
        given = request.headers.get("authorization", "")
        if token and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise HTTPException(401, "this server asks for a token")

    return allowed


async def json_body(request: Request, limit_bytes: int) -> dict[str, Any]:
    """The request's body as a mapping: 413 where it is larger than ``limit_bytes``, 422 where it is something else."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit_bytes:
            raise HTTPException(413, f"a request may have {limit_bytes} bytes")
        parts.append(part)
    try:
        body = json.loads(b"".join(parts))
    except (ValueError, RecursionError) as error:
        raise HTTPException(422, f"the request is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise HTTPException(422, "the request is not a mapping")
    return body
