"""Rewards over HTTP, for workers elsewhere: what `k3rl rewards serve` runs.

    GET  /health            {"status": "ok"}
    GET  /rewards           {"rewards": [name, ...]}
    GET  /rewards/NAME      {"name", "scope", "depends", "deterministic", "timeout_s", "doc"}
    POST /rewards/NAME      {"arguments": {...}, "items": [scored, ...]} -> {"verdicts": [...]}

``scored`` and the verdicts are the JSON of `rewards.wire`. Only rewards that have a name here are served: a request
never makes the server import anything. Every call runs in a killable process, as it does beside a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request
from starlette.concurrency import run_in_threadpool

from k3rl.config.rewards import RewardConfig
from k3rl.errors import UserError, nearest
from k3rl.web import guard, json_body
from rewards.api import RewardFunction, Verdict
from rewards.isolation.pool import IsolatedPool
from rewards.registry import get_reward, known_names, load_modules
from rewards.wire import Malformed, scored_from_json, verdict_to_json

MAX_REQUEST_BYTES = 64 << 20
MAX_WAITING = 256


class RewardServer:
    """The rewards and the processes behind the addresses. Plain: no HTTP in it."""

    def __init__(self, config: RewardConfig) -> None:
        load_modules(config.modules)
        self.config = config
        self.pool = IsolatedPool(
            config.processes, config.memory_mb, config.retries, config.modules, config.sandbox
        )
        self.waiting = 0

    def find(self, name: str) -> RewardFunction:
        """Raises `UserError` for a name that is not known here; paths and addresses are not followed."""
        if name not in known_names():
            raise UserError(f"there is no reward '{name}' here{nearest(name, known_names())}")
        return get_reward(name)

    def score(self, name: str, arguments: dict[str, Any], items: Sequence[Any]) -> list[Verdict]:
        """Raises `UserError` for wrong arguments, `Malformed` for wrong items."""
        function = self.find(name)
        bound = function.bind(arguments)
        views = [scored_from_json(item) for item in items]
        return self.pool.run(function, views, bound, function.timeout_s or self.config.timeout_s)

    def close(self) -> None:
        self.pool.close()


def make_app(server: RewardServer, token: str = "") -> FastAPI:
    """The HTTP face. With ``token`` every request but ``/health`` must carry it."""
    app = FastAPI(title="k3rl rewards", docs_url=None, redoc_url=None, openapi_url=None)

    allowed = guard(token)

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/rewards", dependencies=[Depends(allowed)])
    def names() -> dict[str, list[str]]:
        return {"rewards": known_names()}

    @app.get("/rewards/{name}", dependencies=[Depends(allowed)])
    def describe(name: str) -> dict[str, Any]:
        try:
            found = server.find(name)
        except UserError as error:
            raise HTTPException(404, str(error)) from error
        keys = ("name", "scope", "depends", "deterministic", "timeout_s", "doc")
        return {key: getattr(found, key) for key in keys}

    @app.post("/rewards/{name}", dependencies=[Depends(allowed)])
    async def score(name: str, request: Request) -> dict[str, Any]:
        body = await json_body(request, MAX_REQUEST_BYTES)
        if server.waiting >= MAX_WAITING:
            raise HTTPException(503, "too many requests are waiting")
        server.waiting += 1
        try:
            arguments, items = body.get("arguments") or {}, body.get("items")
            if not isinstance(arguments, dict) or not isinstance(items, list):
                raise HTTPException(422, "'arguments' is a mapping and 'items' a list")
            verdicts = await run_in_threadpool(server.score, name, arguments, items)
        except (UserError, Malformed) as error:
            raise HTTPException(422, str(error)) from error
        finally:
            server.waiting -= 1
        return {"verdicts": [verdict_to_json(v) for v in verdicts]}

    return app
