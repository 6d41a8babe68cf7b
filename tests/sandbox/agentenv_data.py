"""The data plane of the AgentENV server for tests: ports by headers, the daemon's streams and files (spec/07 §5-6)."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import struct
import time
from collections.abc import AsyncIterator
from typing import Any

from agentenv_control import ControlPlane
from agentenv_state import (
    ENVD_PORT,
    NEVER_S,
    Record,
    Running,
    connect_frame,
    connect_problem,
    rfc3339,
)
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from sandbox_client.errors import FileMissing, InvalidRequest, OutOfSpace, SandboxError, SandboxNotFound
from sandbox_client.types import Chunk, FileInfo


class DataPlane(ControlPlane):
    """The daemon of each sandbox."""

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
