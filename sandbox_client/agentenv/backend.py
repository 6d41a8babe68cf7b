"""Sandboxes of an AgentENV server: microVMs that pause with their memory, fork and snapshot (spec/07)."""

from __future__ import annotations

import asyncio
import builtins
import math
import posixpath
import re
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

import httpx

from sandbox_client.agentenv.config import AgentEnvConfig
from sandbox_client.agentenv.envd import Envd, EnvdProcess, file_info
from sandbox_client.agentenv.http import NeverSent, json_of, patiently, send
from sandbox_client.errors import (
    Conflict,
    FileMissing,
    InvalidRequest,
    SandboxError,
    SandboxNotFound,
    SandboxPaused,
    SandboxTimeout,
    ServerFault,
    Unavailable,
    Unsupported,
)
from sandbox_client.output import run_to_end
from sandbox_client.types import (
    MIB,
    Capabilities,
    Chunk,
    Command,
    ExecResult,
    FileInfo,
    SandboxInfo,
    SandboxSpec,
    SnapshotInfo,
    State,
    check_spec,
    shell_argv,
)

FORK_BATCH = 16
CREATE_KEY = "k3rl-create"
"""Metadata key whose value marks one create call: how a sandbox is found again whose answer never came."""
IMAGE = "image:"
_CLEAN_UP_S = 30.0
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


def _path(*parts: str) -> str:
    """Ids become parts of an address, so nothing that could change the address may be in them."""
    for part in parts:
        if not _ID.fullmatch(part):
            raise SandboxNotFound(f"malformed id '{part[:80]}'", code=404)
    return "/".join(parts)


