"""An AgentENV server for tests, made from the facts of its API, over real local sandboxes.

What it does by the facts: authentication, error bodies whose code differs from the status, the state table,
time to live, paging, metadata filters, per-child fork results, the data plane by headers, and the daemon's
Connect streams and files. What it cannot: keep memory in forks and snapshots, since local sandboxes cannot.

`Fault` breaks it on purpose. Every exchange of the control plane is recorded in ``exchanges`` for validation.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import secrets
import struct
import threading
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from sandbox_client import Limits, LocalBackend, SandboxSpec
from sandbox_client.errors import FileMissing, InvalidRequest, OutOfSpace, SandboxError, SandboxNotFound
from sandbox_client.types import MIB, Chunk, FileInfo

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


class AgentEnvServer:
    """Start with ``with AgentEnvServer(folder) as server``; then ``server.url``."""

    def __init__(
        self, root: Path, *, api_key: str = "e2b_" + "0123456789abcdef" * 3, first_call_delay_s: float = 0.0
    ):
        self.root, self.api_key, self.first_call_delay_s = root, api_key, first_call_delay_s
        self.faults: list[Fault] = []
        self.exchanges: list[dict[str, Any]] = []
        self.requests: list[str] = []
        self.mistakes: list[str] = []
        self.records: dict[str, Record] = {}
        self.snapshots: dict[str, dict[str, Any]] = {}
        self.fail_fork_child: int | None = None
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

    # ------------------------------------------------------------ state

    async def _expire(self) -> None:
        for record in list(self.records.values()):
            if record.state == "Running" and record.ends_at <= time.time():
                if record.auto_pause:
                    await record.sandbox.pause()
                    record.state = "Paused"
                else:
                    await self._destroy(record)

    async def _destroy(self, record: Record) -> None:
        record.state = "Killing"
        self.records.pop(record.id, None)
        await record.sandbox.kill()
        for running in record.processes.values():
            if running.task is not None:
                running.task.cancel()

    def hold(self, sandbox_id: str, state: str) -> None:
        """Put a sandbox into a passing state, until `release`."""
        record = self.records[sandbox_id]
        record.state = state
        record.busy_until = asyncio.Event()

    def release(self, sandbox_id: str, state: str) -> None:
        record = self.records[sandbox_id]
        record.state = state
        self._server.servers[0].get_loop().call_soon_threadsafe(record.busy_until.set)

    def _find(self, sandbox_id: str) -> Record:
        record = self.records.get(sandbox_id)
        if record is None or record.state == "Killing":
            raise Problem(404, f"sandbox {sandbox_id} not found")
        return record

    @staticmethod
    async def _settled(record: Record) -> None:
        await record.busy_until.wait()

    # ------------------------------------------------------------ control plane

    def _make_routes(self) -> list[tuple[str, str, Callable]]:
        return [
            ("POST", "/sandboxes", self.create),
            ("POST", "/sandboxes-cold", self.create_cold),
            ("GET", "/sandboxes", self.list_v1),
            ("GET", "/v2/sandboxes", self.list_v2),
            ("GET", "/sandboxes/{sandboxID}", self.get),
            ("DELETE", "/sandboxes/{sandboxID}", self.delete),
            ("POST", "/sandboxes/{sandboxID}/pause", self.pause),
            ("POST", "/sandboxes/{sandboxID}/resume", self.resume),
            ("POST", "/sandboxes/{sandboxID}/fork", self.fork),
            ("POST", "/sandboxes/{sandboxID}/connect", self.connect),
            ("POST", "/sandboxes/{sandboxID}/timeout", self.timeout),
            ("POST", "/sandboxes/{sandboxID}/refreshes", self.refreshes),
            ("POST", "/sandboxes/{sandboxID}/snapshots", self.snapshot),
            ("GET", "/snapshots", self.list_snapshots),
            ("GET", "/snapshots/{snapshotID}", self.get_snapshot),
            ("DELETE", "/templates/{templateID}", self.delete_template),
        ]

    async def create(self, request: Request, body: Any) -> Response:
        if not isinstance(body, dict) or not isinstance(body.get("templateID"), str):
            raise Problem(400, "templateID is required")
        internet = body.get("allow_internet_access")
        return await self._create(body, body["templateID"], internet)

    async def create_cold(self, request: Request, body: Any) -> Response:
        if not isinstance(body, dict) or not isinstance(body.get("image"), str):
            raise Problem(400, "image is required")
        if body.get("memoryMB", 128) < 128 or body.get("diskSizeMB", 1024) % 1024:
            raise Problem(400, "memoryMB or diskSizeMB out of range")
        return await self._create(body, "base", body.get("allowInternetAccess"))

    async def _create(self, body: dict[str, Any], template: str, internet: bool | None) -> Response:
        if body.get("customExtensionParams"):
            raise Problem(400, "no custom extension")
        network = body.get("network") or {}
        if any(not re.fullmatch(r"[0-9a-f.:/]+", c) for c in network.get("allowOut", ())):
            raise Problem(400, "domain names are not supported in allowOut")
        record = await self._launch(self._template(template), template, body, internet, network)
        return JSONResponse(self._sandbox(record), 201, headers={"x-agentenv-sandbox-id": record.id})

    def _template(self, name: str) -> str:
        if name == "base":
            return "base"
        for snapshot_id, snapshot in self.snapshots.items():
            if name == snapshot_id or name in snapshot["names"]:
                return snapshot["local"]
        raise Problem(400, f"template {name} not found")

    async def _launch(
        self, local: str, shown: str, body: dict[str, Any], internet: bool | None, network: dict[str, Any]
    ) -> Record:
        limits = Limits(memory_bytes=256 * MIB, disk_bytes=64 * MIB)
        env = dict(body.get("envVars") or {})
        spec = SandboxSpec(
            template=local, ttl_s=NEVER_S, network=internet is not False, env=env, limits=limits
        )
        record = self._record(await self.backend.create(spec), shown, body)
        record.internet, record.network = internet, network
        return record

    def _record(self, sandbox: Any, shown: str, body: dict[str, Any]) -> Record:
        public = (body.get("network") or {}).get("allowPublicTraffic", True)
        record = Record(
            id=sandbox.id,
            template=shown,
            sandbox=sandbox,
            metadata=dict(body.get("metadata") or {}),
            env=dict(body.get("envVars") or {}),
            auto_pause=body.get("autoPause", True),
            auto_resume=(body.get("autoResume") or {}).get("enabled", False),
            internet=None,
            network={},
            ttl_s=body.get("timeout", 15),
            envd_token=secrets.token_hex(16) if body.get("secure") else None,
            traffic_token=None if public else secrets.token_hex(16),
        )
        record.ends_at = time.time() + record.ttl_s
        record.ready_at = time.time() + self.first_call_delay_s
        self.records[record.id] = record
        return record

    def _sandbox(self, record: Record) -> dict[str, Any]:
        said = {
            "templateID": record.template,
            "sandboxID": record.id,
            "clientID": "",
            "envdVersion": ENVD_VERSION,
            "trafficAccessToken": record.traffic_token,
            "domain": None,
        }
        return said | ({"envdAccessToken": record.envd_token} if record.envd_token else {})

    def _listed(self, record: Record) -> dict[str, Any]:
        return {
            "templateID": record.template,
            "sandboxID": record.id,
            "clientID": "",
            "startedAt": rfc3339(record.started_at),
            "endAt": rfc3339(record.ends_at),
            "cpuCount": 1,
            "memoryMB": 256,
            "diskSizeMB": 64,
            "state": record.shown,
            "envdVersion": ENVD_VERSION,
            "metadata": record.metadata,
        }

    def _matching(self, request: Request) -> list[Record]:
        wanted = dict(parse_qsl(request.query_params.get("metadata", ""))).items()
        found = [r for r in self.records.values() if r.state != "Killing" and wanted <= r.metadata.items()]
        return sorted(found, key=lambda r: (r.started_at, r.id))

    async def list_v1(self, request: Request, body: Any) -> Response:
        return JSONResponse([self._listed(r) for r in self._matching(request) if r.shown == "running"])

    async def list_v2(self, request: Request, body: Any) -> Response:
        records = self._matching(request)
        states = [s for value in request.query_params.getlist("state") for s in value.split(",")]
        if len(states) == 1:
            records = [r for r in records if r.shown == states[0]]
        return self._page(request, records, lambda r: (rfc3339(r.started_at), r.id), self._listed)

    @staticmethod
    def _page(request: Request, rows: list[Any], key: Callable, show: Callable) -> Response:
        try:
            limit = int(request.query_params.get("limit", 100))
            token = request.query_params.get("nextToken", "")
            after = tuple(base64.urlsafe_b64decode(token).decode().split("__", 1)) if token else ()
        except ValueError:
            raise Problem(400, "bad paging parameter") from None
        if not 1 <= limit <= 100:
            raise Problem(400, "limit out of range")
        rows = [r for r in rows if key(r) > after]
        headers = {}
        if len(rows) > limit:
            cursor = "__".join(key(rows[limit - 1]))
            headers["x-next-token"] = base64.urlsafe_b64encode(cursor.encode()).decode()
        return JSONResponse([show(r) for r in rows[:limit]], headers=headers)

    async def get(self, request: Request, body: Any, sandbox_id: str) -> Response:
        record = self._find(sandbox_id)
        said = self._listed(record) | {
            "domain": None,
            "allowInternetAccess": record.internet,
            "lifecycle": {
                "autoResume": record.auto_resume,
                "onTimeout": "pause" if record.auto_pause else "kill",
            },
        }
        return JSONResponse(said | ({"envdAccessToken": record.envd_token} if record.envd_token else {}))

    async def delete(self, request: Request, body: Any, sandbox_id: str) -> Response:
        await self._destroy(self._find(sandbox_id))
        return Response(status_code=204)

    async def pause(self, request: Request, body: Any, sandbox_id: str) -> Response:
        record = self._find(sandbox_id)
        if record.state == "Pausing":
            await self._settled(record)
        elif record.state == "Running":
            await record.sandbox.pause()
            record.state = "Paused"
        elif record.state != "Paused":
            raise Problem(409, f"sandbox is {record.state}")
        return Response(status_code=204)

    async def resume(self, request: Request, body: Any, sandbox_id: str) -> Response:
        record = self._find(sandbox_id)
        if record.state == "Resuming":
            await self._settled(record)
        elif record.state == "Paused":
            await self._wake(record)
        elif record.state != "Running":
            raise Problem(409, f"sandbox is {record.state}")
        record.ends_at = time.time() + (body or {}).get("timeout", 15)
        return JSONResponse(self._sandbox(record), 201)

    async def _wake(self, record: Record) -> None:
        await record.sandbox.resume(ttl_s=NEVER_S)
        record.state = "Running"
        record.ready_at = time.time() + self.first_call_delay_s

    async def connect(self, request: Request, body: Any, sandbox_id: str) -> Response:
        if not isinstance(body, dict) or "timeout" not in body:
            raise Problem(400, "timeout is required")
        record = self._find(sandbox_id)
        if record.state == "Pausing":
            raise Problem(400, "sandbox is pausing")
        if record.state not in ("Running", "Paused"):
            await self._settled(record)
        if record.state == "Paused":
            await self._wake(record)
            record.ends_at = time.time() + body["timeout"]
            return JSONResponse(self._sandbox(record), 201)
        record.ends_at = max(record.ends_at, time.time() + body["timeout"])
        return JSONResponse(self._sandbox(record), 200)

    async def _time_call(self, sandbox_id: str) -> Record:
        record = self.records.get(sandbox_id)
        if record is None:
            raise Problem(404, f"sandbox {sandbox_id} not found")
        if record.state in ("Creating", "Resuming", "Snapshotting", "Forking"):
            await self._settled(record)
        if record.state != "Running":
            raise Problem(500, f"sandbox is {record.state}", body_code=400)
        return record

    async def timeout(self, request: Request, body: Any, sandbox_id: str) -> Response:
        record = await self._time_call(sandbox_id)
        record.ends_at = time.time() + body["timeout"]
        return Response(status_code=204)

    async def refreshes(self, request: Request, body: Any, sandbox_id: str) -> Response:
        record = await self._time_call(sandbox_id)
        record.ends_at = max(record.ends_at, time.time() + body.get("duration", 0))
        return Response(status_code=204)

    async def fork(self, request: Request, body: Any, sandbox_id: str) -> Response:
        record = self._find(sandbox_id)
        count = (body or {}).get("count", 1)
        if not 1 <= count <= 100:
            raise Problem(400, "count out of range")
        if record.state in ("Paused", "Pausing"):
            raise Problem(404, "sandbox has no live handle")
        if record.state != "Running":
            raise Problem(409, f"sandbox is {record.state}")
        children = await record.sandbox.fork(count)
        results = []
        for index, child in enumerate(children):
            if index == self.fail_fork_child:
                await child.kill()
                results.append({"error": {"code": 500, "message": "no room"}})
                continue
            made = self._record(
                child,
                record.template,
                {
                    "metadata": record.metadata,
                    "envVars": record.env,
                    "autoPause": record.auto_pause,
                    "autoResume": {"enabled": record.auto_resume},
                    "timeout": (body or {}).get("timeout", record.ttl_s),
                    "secure": record.envd_token is not None,
                    "network": {"allowPublicTraffic": record.traffic_token is None},
                },
            )
            results.append({"sandbox": self._sandbox(made)})
        return JSONResponse(results, 201)

    async def snapshot(self, request: Request, body: Any, sandbox_id: str) -> Response:
        record = self._find(sandbox_id)
        if record.state != "Running":
            raise Problem(400, f"sandbox is {record.state}")
        made = await record.sandbox.snapshot()
        names = [body["name"]] if body and body.get("name") else []
        now = rfc3339(time.time())
        snapshot_id = str(uuid.uuid4())
        self.snapshots[snapshot_id] = {
            "snapshotID": snapshot_id,
            "names": names,
            "cpuCount": 1,
            "memoryMB": 256,
            "diskSizeMB": 64,
            "createdAt": now,
            "updatedAt": now,
            "local": made.id,
            "source": sandbox_id,
        }
        return JSONResponse(self._shown_snapshot(self.snapshots[snapshot_id]), 201)

    @staticmethod
    def _shown_snapshot(snapshot: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in snapshot.items() if k not in ("local", "source")}

    async def list_snapshots(self, request: Request, body: Any) -> Response:
        query = request.query_params
        found = [
            s
            for s in self.snapshots.values()
            if query.get("name", "") in ("", *s["names"]) and query.get("sandboxID", "") in ("", s["source"])
        ]
        found.sort(key=lambda s: (s["createdAt"], s["snapshotID"]))
        return self._page(request, found, lambda s: (s["createdAt"], s["snapshotID"]), self._shown_snapshot)

    async def get_snapshot(self, request: Request, body: Any, name: str) -> Response:
        for snapshot_id, snapshot in self.snapshots.items():
            if name == snapshot_id or name in snapshot["names"]:
                return JSONResponse(self._shown_snapshot(snapshot))
        raise Problem(404, "no such snapshot")

    async def delete_template(self, request: Request, body: Any, name: str) -> Response:
        for snapshot_id, snapshot in list(self.snapshots.items()):
            if name == snapshot_id or name in snapshot["names"]:
                await self.backend.delete_snapshot(snapshot["local"])
                del self.snapshots[snapshot_id]
        return Response(status_code=204)

    # ------------------------------------------------------------ data plane

    async def data_plane(self, request: Request) -> Response:
        headers = request.headers
        sandbox_id = headers.get("x-agentenv-sandbox-id") or headers.get("e2b-sandbox-id", "")
        port = headers.get("x-agentenv-target-port") or headers.get("e2b-sandbox-port", "")
        record = self.records.get(sandbox_id)
        if not port.isdigit():
            return PlainTextResponse("bad target port", 400)
        if record is None:
            return PlainTextResponse("sandbox not found", 404)
        if record.state != "Running":
            if not record.auto_resume:
                return PlainTextResponse("sandbox is paused", 410)
            await self._wake(record)
            record.ends_at = time.time() + max(record.ttl_s, 300)
        if record.traffic_token and headers.get("e2b-traffic-access-token") != record.traffic_token:
            return PlainTextResponse("traffic token required", 403)
        if port != ENVD_PORT or time.time() < record.ready_at:
            return PlainTextResponse("nothing listens there", 502)
        return await self.envd(record, request)

    async def envd(self, record: Record, request: Request) -> Response:
        path = request.url.path.removeprefix("/proxy")
        if path == "/health":
            return Response(status_code=204)
        if record.envd_token and request.headers.get("x-access-token") != record.envd_token:
            return JSONResponse({"code": 401, "message": "unauthorized access"}, 401)
        if path == "/files":
            return await self._files(record, request)
        if path == "/envs":
            return JSONResponse(record.env)
        _, service, method = path.split("/", 2)
        if request.headers.get("connect-protocol-version") != "1":
            return PlainTextResponse("connect-protocol-version", 400)
        if f"{service}/{method}" in ("process.Process/Start", "process.Process/Connect"):
            return await self._stream(record, request, method)
        if request.headers["content-type"] != "application/json":
            return PlainTextResponse("unsupported media type", 415)
        body = json.loads(await request.body() or b"{}")
        handler = getattr(self, f"_{service.rsplit('.', 1)[1].lower()}_{method.lower()}", None)
        if handler is None:
            return connect_problem("unimplemented", method, 404)
        try:
            return JSONResponse(await handler(record, body))
        except FileMissing as error:
            return connect_problem("not_found", str(error), 404)
        except InvalidRequest as error:
            return connect_problem("invalid_argument", str(error))
        except SandboxError as error:
            return connect_problem("internal", str(error), 500)

    # ------------------------------------------------------------ processes

    async def _stream(self, record: Record, request: Request, method: str) -> Response:
        if request.headers["content-type"] != "application/connect+json":
            return PlainTextResponse("unsupported media type", 415)
        raw = await request.body()
        flags, size = struct.unpack("!BI", raw[:5])
        assert flags == 0
        assert len(raw) == 5 + size
        body = json.loads(raw[5:])
        ping_s = float(request.headers.get("keepalive-ping-interval", 90))
        limit_ms = request.headers.get("connect-timeout-ms")
        limit_s = int(limit_ms) / 1000 if limit_ms else None
        if method == "Start":
            begun = self._start(record, body)
        else:
            begun = self._attach(record, body)
        try:
            running = await begun
        except SandboxError as error:
            code = "invalid_argument" if isinstance(error, InvalidRequest) else "internal"
            frames = connect_frame({"error": {"code": code, "message": str(error)}}, 2)
            return Response(frames, media_type="application/connect+json")
        return StreamingResponse(
            self._follow(running, ping_s, limit_s), media_type="application/connect+json"
        )

    async def _attach(self, record: Record, body: dict[str, Any]) -> Running:
        return self._selected(record, body)

    async def _start(self, record: Record, body: dict[str, Any]) -> Running:
        config = body["process"]
        command = [config["cmd"], *config.get("args", ())]
        starting = record.sandbox.start(
            command,
            timeout_s=NEVER_S,
            env=config.get("envs"),
            cwd=config.get("cwd"),
            stdin=body.get("stdin", True),
        )
        process = await starting.__aenter__()
        running = Running(config, process, body.get("tag"))
        running.events.append({"start": {"pid": process.pid}})
        record.processes[process.pid] = running
        running.task = asyncio.ensure_future(self._pump(record, running, starting))
        return running

    async def _pump(self, record: Record, running: Running, starting: Any) -> None:
        async def say(event: dict[str, Any]) -> None:
            async with running.changed:
                running.events.append(event)
                running.changed.notify_all()

        try:
            async for chunk in running.process:
                assert isinstance(chunk, Chunk)
                await say({"data": {chunk.stream: base64.b64encode(chunk.data).decode()}})
            await say({"end": self._end_event(running.process.exit.exit_code)})
        except SandboxError:
            await say({})
        finally:
            running.ended = True
            record.processes.pop(running.process.pid, None)
            async with running.changed:
                running.changed.notify_all()
            await starting.__aexit__(None, None, None)

    @staticmethod
    def _end_event(code: int) -> dict[str, Any]:
        """As proto3's JSON has it: zero and false are left out; Go tells death by signal in the status."""
        names = {137: "killed", 143: "terminated", 139: "segmentation fault", 134: "aborted"}
        if code in names:
            return {"exitCode": -1, "status": f"signal: {names[code]}"}
        return ({"exitCode": code} if code else {}) | {"exited": True, "status": f"exit status {code}"}

    @staticmethod
    async def _follow(running: Running, ping_s: float, limit_s: float | None) -> AsyncIterator[bytes]:
        seen, began = 0, time.monotonic()
        while True:
            while seen < len(running.events):
                event = running.events[seen]
                seen += 1
                if event:
                    yield connect_frame({"event": event})
                if "end" in event:
                    yield connect_frame({}, 2)
                    return
            if running.ended:
                return  # the machine has gone: its stream breaks off without an end event
            async with running.changed:
                with contextlib.suppress(TimeoutError):
                    if seen == len(running.events) and not running.ended:
                        await asyncio.wait_for(running.changed.wait(), min(ping_s, limit_s or ping_s))
            if seen == len(running.events) and not running.ended:
                yield connect_frame({"event": {"keepalive": {}}})
            if limit_s is not None and time.monotonic() - began > limit_s:
                await running.process.signal(9)
                yield connect_frame({"error": {"code": "deadline_exceeded", "message": "deadline"}}, 2)
                return

    @staticmethod
    def _selected(record: Record, body: dict[str, Any]) -> Running:
        selector = body.get("process", {})
        for pid, running in record.processes.items():
            if selector.get("pid") == pid or (selector.get("tag") and selector["tag"] == running.tag):
                return running
        raise FileMissing(f"no process {selector}")

    async def _process_list(self, record: Record, body: Any) -> Any:
        return {"processes": [{"config": r.config, "pid": p} for p, r in record.processes.items()]}

    async def _process_sendinput(self, record: Record, body: Any) -> Any:
        await self._selected(record, body).process.write_stdin(base64.b64decode(body["input"]["stdin"]))
        return {}

    async def _process_closestdin(self, record: Record, body: Any) -> Any:
        await self._selected(record, body).process.close_stdin()
        return {}

    async def _process_sendsignal(self, record: Record, body: Any) -> Any:
        signals = {"SIGNAL_SIGTERM": 15, "SIGNAL_SIGKILL": 9}
        await self._selected(record, body).process.signal(signals[body["signal"]])
        return {}

    # ------------------------------------------------------------ files

    async def _files(self, record: Record, request: Request) -> Response:
        path = request.query_params.get("path", "")
        try:
            if request.method == "GET":
                return Response(await record.sandbox.read_file(path), media_type="application/octet-stream")
            form = await request.form()
            written = []
            for upload in form.getlist("file"):
                target = path or upload.filename
                await record.sandbox.write_file(target, await upload.read())
                written.append({"path": target, "name": target.rsplit("/", 1)[-1], "type": "file"})
            return PlainTextResponse(json.dumps(written))  # this daemon labels its JSON as text
        except FileMissing as error:
            return JSONResponse({"code": 404, "message": str(error)}, 404)
        except OutOfSpace as error:
            return JSONResponse({"code": 507, "message": str(error)}, 507)
        except (InvalidRequest, SandboxNotFound) as error:
            return JSONResponse({"code": 400, "message": str(error)}, 400)

    @staticmethod
    def _entry(info: FileInfo) -> dict[str, Any]:
        kinds = {"file": "FILE_TYPE_FILE", "directory": "FILE_TYPE_DIRECTORY", "symlink": "FILE_TYPE_SYMLINK"}
        said = {
            "name": info.name,
            "path": info.path,
            "type": kinds.get(info.type.value, "FILE_TYPE_UNSPECIFIED"),
            "mode": info.mode,
            "permissions": "-rw-r--r--",
            "owner": "user",
            "group": "user",
            "modifiedTime": rfc3339(info.modified_at),
        }
        said |= {"size": str(info.size_bytes)} if info.size_bytes else {}
        return said | ({"symlinkTarget": info.target} if info.target else {})

    async def _filesystem_stat(self, record: Record, body: Any) -> Any:
        return {"entry": self._entry(await record.sandbox.stat(body["path"]))}

    async def _filesystem_listdir(self, record: Record, body: Any) -> Any:
        found = await record.sandbox.list_files(body["path"], depth=body.get("depth", 1) or 1)
        return {"entries": [self._entry(e) for e in found]} if found else {}

    async def _filesystem_makedir(self, record: Record, body: Any) -> Any:
        try:
            await record.sandbox.stat(body["path"])
        except FileMissing:
            await record.sandbox.make_dir(body["path"])
            return {"entry": self._entry(await record.sandbox.stat(body["path"]))}
        raise InvalidRequest("already exists")

    async def _filesystem_move(self, record: Record, body: Any) -> Any:
        await record.sandbox.move(body["source"], body["destination"])
        return {"entry": self._entry(await record.sandbox.stat(body["destination"]))}

    async def _filesystem_remove(self, record: Record, body: Any) -> Any:
        with contextlib.suppress(FileMissing):
            await record.sandbox.remove(body["path"])
        return {}
