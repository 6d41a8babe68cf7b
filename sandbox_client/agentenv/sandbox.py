"""A handle to one microVM of an AgentENV server."""

from __future__ import annotations

import asyncio
import posixpath
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx

from sandbox_client.agentenv.envd import Envd, EnvdProcess, file_info
from sandbox_client.agentenv.http import NeverSent, json_of, patiently
from sandbox_client.agentenv.records import CREATE_KEY, checked, sandbox_info, snapshot_info, whole_seconds
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
    Chunk,
    Command,
    ExecResult,
    FileInfo,
    SandboxInfo,
    SandboxSpec,
    SnapshotInfo,
    State,
    shell_argv,
)

if TYPE_CHECKING:
    from sandbox_client.agentenv.backend import AgentEnvBackend

FORK_BATCH = 16


class AgentEnvSandbox:
    """See `sandbox_client.types.Sandbox`."""

    def __init__(self, backend: AgentEnvBackend, envd: Envd, sandbox_id: str, spec: SandboxSpec) -> None:
        self.id, self.metadata = sandbox_id, {k: v for k, v in spec.metadata.items() if k != CREATE_KEY}
        self._backend, self._envd, self._spec = backend, envd, spec
        self._forking = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<AgentEnvSandbox {self.id}>"

    def _at(self, call: str = "") -> str:
        return f"/sandboxes/{checked(self.id)}{call}"

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
        body = {"timeout": whole_seconds(self._spec.ttl_s if ttl_s is None else ttl_s)}
        said = json_of(await self._backend.repeat("POST", self._at("/resume"), body=body), "resume")
        if token := said.get("envdAccessToken"):
            self._envd.tokens["envd"] = token
        self._envd.expect_delay()

    async def extend(self, ttl_s: float) -> None:
        """A paused sandbox answers 500 with code 400 here."""
        try:
            await self._backend.repeat("POST", self._at("/timeout"), body={"timeout": whole_seconds(ttl_s)})
        except InvalidRequest as error:
            raise await self._or_paused(error) from error

    async def relabel(self, metadata: Mapping[str, str]) -> None:
        raise Unsupported(f"sandbox {self.id}: AgentENV's API sets metadata at creation only")

    async def info(self) -> SandboxInfo:
        return sandbox_info(await self._backend.detail(self.id))

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
        return snapshot_info(json_of(response, "snapshot"))

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
        call = lambda: self._once("/fork", {"count": count, "timeout": whole_seconds(self._spec.ttl_s)})  # noqa: E731
        response = await patiently(call, self._backend.config.patience_s, _not_yet)
        results = json_of(response, "fork")
        made = [self._backend.handle(r["sandbox"], self._spec) for r in results if r.get("sandbox")]
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
                await self._backend.kill(info.id)

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
