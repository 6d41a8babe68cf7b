"""An environment whose tools run in a sandbox of the trajectory's own.

The sandbox is made at the first call and rests while the policy generates and while the trajectory is paused. It is
never lost for good: the state holds every call that may have changed it, so that it is found again, or made again from
its last snapshot and the calls since, or from the task's files and all calls. Commands whose effect depends on time or
chance may come out otherwise then; ``replayed`` in the state counts the calls that were repeated.

A subclass says what the task is: `prepare` writes its files, `judge` gives the reward.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar, TypeVar

from k3rl.errors import UserError, nearest
from k3rl.types import Message, Problem, StopReason, ToolCall
from rollout.environment import Opening, Reply, Turn, malformed_messages, tool_message
from rollout.environments.artifacts import collect
from rollout.environments.sandboxes import Sandboxes
from rollout.environments.tools import (
    ANSWER,
    CHANGING,
    POLICY_FAULTS,
    TOOLS,
    ToolError,
    ToolLimits,
    call_tool,
    declaration,
)
from sandbox_client import Fleet, Lease, Sandbox, SandboxError
from sandbox_client.errors import BrokenStream, InvalidRequest, SandboxNotFound

log = logging.getLogger(__name__)
T = TypeVar("T")
Json = dict[str, Any]

MARK = "/tmp/.calls"
"""File in a sandbox: how many changing calls it has seen. It tells whether a sandbox that is found again is as the
trajectory knows it."""
SUBMIT = "submit"


class SandboxEnvironment:
    """An `Environment`. A turn without calls ends the trajectory, its text being the answer; so does ``submit``.

    ``tools`` are names of `rollout.environments.tools`; the other arguments are fields of `ToolLimits`.
    ``artifacts`` are patterns of paths below the home folder: at the end such files are kept in the state, for judges.
    ``declare`` false: the prompt does not say which tools there are, for models that learn it by example.
    """

    uses_sandbox: ClassVar[bool] = True
    default_tools: ClassVar[tuple[str, ...]] = (*TOOLS, SUBMIT)

    def __init__(
        self,
        problem: Problem,
        *,
        sandboxes: Sandboxes,
        tools: Sequence[str] = (),
        artifacts: Sequence[str] = (),
        declare: bool = True,
        **limits: Any,
    ) -> None:
        self.problem, self.tools, self.artifacts = problem, tuple(tools or self.default_tools), artifacts
        declared = [declaration(name) for name in self.tools]
        self._declared = declared if declare else []
        timeout_s = sandboxes.tool_timeout_s
        fields = ToolLimits.__dataclass_fields__
        for name in limits:
            if name not in fields:
                raise UserError(f"an environment has no argument '{name}'{nearest(name, fields)}")
        self.limits = ToolLimits(**{"bash_s": timeout_s, "python_s": timeout_s, **limits})
        self._sandboxes = sandboxes
        self._lease: Lease | None = None
        self._record: dict[str, str] = {}  # by which the sandbox is found
        self._journal: list[list[Any]] = []  # [tool, arguments] of calls that may have changed it
        self._snapshot, self._saved = "", 0  # and how many of the calls are in the snapshot
        self._replayed = 0
        self._end: Json = {}  # answer and score

    # -- what a task is ------------------------------------------------------------------------------------

    async def prepare(self, sandbox: Sandbox) -> None:
        """Write the task's files. Called again where the sandbox is made again."""

    async def judge(self, answer: str) -> float:
        """The reward, once the policy has answered. `fork` gives a sandbox to try things in.

        A `SandboxError` here fails the trajectory; it is never a wrong answer.
        """
        raise NotImplementedError

    # -- the protocol --------------------------------------------------------------------------------------

    async def reset(self) -> Opening:
        return Opening(tools=[*self.problem.tools, *self._declared])

    async def step(self, turn: Turn) -> Reply:
        if not turn.calls:
            return await self._over(turn.response.content, StopReason.END_OF_TURN)
        messages: list[Message] = []
        failed = 0
        for call in turn.calls:  # one after the other: they share the sandbox
            if call.name == SUBMIT and SUBMIT in self.tools and not call.malformed:
                answer = call.arguments.get(ANSWER) or turn.response.content
                return await self._over(str(answer), StopReason.STOP_TOOL)
            message, worked = await self._answer(call)
            messages.append(message)
            failed += not worked
        return Reply(messages, failed_calls=failed)

    async def pause(self) -> None:
        if self._lease is not None:
            await self._lease.pause()

    async def resume(self, state: Json) -> None:
        """The sandbox itself is looked for when a call needs it."""
        if self._lease is not None:
            return  # the same object goes on
        self._record = dict(state.get("sandbox", {}))
        self._journal = [list(entry) for entry in state.get("journal", ())]
        self._snapshot, self._saved = state.get("snapshot", ""), state.get("saved", 0)
        self._replayed = state.get("replayed", 0)
        self._end = {k: state[k] for k in ("answer", "score", "artifacts") if k in state}

    async def close(self) -> None:
        if self._lease is not None:
            await self._let_go()
        elif self._record and self._sandboxes.survive:  # nobody looked for it since it was resumed
            fleet = await self._sandboxes.fleet()
            with contextlib.suppress(SandboxNotFound):
                await (await fleet.backend.connect(self._record["id"])).kill()

    def state(self) -> Json:
        kept: Json = {"journal": [list(entry) for entry in self._journal], "replayed": self._replayed}
        if self._record:
            kept["sandbox"] = dict(self._record)
        if self._snapshot:
            kept |= {"snapshot": self._snapshot, "saved": self._saved}
        return kept | self._end

    def sandbox(self) -> dict[str, str] | None:
        if not self._record:
            return None
        return self._record | ({"snapshot": self._snapshot} if self._snapshot else {})

    # -- beyond the protocol: see `rollout.environment.HoldsSandbox` ---------------------------------------

    async def save(self) -> None:
        if self._lease is None or not self._journal or (self._snapshot and self._saved == len(self._journal)):
            return
        try:
            fleet = await self._sandboxes.fleet()
            async with self._lease.awake() as sandbox:
                self._snapshot = await fleet.take_snapshot(sandbox)
        except SandboxError as error:  # the calls bring it back all the same
            log.warning("problem %s: no snapshot: %s", self.problem.id, error)
            return
        self._saved = len(self._journal)

    async def leave(self) -> None:
        if self._lease is not None and self._sandboxes.survive:
            lease, self._lease = self._lease, None
            self._sandboxes.free_place()
            await lease.detach()
        elif self._lease is not None:
            await self._let_go()

    # -- calls ---------------------------------------------------------------------------------------------

    async def _answer(self, call: ToolCall) -> tuple[Message, bool]:
        if call.malformed:
            return malformed_messages([call])[0], False
        if call.name not in self.tools or call.name == SUBMIT:
            known = ", ".join(self.tools)
            return tool_message(call, f"Error: there is no tool '{call.name}'; there are: {known}"), False
        try:
            return tool_message(call, await self._run(call.name, call.arguments)), True
        except ToolError as error:
            return tool_message(call, f"Error: {error}"), False

    async def _run(self, name: str, arguments: Json) -> str:
        """One call, tried again where the sandbox failed; where it ended twice, that is the call's doing."""
        for last in (False, True):
            try:
                return await self._once(name, arguments)
            except SandboxError as error:
                log.info("problem %s: %s: %s", self.problem.id, name, error)
                await self._let_go()
                if last and isinstance(error, SandboxNotFound | BrokenStream):
                    raise ToolError(
                        "this call ended the sandbox; it is made again as it was before"
                    ) from error
                if last:
                    raise
        raise AssertionError("unreachable")

    async def _once(self, name: str, arguments: Json) -> str:
        async with (await self._hold()).awake() as sandbox:
            if name in CHANGING:
                await self._mark(sandbox, len(self._journal) + 1)
            try:
                result = await call_tool(sandbox, self.limits, name, arguments)
            except ToolError:  # it may have changed something all the same
                self._note(name, arguments)
                raise
        self._note(name, arguments)
        return result

    def _note(self, name: str, arguments: Json) -> None:
        self._sandboxes.calls += 1
        if name in CHANGING:
            self._journal.append([name, dict(arguments)])

    async def _over(self, answer: str, reason: StopReason) -> Reply:
        score = float(await self._patiently(lambda: self.judge(answer)))
        self._end = {"answer": answer, "score": score}
        if self.artifacts:
            read = functools.partial(collect, patterns=self.artifacts)
            self._end["artifacts"] = await self._patiently(lambda: self.in_fork(read))
        return Reply(done=True, stop_reason=reason)

    async def _patiently(self, what: Callable[[], Awaitable[T]]) -> T:
        """A sandbox that died meanwhile is made again, once."""
        try:
            return await what()
        except SandboxError as error:
            log.info("problem %s: judged again: %s", self.problem.id, error)
            if self._lease is not None:
                await self._let_go()
            return await what()

    async def in_fork(self, what: Callable[[Sandbox], Awaitable[T]]) -> T:
        """Do something in a copy of the sandbox that nobody sees afterwards."""
        async with self._sandboxes.judge(await self._hold()) as sandbox:
            return await what(sandbox)

    # -- the sandbox ---------------------------------------------------------------------------------------

    async def _hold(self) -> Lease:
        """The trajectory's sandbox: made, found or made again where this object has none."""
        if self._lease is None:
            fleet = await self._sandboxes.fleet()
            await self._sandboxes.take_place()
            try:
                self._lease = await self._found(fleet) or await self._made(fleet)
            except BaseException:
                self._sandboxes.free_place()
                raise
            self._record = self._lease.record()
        return self._lease

    async def _found(self, fleet: Fleet) -> Lease | None:
        """Itself, if it has seen the calls we know of and no other; else one made from the snapshot."""
        if not self._record or not (self._snapshot or self._sandboxes.survive):
            return None
        record = self._record | ({"snapshot": self._snapshot} if self._snapshot else {})
        for _ in range(2):
            try:
                lease = await fleet.restore(record)
            except (SandboxNotFound, InvalidRequest):
                return None
            lease.snapshot = ""  # snapshots belong to checkpoints, not to the lease
            seen = await self._seen(lease)
            if seen == len(self._journal):
                return lease
            if lease.sandbox.id != record["id"] and seen == self._saved:
                return await self._replayed_on(lease, self._saved)
            await lease.release()  # it went on after the state that we have: killed, so that the next is new
        return None

    async def _seen(self, lease: Lease) -> int:
        """Calls that a sandbox has seen; -1 where the policy's own code put something else in the mark's place."""
        async with lease.awake() as sandbox:
            try:
                return int(await sandbox.read_file(MARK, limit_bytes=32))
            except (*POLICY_FAULTS, ValueError):
                return -1

    async def _made(self, fleet: Fleet) -> Lease:
        lease = await fleet.acquire(self.problem.id)
        try:
            async with lease.awake() as sandbox:
                await self.prepare(sandbox)
        except BaseException:
            await lease.release()
            raise
        return await self._replayed_on(lease, 0)

    async def _replayed_on(self, lease: Lease, start: int) -> Lease:
        """The calls from number ``start`` on, done again. What they answer was said before."""
        try:
            async with lease.awake() as sandbox:
                for name, arguments in self._journal[start:]:
                    with contextlib.suppress(ToolError):  # as the first time
                        await call_tool(sandbox, self.limits, name, arguments)
                    self._replayed += 1
                    self._sandboxes.replayed += 1
                await self._mark(sandbox, len(self._journal))
        except BaseException:
            await lease.release()
            raise
        return lease

    async def _mark(self, sandbox: Sandbox, calls: int) -> None:
        """Where it cannot be written, the sandbox is later not taken for the right one, and made again."""
        with contextlib.suppress(*POLICY_FAULTS):
            await sandbox.write_file(MARK, str(calls))

    async def _let_go(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            self._sandboxes.free_place()
            await lease.release()


def task_of(problem: Problem, *keys: str) -> Json:
    """``metadata["task"]`` of a problem, which the generators write. `UserError` where a key is missing."""
    task = problem.metadata.get("task")
    if not isinstance(task, dict):
        raise UserError(
            f"problem '{problem.id}': metadata.task is missing; make it with k3rl.data's generators"
        )
    for key in keys:
        if key not in task:
            raise UserError(f"problem '{problem.id}': metadata.task.{key} is missing")
    return task


async def write_files(sandbox: Sandbox, files: dict[str, str]) -> None:
    """Paths are relative to the home folder."""
    for path, content in files.items():
        await sandbox.write_file(path, content)
