"""An engine behind the OpenAI chat API: what `k3rl serve` runs, and what judges an `engine` judge.

    GET  /health                 {"status": "ok"}
    GET  /v1/models              {"data": [{"id": NAME, ...}]}
    POST /v1/chat/completions    messages, tools, temperature, top_p, max_tokens, stop, seed -> one choice

Requests are batched by the engine. Messages are rendered by the model's own renderer, so no text in them becomes
structure; calls of tools come back parsed. Streams and several choices are not offered.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request

from k3rl.chat import Renderer
from k3rl.chat.messages import as_message
from k3rl.errors import UserError
from k3rl.types import StopReason
from k3rl.web import guard, json_body
from rollout.engine import Engine, Generation, SamplingParams

MAX_REQUEST_BYTES = 16 << 20
MAX_WAITING = 1024
KNOWN = {
    "model", "messages", "tools", "tool_choice", "temperature", "top_p", "top_k", "min_p", "max_tokens",
    "max_completion_tokens", "stop", "seed", "stream", "n", "user", "reasoning_effort",
}  # fmt: skip


@dataclass
class ChatEngine:
    """Chat completions from an engine that one thread drives. Close it."""

    engine: Engine
    renderer: Renderer
    name: str
    max_context: int
    thinking: bool = True
    _waiting: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Future[Generation]]] = field(
        default_factory=dict
    )
    _inbox: list[Generation] = field(default_factory=list)
    _abandoned: list[str] = field(default_factory=list)
    _count: int = 0

    def __post_init__(self) -> None:
        self._wake = threading.Condition()
        self._open, self._broken = True, ""
        self._thread = threading.Thread(target=self._drive, name="chat-engine", daemon=True)
        self._thread.start()

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A ``chat.completion`` object. Raises `UserError` for a request that can't be served, `RuntimeError` where
        the engine broke."""
        generation = self._request(body)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Generation] = loop.create_future()
        with self._wake:
            if self._broken or not self._open:
                raise RuntimeError(self._broken or "the engine is closed")
            self._waiting[generation.id] = (loop, future)
            self._inbox.append(generation)
            self._wake.notify()
        try:
            done = await future
        except asyncio.CancelledError:  # nobody waits any more: its tokens would be for nothing
            with self._wake:
                self._abandoned.append(generation.id)
                self._wake.notify()
            raise
        return self._answer(done)

    def _request(self, body: Mapping[str, Any]) -> Generation:
        if unknown := sorted(set(body) - KNOWN):
            raise UserError(f"'{unknown[0]}' is not offered here")
        if body.get("stream") or body.get("n", 1) != 1:
            raise UserError("streams, and more than one choice, are not offered here")
        if body.get("tool_choice", "auto") not in ("auto", "none"):
            raise UserError("'tool_choice' may be auto or none: this engine samples freely")
        messages, tools = body.get("messages"), body.get("tools") or []
        if not isinstance(messages, list) or not messages or not isinstance(tools, list):
            raise UserError("'messages' must be a list with at least one message, 'tools' a list")
        tools = [] if body.get("tool_choice") == "none" else tools
        ids = self.renderer.encode_prompt(messages, tools, body.get("reasoning_effort"), self.thinking)
        room = self.max_context - len(ids)
        if room < 1:
            raise UserError(f"the prompt has {len(ids)} tokens, the context {self.max_context}")
        stop = body.get("stop") or []
        sampling = SamplingParams(
            max_tokens=min(room, int(body.get("max_completion_tokens") or body.get("max_tokens") or room)),
            temperature=_number(body, "temperature", 1.0, 0.0, 10.0),
            top_p=_number(body, "top_p", 1.0, 1e-6, 1.0),
            top_k=int(_number(body, "top_k", 0, 0, 1 << 20)),
            min_p=_number(body, "min_p", 0.0, 0.0, 1.0),
            stop_token_ids=self.renderer.stop_token_ids,
            stop_strings=(stop,) if isinstance(stop, str) else tuple(stop),
        )
        with self._wake:
            self._count += 1
            number = self._count
        key = int(body["seed"]) if body.get("seed") is not None else time.time_ns() ^ number
        return Generation(f"chat-{number}", ids, sampling, key & (2**63 - 1))

    def _answer(self, generation: Generation) -> dict[str, Any]:
        if generation.stop_reason is StopReason.ERROR:
            raise RuntimeError(generation.error)
        parsed = self.renderer.parse(generation.token_ids, self.thinking)
        message = as_message(parsed)
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            call["function"]["arguments"] = arguments if isinstance(arguments, str) else json.dumps(arguments)
        cut = generation.stop_reason in (StopReason.MAX_TOKENS, StopReason.MAX_CONTEXT)
        finish = "length" if cut else "tool_calls" if message.get("tool_calls") else "stop"
        prompt, written = len(generation.context_ids), len(generation.token_ids)
        return {
            "id": generation.id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.name,
            "choices": [{"index": 0, "message": message, "finish_reason": finish}],
            "usage": {
                "prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written,
            },
        }  # fmt: skip

    def _drive(self) -> None:
        """The engine's thread: it alone touches the engine."""
        try:
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: self._inbox or not self._open or self.engine.pending())
                    if not self._open:
                        return
                    new, self._inbox = self._inbox, []
                    gone, self._abandoned = self._abandoned, []
                for generation in new:
                    self._submit(generation)
                if gone:
                    self.engine.abort(gone)
                for done in self.engine.step():
                    self._hand_back(done.id, done)
        except Exception as error:  # whatever broke, those who wait must hear of it
            with self._wake:
                self._broken = f"the engine broke: {type(error).__name__}: {error}"
                left = list(self._waiting)
            for id_ in left:
                self._hand_back(id_, RuntimeError(self._broken))

    def _submit(self, generation: Generation) -> None:
        try:
            self.engine.submit([generation])
        except ValueError as error:  # this one can't be served; the others can
            self._hand_back(generation.id, UserError(str(error)))

    def _hand_back(self, id_: str, what: Generation | Exception) -> None:
        with self._wake:
            entry = self._waiting.pop(id_, None)
        if entry is None:
            return
        loop, future = entry

        def settle() -> None:
            if future.done():
                return
            if isinstance(what, Exception):
                future.set_exception(what)
            else:
                future.set_result(what)

        loop.call_soon_threadsafe(settle)

    def close(self) -> None:
        """Requests that wait fail."""
        with self._wake:
            self._open = False
            left = list(self._waiting)
            self._wake.notify()
        for id_ in left:
            self._hand_back(id_, RuntimeError("the engine is closed"))
        self._thread.join(timeout=60)