def _ttl(seconds: float) -> int:
    return max(1, math.ceil(seconds))


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
        extra = (
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
        path, body, limit_s = _create_request(spec, self.config)
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
                sandbox = self._handle(json_of(response, "create"), spec)
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
                        self.clean_up(self._kill(surplus.id))
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
                await self._kill(info.id)

    async def _kill(self, sandbox_id: str) -> None:
        try:
            await self.repeat("DELETE", f"/sandboxes/{_path(sandbox_id)}")
        except SandboxNotFound:
            return

    async def _adopt(self, sandbox_id: str, spec: SandboxSpec) -> AgentEnvSandbox:
        body = {"timeout": _ttl(spec.ttl_s)}
        response = await self._connect_call(sandbox_id, body)
        return self._handle(json_of(response, "connect"), spec)

    async def _connect_call(self, sandbox_id: str, body: Any) -> httpx.Response:
        """400 here means that the sandbox is pausing (spec/07 §4)."""

        def again(error: SandboxError) -> bool:
            return error.retryable or isinstance(error, SandboxTimeout | InvalidRequest)

        call = lambda: self.request("POST", f"/sandboxes/{_path(sandbox_id)}/connect", body=body)  # noqa: E731
        return await patiently(call, self.config.patience_s, again)

    def _handle(self, said: Any, spec: SandboxSpec) -> AgentEnvSandbox:
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
        info = _info(said)
        on_timeout = (said.get("lifecycle") or {}).get("onTimeout", "pause")
        ttl_s = max(info.ends_at - info.started_at, 60.0)
        spec = SandboxSpec(
            template=info.template,
            ttl_s=min(ttl_s, 3600.0),
            auto_pause=on_timeout == "pause",
            auto_resume=bool((said.get("lifecycle") or {}).get("autoResume", False)),
            metadata=info.metadata,
        )
        return self._handle(said, spec)

    async def detail(self, sandbox_id: str) -> dict[str, Any]:
        response = await self.repeat("GET", f"/sandboxes/{_path(sandbox_id)}")
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
        return [_info(said) async for said in self._pages("/v2/sandboxes", params)]

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
        return [_snapshot_info(said) async for said in self._pages("/snapshots", params)]

    async def delete_snapshot(self, snapshot_id: str) -> None:
        try:
            await self.repeat("DELETE", f"/templates/{_path(snapshot_id)}")
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


class AgentEnvSandbox:
    """See `sandbox_client.types.Sandbox`."""

    def __init__(self, backend: AgentEnvBackend, envd: Envd, sandbox_id: str, spec: SandboxSpec) -> None:
        self.id, self.metadata = sandbox_id, {k: v for k, v in spec.metadata.items() if k != CREATE_KEY}
        self._backend, self._envd, self._spec = backend, envd, spec
        self._forking = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<AgentEnvSandbox {self.id}>"

    def _at(self, call: str = "") -> str:
        return f"/sandboxes/{_path(self.id)}{call}"

    # ------------------------------------------------------------ commands

    @asynccontextmanager
    async def start(
        self,
        command: Command,
        *,
        timeout_s: float = 60.0,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bool = False,
    ) -> AsyncIterator[EnvdProcess]:
        argv = shell_argv(command)
        who = user or self._backend.config.user
        async with self._data_plane():
            starting = self._envd.start(
                argv, env=env or {}, cwd=cwd, user=who, stdin=stdin, timeout_s=timeout_s
            )
            try:
                process = await starting.__aenter__()
            except FileMissing as error:
                raise InvalidRequest(f"cannot start {argv[0]!r}: {error}", code=400) from error
        try:
            yield process
        except BaseException as error:
            if not await starting.__aexit__(type(error), error, error.__traceback__):
                raise
        else:
            await starting.__aexit__(None, None, None)

    async def exec(
        self,
        command: Command,
        *,
        timeout_s: float = 60.0,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bytes | None = None,
        on_output: Callable[[Chunk], None] | None = None,
        output_limit_bytes: int = MIB,
    ) -> ExecResult:
        starting = self.start(
            command, timeout_s=timeout_s, env=env, cwd=cwd, user=user, stdin=stdin is not None
        )
        return await run_to_end(
            starting, stdin=stdin, on_output=on_output, output_limit_bytes=output_limit_bytes
        )

    # ------------------------------------------------------------ files

    async def read_file(self, path: str, *, limit_bytes: int = 64 * MIB) -> bytes:
        async with self._data_plane():
            return await self._envd.read(path, self._user, limit_bytes)

    async def write_file(self, path: str, data: bytes | str, *, mode: int | None = None) -> None:
        async with self._data_plane():
            await self._envd.write(path, data.encode() if isinstance(data, str) else data, self._user)
        if mode is not None:
            done = await self.exec(["/bin/chmod", f"{mode:o}", path])
            if not done.ok:
                raise InvalidRequest(f"sandbox {self.id}: chmod {path}: {done.stderr.strip()}")

    async def list_files(self, path: str, *, depth: int = 1) -> list[FileInfo]:
        said = await self._files("ListDir", path=path, depth=depth)
        return [file_info(entry) for entry in said.get("entries", ())]

    async def stat(self, path: str) -> FileInfo:
        return file_info((await self._files("Stat", path=path)).get("entry", {}))

    async def move(self, source: str, destination: str) -> None:
        if parent := posixpath.dirname(destination):
            await self.make_dir(parent)
        await self._files("Move", source=source, destination=destination)

    async def remove(self, path: str) -> None:
        await self.stat(path)  # the daemon is silent about what isn't there
        await self._files("Remove", path=path)

    async def make_dir(self, path: str) -> None:
        try:
            await self._files("MakeDir", path=path)
        except InvalidRequest:
            if (await self.stat(path)).type.value != "directory":
                raise

    @property
    def _user(self) -> str:
        return self._backend.config.user

    async def _files(self, method: str, **fields: Any) -> Any:
        async with self._data_plane():
            return await self._envd.file_call(method, fields, self._user)

    @asynccontextmanager
    async def _data_plane(self) -> AsyncIterator[None]:
        """A 404 from the way there means a lost sandbox, one from the daemon a lost file: ask the control
        plane."""
        try:
            await self._envd.ready()
            yield
        except (SandboxNotFound, FileMissing) as error:
            if error.code == 404:
                await self.info()  # raises if the sandbox is the one that is missing
            if isinstance(error, SandboxNotFound):
                raise FileMissing(str(error), code=404) from error
            raise

    # ------------------------------------------------------------ life

    async def pause(self) -> None:
        await self._backend.repeat("POST", self._at("/pause"))

    async def resume(self, *, ttl_s: float | None = None) -> None:
        body = {"timeout": _ttl(self._spec.ttl_s if ttl_s is None else ttl_s)}
        said = json_of(await self._backend.repeat("POST", self._at("/resume"), body=body), "resume")
        if token := said.get("envdAccessToken"):
            self._envd.tokens["envd"] = token
        self._envd.expect_delay()

    async def extend(self, ttl_s: float) -> None:
        """A paused sandbox answers 500 with code 400 here."""
        try:
            await self._backend.repeat("POST", self._at("/timeout"), body={"timeout": _ttl(ttl_s)})
        except InvalidRequest as error:
            raise await self._or_paused(error) from error

    async def relabel(self, metadata: Mapping[str, str]) -> None:
        raise Unsupported(f"sandbox {self.id}: AgentENV's API sets metadata at creation only")

    async def info(self) -> SandboxInfo:
        return _info(await self._backend.detail(self.id))

    async def kill(self) -> None:
        try:
            await self._backend.repeat("DELETE", self._at())
        except SandboxNotFound:
            return

    async def snapshot(self, name: str | None = None) -> SnapshotInfo:
        """Refused with 400 in any state but running, also in passing ones; then nothing has happened."""
        name = name or f"k3rl-{uuid.uuid4().hex}"
        try:
            call = lambda: self._once("/snapshots", {"name": name})  # noqa: E731
            response = await patiently(call, self._backend.config.patience_s, _not_yet)
        except (SandboxTimeout, Unavailable) as error:
            if isinstance(error, NeverSent):
                raise
            return await self._find_snapshot(name, error)
        return _snapshot_info(json_of(response, "snapshot"))

    async def _find_snapshot(self, name: str, error: SandboxError) -> SnapshotInfo:
        """The server goes on when its client is gone: look for what it made."""
        deadline = asyncio.get_running_loop().time() + self._backend.config.patience_s
        while asyncio.get_running_loop().time() < deadline:
            if found := await self._backend.list_snapshots(name):
                return found[-1]
            await asyncio.sleep(0.5)
        raise error

    async def fork(self, count: int = 1) -> list[AgentEnvSandbox]:
        if count < 1:
            raise InvalidRequest(f"fork: count must be at least 1, got {count}", code=400)
        children: list[AgentEnvSandbox] = []
        async with self._forking:
            marked = CREATE_KEY in self._spec.metadata
            before = {info.id for info in await self._backend.list(self._spec.metadata)} if marked else set()
            try:
                for start in range(0, count, FORK_BATCH):
                    children += await self._fork_batch(min(FORK_BATCH, count - start))
            except BaseException as error:
                for child in children:
                    self._backend.clean_up(child.kill())
                lost = isinstance(error, asyncio.CancelledError | SandboxTimeout | Unavailable)
                if lost and marked:
                    self._backend.clean_up(self._kill_lost_children(before | {c.id for c in children}))
                raise
        return children

    async def _fork_batch(self, count: int) -> list[AgentEnvSandbox]:
        call = lambda: self._once("/fork", {"count": count, "timeout": _ttl(self._spec.ttl_s)})  # noqa: E731
        response = await patiently(call, self._backend.config.patience_s, _not_yet)
        results = json_of(response, "fork")
        made = [self._backend._handle(r["sandbox"], self._spec) for r in results if r.get("sandbox")]
        if len(made) < count:
            for child in made:
                self._backend.clean_up(child.kill())
            why = next((r["error"] for r in results if r.get("error")), {"message": "children missing"})
            raise ServerFault(
                f"sandbox {self.id}: fork: {str(why.get('message'))[:300]}", code=int(why.get("code", 0))
            )
        return made

    async def _kill_lost_children(self, known: set[str]) -> None:
        """After a fork whose answer never came: what is new among the bearers of our mark."""
        await asyncio.sleep(self._backend.config.lookup_s)
        for info in await self._backend.list(self._spec.metadata):
            if info.id not in known and info.id != self.id:
                await self._backend._kill(info.id)

    async def _once(self, call: str, body: Any) -> httpx.Response:
        """For calls that must not be repeated after an unclear end. A refusal for the state's sake is clear,
        and becomes `Conflict` or `SandboxPaused`."""
        try:
            return await self._backend.request("POST", self._at(call), body=body)
        except (InvalidRequest, SandboxNotFound) as error:
            raise await self._or_paused(error) from error

    async def _or_paused(self, error: SandboxError) -> SandboxError:
        """What a 400 or 404 meant. "paused" can be a passing state, so it counts when it lasts."""
        for attempt in range(4):
            try:
                state = (await self.info()).state
            except SandboxNotFound as gone:
                return gone
            if state is State.RUNNING:
                passing = attempt > 0 or isinstance(error, SandboxNotFound)
                return Conflict(str(error), code=409) if passing else error
            await asyncio.sleep(0.1)
        return SandboxPaused(f"sandbox {self.id} is paused ({error})", code=error.code)


def _not_yet(error: SandboxError) -> bool:
    """Refused or never sent: repeating is safe."""
    return isinstance(error, Conflict | NeverSent)


def _create_request(spec: SandboxSpec, config: AgentEnvConfig) -> tuple[str, dict[str, Any], float]:
    """-> (path, body, time limit). The two creates spell internet access differently (spec/07 §3)."""
    body: dict[str, Any] = {
        "timeout": _ttl(spec.ttl_s),  # always sent: the default is 15 s
        "autoPause": spec.auto_pause,
        "autoResume": {"enabled": spec.auto_resume},
        "secure": True,
        "metadata": dict(spec.metadata),
        "envVars": dict(spec.env),
    }
    if not spec.template.startswith(IMAGE):
        body |= {"templateID": spec.template, "allow_internet_access": spec.network}
        return "/sandboxes", body, config.request_s
    limits = spec.limits
    body |= {
        "image": spec.template.removeprefix(IMAGE),
        "allowInternetAccess": spec.network,
        "cpuCount": max(1, math.ceil(limits.cpus)),
        "memoryMB": max(128, math.ceil(limits.memory_bytes / MIB)),
        "diskSizeMB": 1024 * max(1, math.ceil(limits.disk_bytes / (1024 * MIB))),
    }
    return "/sandboxes-cold", body, config.cold_create_s


def _time(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def _info(said: Mapping[str, Any]) -> SandboxInfo:
    try:
        return SandboxInfo(
            id=str(said["sandboxID"]),
            template=str(said["templateID"]),
            state=State(said["state"]),
            started_at=_time(said["startedAt"]),
            ends_at=_time(said["endAt"]),
            metadata=dict(said.get("metadata") or {}),
        )
    except (KeyError, ValueError, TypeError) as error:
        raise ServerFault(f"a sandbox record that cannot be read: {error!r}") from error


def _snapshot_info(said: Mapping[str, Any]) -> SnapshotInfo:
    try:
        return SnapshotInfo(str(said["snapshotID"]), tuple(said.get("names") or ()), _time(said["createdAt"]))
    except (KeyError, ValueError, TypeError) as error:
        raise ServerFault(f"a snapshot record that cannot be read: {error!r}") from error
