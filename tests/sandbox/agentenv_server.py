"""An AgentENV server for tests, made from the facts of its API, over real local sandboxes.

What it does by the facts: authentication, error bodies whose code differs from the status, the state table,
time to live, paging, metadata filters, per-child fork results, the data plane by headers, and the daemon's
Connect streams and files. What it cannot: keep memory in forks and snapshots, since local sandboxes cannot.

`Fault` breaks it on purpose. Every exchange of the control plane is recorded in ``exchanges`` for validation.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
from agentenv_data import DataPlane
from agentenv_state import (
    Fault,
    Problem,
)
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from sandbox_client import LocalBackend


class AgentEnvServer(DataPlane):
    """Start with ``with AgentEnvServer(folder) as server``; then ``server.url``."""

    def __init__(
        self, root: Path, *, api_key: str = "e2b_" + "0123456789abcdef" * 3, first_call_delay_s: float = 0.0
    ):
        super().__init__()
        self.root, self.api_key, self.first_call_delay_s = root, api_key, first_call_delay_s
        self.faults: list[Fault] = []
        self.exchanges: list[dict[str, Any]] = []
        self.requests: list[str] = []
        self.mistakes: list[str] = []
        self.port = 0
        self._routes = self._make_routes()

    # ------------------------------------------------------------ run

    def __enter__(self) -> AgentEnvServer:
        self.backend = LocalBackend(self.root)
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.backend.host.close()

    def start(self) -> None:
        config = uvicorn.Config(
            self.app,
            host="127.0.0.1",
            port=self.port,
            log_level="critical",
            timeout_graceful_shutdown=1,
            lifespan="off",
            interface="asgi3",
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]

    def stop(self) -> None:
        """The sandboxes stay, as AgentENV's paused ones do."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # ------------------------------------------------------------ entry, faults

    async def app(self, scope: dict[str, Any], receive: Callable, send: Callable) -> None:
        transport = send.__self__.transport
        request = Request(scope, receive)
        self.requests.append(f"{request.method} {request.url.path}")
        try:
            await request.body()  # before any delay: a real server has the request even if its client leaves
        except ClientDisconnect:
            return
        fault = self._fault(request)
        if fault is not None:
            await asyncio.sleep(fault.delay_s)
            if fault.drop == "before":
                transport.abort()
                return
            if fault.status:
                body = {"code": fault.code, "message": "injected"}
                answer = (
                    JSONResponse(body, fault.status)
                    if fault.code
                    else PlainTextResponse("bad gateway", fault.status)
                )
                await answer(scope, receive, send)
                return
        try:
            response = await self.dispatch(request)
        except Problem as problem:
            response = problem.response()
        except Exception:  # a mistake in this server: the fixture fails the test with it
            self.mistakes.append(traceback.format_exc())
            response = PlainTextResponse("mistake in the test server", 500)
        if fault is not None and fault.drop == "after":
            transport.abort()
            return
        if fault is not None and fault.drop == "stream":
            await self._cut(response, fault.after_bytes, scope, receive, send, transport)
            return
        await response(scope, receive, send)

    @staticmethod
    async def _cut(
        response: Response, limit: int, scope: Any, receive: Any, send: Any, transport: Any
    ) -> None:
        sent = 0

        async def cutting(message: dict[str, Any]) -> None:
            nonlocal sent
            await send(message)
            sent += len(message.get("body", b""))
            if message["type"] == "http.response.body" and sent >= limit:
                await asyncio.sleep(0.05)  # let the bytes leave
                transport.abort()

        with contextlib.suppress(Exception):
            await response(scope, receive, cutting)

    def _fault(self, request: Request) -> Fault | None:
        for fault in self.faults:
            if (
                fault.times > 0
                and fault.method == request.method
                and re.fullmatch(fault.path, request.url.path)
            ):
                fault.times -= 1
                return fault
        return None

    async def dispatch(self, request: Request) -> Response:
        await self._expire()
        headers = request.headers
        if request.url.path == "/health":  # the server's own, whatever the headers say
            return Response(status_code=204)
        for method, pattern, handler in self._routes:
            match = re.fullmatch(re.sub(r"\{\w+\}", "([^/]+)", pattern), request.url.path)
            if match and method == request.method:
                keys = headers.getlist("x-api-key")
                if keys != [self.api_key] or {"authorization", "x-team-id", "x-admin-token"} & set(
                    headers.keys()
                ):
                    raise Problem(401, "unauthorized")
                return await self._recorded(request, pattern, handler, match.groups())
        if "x-agentenv-sandbox-id" in headers or "e2b-sandbox-id" in headers:
            return await self.data_plane(request)
        raise Problem(404, "no such route")

    async def _recorded(
        self, request: Request, pattern: str, handler: Callable, args: tuple[str, ...]
    ) -> Response:
        raw = await request.body()
        try:
            body = json.loads(raw) if raw else None
        except ValueError:
            raise Problem(400, "malformed JSON") from None
        try:
            response = await handler(request, body, *args)
        except Problem as problem:
            response = problem.response()
        said = json.loads(response.body) if response.body else None
        self.exchanges.append(
            {
                "method": request.method,
                "path": pattern,
                "request": body,
                "status": response.status_code,
                "response": said,
            }
        )
        return response
