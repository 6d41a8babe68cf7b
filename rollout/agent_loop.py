"""One trajectory's way through its turns: generate, parse, ask the environment, append, again.

Single-turn trajectories go the same way and end after their first turn. The loop does nothing itself: each
method changes a `Run` by events and says what comes next, `Generate`, `Ask` or an end. The worker has the
engine and the event loop. What a run needs to go on is in its trajectory, so that any worker can take it
over between two events.

Sampled ids are never tokenised again: turn n + 1's context is turn n's context, its sampled ids, and what
`Renderer.extend` appends. All that is appended is the environment's and carries no loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from k3rl.chat.renderer import Renderer
from k3rl.config.rollout import RepetitionConfig, RolloutConfig
from k3rl.types import Channel, Message, ParsedResponse, Problem, Status, StopReason, Trajectory
from rollout.engine import Generation, SamplingParams
from rollout.environment import Environment, Opening, Reply, Turn
from rollout.record import (
    Event,
    Finished,
    Observed,
    Record,
    Released,
    Sampled,
    Started,
    TurnEnded,
    channel_runs,
)


@dataclass(frozen=True, slots=True)
class TrajectoryWork:
    """A trajectory handed to a worker, to start or to go on. ``key`` seeds its random stream."""

    problem: Problem
    trajectory: Trajectory
    key: int
    dispatch: int = 0

    @property
    def id(self) -> str:
        return self.trajectory.id


@dataclass(frozen=True, slots=True)
class Generate:
    generation: Generation


@dataclass(frozen=True, slots=True)
class Ask:
    """Await this, then call `AgentLoop.answered` with its result."""

    call: Coroutine[Any, Any, Any]


Next = Generate | Ask | None
"""``None``: the run has ended."""

_OVER = {
    StopReason.END_OF_TURN: Status.COMPLETE,
    StopReason.STOP_STRING: Status.COMPLETE,
    StopReason.STOP_TOOL: Status.COMPLETE,
    StopReason.MAX_TOKENS: Status.TRUNCATED,
    StopReason.MAX_CONTEXT: Status.TRUNCATED,
    StopReason.MAX_TURNS: Status.TRUNCATED,
    StopReason.REPETITION: Status.TRUNCATED,
}


@dataclass(slots=True)
class Run:
    """A trajectory in a worker. ``sent`` tokens of the open generation are already events; ``checked`` of
    them were looked at for repetition."""

    work: TrajectoryWork
    record: Record
    events: list[Event]
    environment: Environment | None = None
    generation: Generation | None = None
    sent: int = 0
    checked: int = 0
    opened: bool = False  # the environment was reset or resumed
    asking: bool = False  # it works on an answer: its state is between two of ours
    since_s: float = 0.0
    counters: dict[str, int] = field(default_factory=lambda: {"calls": 0, "failed_calls": 0, "malformed": 0})
    timings_s: dict[str, float] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return self.work.id

    def emit(self, make: Callable[..., Event], **fields: Any) -> None:
        """An event, applied to our copy and kept for the controller's."""
        event = make(id=self.id, dispatch=self.work.dispatch, at=self.record.length, **fields)
        self.record.apply(event)
        self.events.append(event)

    def state(self) -> dict[str, Any]:
        """``environment_state`` as it is stored."""
        if self.environment is None:
            return {}
        return {"environment": self.environment.state(), "loop": dict(self.counters)}

    def sandbox(self) -> dict[str, str] | None:
        return None if self.environment is None else self.environment.sandbox()

    def clock(self, what: str) -> None:
        """Seconds since the last call belong to ``what``."""
        now = time.monotonic()
        if self.since_s:
            self.timings_s[f"{what}_s"] = self.timings_s.get(f"{what}_s", 0.0) + now - self.since_s
        self.since_s = now


