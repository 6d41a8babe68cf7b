"""The control plane of the AgentENV server for tests: the state table, paging, forks and snapshots (spec/07 §2-4)."""

from __future__ import annotations

import asyncio
import base64
import re
import secrets
import time
import uuid
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl

from agentenv_state import (
    ENVD_VERSION,
    NEVER_S,
    Problem,
    Record,
    rfc3339,
)
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sandbox_client import Limits, LocalBackend, SandboxSpec
from sandbox_client.types import MIB


class ControlPlane:
    """Needs the server's ``backend`` of real sandboxes."""

    backend: LocalBackend
    first_call_delay_s: float
    _server: Any

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.snapshots: dict[str, dict[str, Any]] = {}
        self.fail_fork_child: int | None = None

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