def _number(body: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise UserError(f"'{name}' must be a number from {low:g} to {high:g}")
    return value


def make_app(chat: ChatEngine, token: str = "") -> FastAPI:
    """The HTTP face. With ``token`` every request but ``/health`` must carry it."""
    app = FastAPI(title="k3rl", docs_url=None, redoc_url=None, openapi_url=None)

    allowed = guard(token)

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/models", dependencies=[Depends(allowed)])
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": chat.name, "object": "model", "owned_by": "k3rl"}]}

    @app.post("/v1/chat/completions", dependencies=[Depends(allowed)])
    async def complete(request: Request) -> dict[str, Any]:
        body = await json_body(request, MAX_REQUEST_BYTES)
        if len(chat._waiting) >= MAX_WAITING:
            raise HTTPException(503, "too many requests are waiting")
        try:
            return await chat.complete(body)
        except UserError as error:
            raise HTTPException(422, str(error)) from error
        except RuntimeError as error:
            raise HTTPException(500, str(error)) from error

    return app


class Served:
    """A server in a thread of this process, on a port of its own choice. Close it."""

    def __init__(self, app: FastAPI, host: str = "127.0.0.1", port: int = 0) -> None:
        import uvicorn

        self._server = uvicorn.Server(uvicorn.Config(app, host=host, port=port, log_level="warning"))
        self._thread = threading.Thread(target=self._server.run, name="chat-http", daemon=True)
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise RuntimeError(f"no server could be started on {host}:{port}")
            time.sleep(0.01)
        self.port: int = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://{host}:{self.port}/v1"

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=30)