class AgentLoop:
    """``make_environment`` gives a problem's environment or ``None``; ``max_context`` is the engine's."""

    def __init__(
        self,
        config: RolloutConfig,
        renderer: Renderer,
        make_environment: Callable[[Problem], Environment | None],
        max_context: int,
    ) -> None:
        self._config, self._agent = config, config.agent
        self._renderer = renderer
        self._make_environment = make_environment
        self._max_context = min(max_context, config.max_context or max_context)
        self._stop_ids = tuple(renderer.stop_token_ids)

    # -- start ---------------------------------------------------------------------------------------------

    def start(self, run: Run) -> Next:
        """A new trajectory, or one that was paused or lost its worker."""
        run.clock("queue")
        run.since_s = time.monotonic()
        if run.environment is None:
            run.environment = self._make_environment(run.work.problem)
        trajectory = run.work.trajectory
        if not trajectory.prompt_ids:
            if run.environment is not None:
                return self._asked(run, run.environment.reset())
            return self._begin(run, Opening())
        if run.environment is None:
            return self._continue(run)
        state = trajectory.environment_state
        run.counters |= state.get("loop", {})
        return self._asked(run, run.environment.resume(state.get("environment", {})))

    @staticmethod
    def _asked(run: Run, call: Coroutine[Any, Any, Any]) -> Ask:
        run.asking = True
        return Ask(call)

    def answered(self, run: Run, answer: Any) -> Next:
        """What `Ask` awaited is here: an opening, a reply, ``None`` after a resumption, or an exception."""
        run.clock("environment")
        if isinstance(answer, BaseException):
            what = str(answer) or "no answer within its time limit"
            return self.end(run, StopReason.ERROR, f"environment: {type(answer).__name__}: {what}")
        run.opened, run.asking = True, False
        match answer:
            case None:
                return self._continue(run)
            case Opening():
                return self._begin(run, answer)
            case Reply():
                return self._replied(run, answer)
        return self.end(
            run, StopReason.ERROR, f"environment: it answered with a {type(answer).__name__}, not a Reply"
        )

    def _begin(self, run: Run, opening: Opening) -> Next:
        problem = run.work.problem
        prompt = self._renderer.encode_prompt(
            problem.messages if opening.messages is None else opening.messages,
            problem.tools if opening.tools is None else opening.tools,
            problem.effort,
            self._config.thinking,
        )
        run.emit(Started, prompt_ids=prompt, environment_state=run.state(), sandbox=run.sandbox())
        return self._next_turn(run)

    def _continue(self, run: Run) -> Next:
        if run.record.awaits_environment:  # the turn was whole, its answer was not here yet
            return self._ask(run, self._parse(run))
        return self._next_turn(run)

    # -- a turn --------------------------------------------------------------------------------------------

    def _next_turn(self, run: Run) -> Next:
        record, trajectory = run.record, run.record.trajectory
        turn = record.turn_segments()
        in_turn = sum(map(len, turn))
        before = record.sampled - in_turn
        limit = self._config.token_limit(trajectory.effort) - before
        if self._config.max_turn_tokens is not None:
            limit = min(limit, self._config.max_turn_tokens)
        context = record.context_ids()
        if trajectory.turns >= self._agent.max_turns:
            return self.end(run, StopReason.MAX_TURNS)
        if limit <= 0:
            return self.end(run, StopReason.MAX_TOKENS)
        if len(context) >= self._max_context:
            error = (
                "" if trajectory.segments else f"the prompt's {len(context)} tokens leave no room to answer"
            )
            return self.end(run, StopReason.MAX_CONTEXT, error)
        run.generation = Generation(
            id=run.id,
            context_ids=context,
            sampling=self._sampling(min(limit, self._max_context - len(context))),
            key=run.work.key,
            offset=before,
            group=str(trajectory.draw),
            token_ids=[t for s in turn for t in s.token_ids],
            logprobs=[p for s in turn for p in s.logprobs],
            versions=[s.policy_version for s in turn for _ in s.token_ids],
            routing=trajectory.routing,
        )
        run.sent = run.checked = in_turn
        return Generate(run.generation)

    def _sampling(self, limit: int) -> SamplingParams:
        sampling = self._config.sampling
        return SamplingParams(
            max_tokens=limit,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            stop_token_ids=self._stop_ids,
            stop_strings=sampling.stop_strings,
        )

    def flush(self, run: Run) -> None:
        """New tokens of the open generation become events."""
        generation = run.generation
        if generation is None:
            return
        while run.sent < len(generation.token_ids):
            version, end = generation.versions[run.sent], run.sent + 1
            while end < len(generation.versions) and generation.versions[end] == version:
                end += 1
            run.emit(
                Sampled,
                token_ids=generation.token_ids[run.sent : end],
                logprobs=generation.logprobs[run.sent : end],
                version=version,
                routing=self._routing_until(run, generation, end),
            )
            run.sent = end

    @staticmethod
    def _routing_until(run: Run, generation: Generation, end: int) -> np.ndarray | None:
        """Rows that no event had yet of the tokens before the end-th of the open generation."""
        if generation.routing is None:
            return None
        return generation.routing[len(run.record.routing) : len(generation.context_ids) + end - 1]

    def looping_from(self, run: Run) -> int | None:
        """Where the open generation must end because it repeats itself, if it does. Depends on its tokens
        alone, not on when it is asked."""
        rule, generation = self._config.repetition, run.generation
        if rule is None or generation is None:
            return None
        length = len(generation.token_ids)
        first = run.checked // rule.every_tokens * rule.every_tokens + rule.every_tokens
        run.checked = length
        for end in range(first, length + 1, rule.every_tokens):
            if repeats(generation.token_ids, end, rule):
                return end
        return None

    def turn_ended(self, run: Run, generation: Generation) -> Next:
        """The engine finished the turn, or `looping_from` cut it."""
        reason = generation.stop_reason
        run.clock("generation")
        self.flush(run)
        run.generation = None
        if reason is None or reason in (StopReason.ERROR, StopReason.ABORTED):
            return self.end(run, StopReason.ERROR, f"engine: {generation.error or reason}")
        if reason is StopReason.MAX_TOKENS and self._fills_context(run):
            reason = StopReason.MAX_CONTEXT
        parsed = self._parse(run)
        channels = parsed.channels or (Channel.RESPONSE,) * len(generation.token_ids)
        if run.record.open:
            run.emit(TurnEnded, channels=channel_runs(channels))
        if reason not in (StopReason.END_OF_TURN, StopReason.STOP_STRING) or run.environment is None:
            return self.end(run, reason)
        return self._ask(run, parsed)

    def _fills_context(self, run: Run) -> bool:
        """The limit that was met is the context's and not the trajectory's own."""
        record = run.record
        spent = record.sampled >= self._config.token_limit(record.trajectory.effort)
        return not spent and len(record.trajectory.prompt_ids) + record.length >= self._max_context

    def _parse(self, run: Run) -> ParsedResponse:
        ids = [t for s in run.record.turn_segments() for t in s.token_ids]
        return self._renderer.parse(ids, self._config.thinking)

    def _ask(self, run: Run, parsed: ParsedResponse) -> Next:
        calls = parsed.tool_calls
        run.counters["calls"] += len(calls)
        if any(c.name in self._agent.stop_tools for c in calls if not c.malformed):
            return self.end(run, StopReason.STOP_TOOL)
        if calls and all(c.malformed for c in calls):
            run.counters["malformed"] += 1
            if self._agent.malformed_calls == "stop":
                return self.end(run, StopReason.MAX_TURNS, f"malformed call: {calls[0].malformed}")
            if run.counters["malformed"] >= self._agent.max_malformed_turns:
                return self.end(
                    run, StopReason.MAX_TURNS, f"{run.counters['malformed']} malformed turns in a row"
                )
        else:
            run.counters["malformed"] = 0
        assert run.environment is not None
        return self._asked(run, run.environment.step(Turn(parsed, run.record.trajectory.turns)))

    # -- what the environment answers ----------------------------------------------------------------------

    def _replied(self, run: Run, reply: Reply) -> Next:
        run.counters["failed_calls"] += reply.failed_calls
        if reply.done:
            if reply.stop_reason not in _OVER:
                return self.end(run, StopReason.ERROR, f"environment: it ended with '{reply.stop_reason}'")
            return self.end(run, reply.stop_reason)
        if not reply.messages:
            return self.end(run, StopReason.ERROR, "environment: it neither ended nor said anything")
        sampled = [t for s in run.record.turn_segments() for t in s.token_ids]
        ids = self._observation(sampled, reply.messages)
        if len(run.record.trajectory.prompt_ids) + run.record.length + len(ids) >= self._max_context:
            return self.end(run, StopReason.MAX_CONTEXT)
        run.emit(Observed, token_ids=ids, environment_state=run.state(), sandbox=run.sandbox())
        return self._next_turn(run)

    def _observation(self, sampled: Sequence[int], messages: list[Message]) -> list[int]:
        """Ids to append; the longest contents are cut in the middle until they are few enough."""
        ids = self._renderer.extend(sampled, messages, self._config.thinking)
        limit = self._agent.max_observation_tokens
        messages = [dict(m) for m in messages]
        while limit is not None and len(ids) > limit:
            texts = [m for m in messages if isinstance(m.get("content"), str)]
            longest = max(texts, key=lambda m: len(m["content"]), default=None)
            if longest is None or len(longest["content"]) < 64:
                break  # what is left is the format's own
            keep = max(32, int(len(longest["content"]) * min(0.9, limit / len(ids))) - 32)
            longest["content"] = cut_middle(longest["content"], keep)
            ids = self._renderer.extend(sampled, messages, self._config.thinking)
        return ids

    # -- ends ----------------------------------------------------------------------------------------------

    def end(self, run: Run, reason: StopReason, error: str = "") -> None:
        """The trajectory is over. Tokens of an unfinished turn stay, in a provisional channel."""
        self.flush(run)
        run.generation = None
        run.emit(
            Finished,
            status=_OVER.get(reason, Status.FAILED),
            stop_reason=reason,
            error=error,
            environment_state=self._state_or_last(run),
            sandbox=self._sandbox_or_last(run),
            timings_s=run.timings_s,
        )

    def release(self, run: Run, parked: bool) -> None:
        """The trajectory rests, or moves to another worker."""
        self.flush(run)
        run.emit(
            Released,
            environment_state=self._state_or_last(run),
            sandbox=self._sandbox_or_last(run),
            timings_s=run.timings_s,
            parked=parked,
        )
        run.timings_s, run.since_s = {}, 0.0

    def _state_or_last(self, run: Run) -> dict[str, Any]:
        """Of an environment that never opened, or is busy, the last state is the right one."""
        return run.state() if run.opened and not run.asking else run.record.trajectory.environment_state

    def _sandbox_or_last(self, run: Run) -> dict[str, str] | None:
        return run.sandbox() if run.opened and not run.asking else run.record.trajectory.sandbox


def repeats(tokens: Sequence[int], end: int, rule: RepetitionConfig) -> bool:
    """Do the ``window_tokens`` tokens before ``end`` consist of one block, ``min_repeats`` times or more?

    The smallest period is found in one pass (the failure function of Knuth, Morris and Pratt).
    """
    size = rule.window_tokens
    if end < size or tokens[end - 1] not in tokens[end - 1 - size // rule.min_repeats : end - 1]:
        return False  # the last token does not even recur: no such period
    window = tokens[end - size : end]
    border = [0] * size
    k = 0
    for i in range(1, size):
        while k and window[i] != window[k]:
            k = border[k - 1]
        k += window[i] == window[k]
        border[i] = k
    return size // (size - border[-1]) >= rule.min_repeats


def cut_middle(text: str, keep: int) -> str:
    """Head and tail of a text, ``keep`` characters together, with a note of what is missing between."""
    head = keep // 2
    tail = keep - head
    return f"{text[:head]}\n[... {len(text) - keep} characters left out ...]\n{text[len(text) - tail :]}"
