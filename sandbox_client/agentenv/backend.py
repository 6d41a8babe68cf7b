"""Sandboxes of an AgentENV server: microVMs that pause with their memory, fork and snapshot (spec/07)."""

from __future__ import annotations

import asyncio
import builtins
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

import httpx

from sandbox_client.agentenv.config import AgentEnvConfig
from sandbox_client.agentenv.envd import Envd
from sandbox_client.agentenv.http import NeverSent, json_of, patiently, send
from sandbox_client.agentenv.records import (
    CREATE_KEY,
    checked,
    create_request,
    sandbox_info,
    snapshot_info,
    whole_seconds,
)
from sandbox_client.agentenv.sandbox import AgentEnvSandbox
from sandbox_client.errors import (
    InvalidRequest,
    SandboxError,
    SandboxNotFound,
    SandboxTimeout,
    ServerFault,
    Unavailable,
)
from sandbox_client.types import (
    Capabilities,
    SandboxInfo,
    SandboxSpec,
    SnapshotInfo,
    State,
    check_spec,
)

_CLEAN_UP_S = 30.0


class AgentEnvBackend:
    """See `sandbox_client.types.Backend`. Sandboxes outlive this object until their time to live ends.

    ``template`` of a spec is a template or snapshot (id or alias), or ``image:<OCI reference>`` for a cold
    start from an image, which takes tens of seconds. ``limits`` count for cold starts only; a template brings
    its own.
    """

    name = "agentenv"
    capabilities = Capabilities(
        isolated=True,
        pause_keeps_memory=True,
        fork_keeps_memory=True,
        snapshot_keeps_memory=True,
        survives_client=True,
        network_rules=True,
        users=True,
        enforced_limits=frozenset({"memory", "cpu", "disk"}),
        notes=("limits come from the template; fork runs on the source's node",),
    )

    def __init__(self, config: AgentEnvConfig | None = None) -> None:
        self.config = config or AgentEnvConfig.from_environment()
        limits = httpx.Limits(max_connections=self.config.connections, max_keepalive_connections=32)
        timeout = httpx.Timeout(self.config.request_s, connect=self.config.connect_s)
        options: dict[str, Any] = {
            "limits": limits,
            "timeout": timeout,
            "follow_redirects": False,
            "trust_env": False,
        }
        key = {"X-API-Key": self.config.api_key} if self.config.api_key else {}
        self._control = httpx.AsyncClient(base_url=self.config.api_url, headers=key, **options)
        self.data = httpx.AsyncClient(
            **options
        )  # the key is no credential inside sandboxes and stays out of them
        self._clean_ups: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------ control plane

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        params: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> httpx.Response:
        """One call, once. Raises typed errors."""
        extra: dict[str, Any] = (
            {} if timeout_s is None else {"timeout": httpx.Timeout(timeout_s, connect=self.config.connect_s)}
        )
        request = self._control.build_request(method, path, json=body, params=params, **extra)
        return await send(self._control, request, f"{method} {path}")

    async def repeat(self, method: str, path: str, **options: Any) -> httpx.Response:
        """A call that may be repeated: through transitions, outages and lost answers."""
        return await patiently(lambda: self.request(method, path, **options), self.config.patience_s)

    async def create(self, spec: SandboxSpec | None = None) -> AgentEnvSandbox:
        """Never repeated blindly. If the answer is lost, the sandbox is looked up by its mark first."""
        spec = spec or SandboxSpec()
        try:
            check_spec(spec)
        except ValueError as error:
            raise InvalidRequest(str(error), code=400) from error
        mark = uuid.uuid4().hex
        spec = replace(spec, metadata={**spec.metadata, CREATE_KEY: mark})
        path, body, limit_s = create_request(spec, self.config)
        try:
            return await self._create_marked(spec, mark, path, body, limit_s)
        except asyncio.CancelledError:
            self.clean_up(self._kill_marked(mark))
            raise

    async def _create_marked(
        self, spec: SandboxSpec, mark: str, path: str, body: Any, limit_s: float
    ) -> AgentEnvSandbox:
        lost: SandboxError | None = None
        for _ in range(2):
            try:
                never_sent = lambda error: isinstance(error, NeverSent)  # noqa: E731
                call = lambda: self.request("POST", path, body=body, timeout_s=limit_s)  # noqa: E731
                response = await patiently(call, self.config.patience_s, never_sent)
                sandbox = self.handle(json_of(response, "create"), spec)
                if lost is not None:
                    self.clean_up(self._kill_marked(mark, keep=sandbox.id))
                return sandbox
            except NeverSent:
                raise
            except (SandboxTimeout, Unavailable, ServerFault) as error:
                lost = error
                found = await self._look_for(mark)
                if found:
                    for surplus in found[1:]:
                        self.clean_up(self.kill(surplus.id))
                    return await self._adopt(found[0].id, spec)
                if isinstance(error, ServerFault):  # the server said that it failed, and it left nothing
                    raise
        assert lost is not None
        self.clean_up(self._kill_marked(mark))
        raise lost

    async def _look_for(self, mark: str) -> builtins.list[SandboxInfo]:
        """The sandboxes of one create call, looked for during ``lookup_s``; the create may still be under
        way."""
        deadline = asyncio.get_running_loop().time() + self.config.lookup_s
        while True:
            try:
                found = await self.list({CREATE_KEY: mark})
            except SandboxError:  # the server is away: unknown
                found = []
            if found or asyncio.get_running_loop().time() > deadline:
                return found
            await asyncio.sleep(0.25)

    async def _kill_marked(self, mark: str, keep: str = "") -> None:
        for info in await self._look_for(mark):
            if info.id != keep:
                await self.kill(info.id)

    async def kill(self, sandbox_id: str) -> None:
        try:
            await self.repeat("DELETE", f"/sandboxes/{checked(sandbox_id)}")
        except SandboxNotFound:
            return

    async def _adopt(self, sandbox_id: str, spec: SandboxSpec) -> AgentEnvSandbox:
        body = {"timeout": whole_seconds(spec.ttl_s)}
        response = await self._connect_call(sandbox_id, body)
        return self.handle(json_of(response, "connect"), spec)

    async def _connect_call(self, sandbox_id: str, body: Any) -> httpx.Response:
        """400 here means that the sandbox is pausing (spec/07 §4)."""

        def again(error: SandboxError) -> bool:
            return error.retryable or isinstance(error, SandboxTimeout | InvalidRequest)

        call = lambda: self.request("POST", f"/sandboxes/{checked(sandbox_id)}/connect", body=body)  # noqa: E731
        return await patiently(call, self.config.patience_s, again)

    def handle(self, said: Any, spec: SandboxSpec) -> AgentEnvSandbox:
        try:
            sandbox_id = str(said["sandboxID"])
        except (KeyError, TypeError) as error:
            raise ServerFault(f"create: an answer without sandboxID: {str(said)[:200]}") from error
        tokens = {"envd": said.get("envdAccessToken"), "traffic": said.get("trafficAccessToken")}
        envd = Envd(self.data, self.config, sandbox_id, {k: v for k, v in tokens.items() if v})
        return AgentEnvSandbox(self, envd, sandbox_id, spec)

    async def connect(self, sandbox_id: str) -> AgentEnvSandbox:
        """By its details, which leave state and deadline as they are. A traffic token is not repeated
        there."""
        said = await self.detail(sandbox_id)
        info = sandbox_info(said)
        on_timeout = (said.get("lifecycle") or {}).get("onTimeout", "pause")
        ttl_s = max(info.ends_at - info.started_at, 60.0)
        spec = SandboxSpec(
            template=info.template,
            ttl_s=min(ttl_s, 3600.0),
            auto_pause=on_timeout == "pause",
            auto_resume=bool((said.get("lifecycle") or {}).get("autoResume", False)),
            metadata=info.metadata,
        )
        return self.handle(said, spec)

    async def detail(self, sandbox_id: str) -> dict[str, Any]:
        response = await self.repeat("GET", f"/sandboxes/{checked(sandbox_id)}")
        return json_of(response, "sandbox")

    async def list(
        self, metadata: Mapping[str, str] | None = None, state: State | None = None
    ) -> builtins.list[SandboxInfo]:
        """All pages of the v2 listing; v1 hides paused sandboxes. Only one state can be filtered for."""
        params = {"limit": "100"}
        if metadata:
            params["metadata"] = urlencode(dict(metadata))
        if state is not None:
            params["state"] = str(state)
        return [sandbox_info(said) async for said in self._pages("/v2/sandboxes", params)]

    async def _pages(self, path: str, params: dict[str, str]) -> AsyncIterator[dict[str, Any]]:
        seen: set[str] = set()
        while True:
            response = await self.repeat("GET", path, params=params)
            for said in json_of(response, path):
                yield said
            token = response.headers.get("x-next-token", "")
            if not token:
                return
            if token in seen:
                raise ServerFault(f"GET {path}: the same page token twice")
            seen.add(token)
            params = {**params, "nextToken": token}

    async def list_snapshots(self, name: str | None = None) -> builtins.list[SnapshotInfo]:
        params = {"limit": "100"} | ({"name": name} if name else {})
        return [snapshot_info(said) async for said in self._pages("/snapshots", params)]

    async def delete_snapshot(self, snapshot_id: str) -> None:
        try:
            await self.repeat("DELETE", f"/templates/{checked(snapshot_id)}")
        except SandboxNotFound:
            return

    # ------------------------------------------------------------ clean-up

    def clean_up(self, work: Coroutine[Any, Any, None]) -> None:
        """Let something end in the background, within a limit; `close` waits for it."""

        async def bounded() -> None:
            try:
                await asyncio.wait_for(work, _CLEAN_UP_S)
            except (SandboxError, TimeoutError):
                return  # its time to live, or the sweep by metadata, gets it

        task = asyncio.ensure_future(bounded())
        self._clean_ups.add(task)
        task.add_done_callback(self._clean_ups.discard)

    async def close(self) -> None:
        if self._clean_ups:
            await asyncio.wait(set(self._clean_ups), timeout=_CLEAN_UP_S)
        await self._control.aclose()
        await self.data.aclose()

    async def __aenter__(self) -> AgentEnvBackend:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
