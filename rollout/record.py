"""A trajectory as the sum of its events.

The worker makes events and the controller receives them; both apply them to their own copy of the
trajectory with `Record.apply`, which is the only way a trajectory changes. So the two copies agree, the
controller can go on from its own when a worker dies, and a lost, doubled or reordered piece is found at
once by its position.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from k3rl.errors import RunError
from k3rl.types import Author, Channel, Effort, Problem, Segment, Status, StopReason, Trajectory
from rollout.routing import RoutingRows, routing_from_json, routing_to_json

PROVISIONAL = Channel.RESPONSE
"""Channel of sampled tokens until their turn ends and can be parsed."""

ChannelRuns = list[tuple[Channel, int]]


@dataclass(frozen=True, slots=True)
class Event:
    """``at`` is how many response tokens were there before. ``dispatch`` numbers the times that the
    trajectory was handed to a worker: events of an earlier time are void."""

    id: str
    dispatch: int
    at: int


@dataclass(frozen=True, slots=True)
class Started(Event):
    """The prompt was rendered; an environment, if any, was reset."""

    prompt_ids: list[int]
    environment_state: dict[str, Any]
    sandbox: dict[str, str] | None


@dataclass(frozen=True, slots=True)
class Sampled(Event):
    """More tokens of the open turn, all under one policy version. ``routing``: where the engine records it, int16
    rows of the tokens read since the last such event; after it, all tokens but the newest have theirs."""

    token_ids: list[int]
    logprobs: list[float]
    version: int
    routing: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class TurnEnded(Event):
    """The open turn is whole; ``channels`` run over all its tokens."""

    channels: ChannelRuns


@dataclass(frozen=True, slots=True)
class Observed(Event):
    """What the environment answered, with the next turn's generation prompt."""

    token_ids: list[int]
    environment_state: dict[str, Any]
    sandbox: dict[str, str] | None


@dataclass(frozen=True, slots=True)
class Finished(Event):
    status: Status
    stop_reason: StopReason
    error: str
    environment_state: dict[str, Any]
    sandbox: dict[str, str] | None
    timings_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class Released(Event):
    """Back in the controller's hands, unfinished, to be resumed from what it holds. ``parked``: the worker
    keeps the live environment for it."""

    environment_state: dict[str, Any]
    sandbox: dict[str, str] | None
    timings_s: dict[str, float]
    parked: bool


@dataclass(slots=True)
class Record:
    """A trajectory and where in it we are. ``length`` counts response tokens, ``turn_first`` is the index
    of the open turn's first segment, ``open`` says whether a turn is open."""

    trajectory: Trajectory
    length: int = field(init=False)
    sampled: int = field(init=False)
    turn_first: int = field(init=False)
    open: bool = field(init=False)
    routing: RoutingRows = field(init=False)

    def __post_init__(self) -> None:
        segments = self.trajectory.segments
        self.length = sum(map(len, segments))
        self.sampled = self.trajectory.sampled_tokens
        self.routing = RoutingRows(self.trajectory.routing)
        self.turn_first = len(segments)
        while self.turn_first and segments[self.turn_first - 1].author is Author.MODEL:
            self.turn_first -= 1
        begun = sum(
            s.author is Author.MODEL and (i == 0 or segments[i - 1].author is not Author.MODEL)
            for i, s in enumerate(segments)
        )
        self.open = begun > self.trajectory.turns

    @property
    def awaits_environment(self) -> bool:
        """Its last turn is whole and nothing has answered it."""
        return not self.open and self.turn_first < len(self.trajectory.segments)

    def turn_segments(self) -> list[Segment]:
        """The last turn, open or whole; empty where none began since the last observation."""
        return self.trajectory.segments[self.turn_first :]

    def context_ids(self) -> list[int]:
        """All before the last turn."""
        ids = list(self.trajectory.prompt_ids)
        for segment in self.trajectory.segments[: self.turn_first]:
            ids += segment.token_ids
        return ids

    def apply(self, event: Event) -> None:
        """Change the trajectory as the event says. `RunError` where a piece is missing or came twice."""
        if event.at != self.length:
            raise RunError(
                f"rollout: {type(event).__name__} of trajectory {event.id} belongs at token {event.at}, "
                f"but {self.length} are there"
            )
        trajectory = self.trajectory
        match event:
            case Sampled():
                self._sampled(event)
            case TurnEnded():
                self._turn_ended(event)
            case Observed():
                if self.open:
                    raise RunError(f"rollout: trajectory {event.id} got an observation within a turn")
                trajectory.segments.append(
                    Segment(Author.ENVIRONMENT, Channel.OBSERVATION, list(event.token_ids))
                )
                self.length += len(event.token_ids)
                self.turn_first = len(trajectory.segments)
            case Started():
                trajectory.prompt_ids = list(event.prompt_ids)
            case Finished():
                trajectory.status, trajectory.stop_reason = event.status, event.stop_reason
                trajectory.error = event.error
            case Released():
                trajectory.status = Status.PAUSED
        if isinstance(event, Started | Observed | Finished | Released):
            trajectory.environment_state, trajectory.sandbox = event.environment_state, event.sandbox
        if isinstance(event, Finished | Released):
            for name, seconds in event.timings_s.items():
                trajectory.timings_s[name] = trajectory.timings_s.get(name, 0.0) + seconds

    def _sampled(self, event: Sampled) -> None:
        segments, count = self.trajectory.segments, len(event.token_ids)
        if self.awaits_environment:
            raise RunError(f"rollout: trajectory {event.id} sampled on after the end of its turn")
        last = segments[-1] if len(segments) > self.turn_first else None
        if last is not None and last.policy_version == event.version and len(event.logprobs) == count:
            last.token_ids += event.token_ids
            last.logprobs += event.logprobs
        else:
            segments.append(
                Segment(Author.MODEL, PROVISIONAL, list(event.token_ids), list(event.logprobs), event.version)
            )
        self.length += count
        self.sampled += count
        self.open = True
        self._routed(event)

    def _routed(self, event: Sampled) -> None:
        if event.routing is None and not self.routing:
            return
        if event.routing is not None:
            self.routing.append(event.routing)
            self.trajectory.routing = self.routing.array
        read = len(self.trajectory.prompt_ids) + self.length - 1
        if len(self.routing) != read:
            raise RunError(
                f"rollout: trajectory {event.id} has the routing of {len(self.routing)} tokens, "
                f"but {read} were read"
            )

    def _turn_ended(self, event: TurnEnded) -> None:
        if not self.open:
            raise RunError(f"rollout: trajectory {event.id} ended a turn that had not begun")
        self.trajectory.segments[self.turn_first :] = split(self.turn_segments(), event.channels)
        self.trajectory.turns += 1
        self.open = False


def split(segments: Sequence[Segment], channels: ChannelRuns) -> list[Segment]:
    """The same tokens, cut where the channel or the policy version changes."""
    if sum(n for _, n in channels) != sum(map(len, segments)):
        raise RunError(
            f"rollout: channels of {sum(n for _, n in channels)} tokens for a turn of "
            f"{sum(map(len, segments))}"
        )
    out: list[Segment] = []
    remaining = iter(channels)
    channel, left = PROVISIONAL, 0
    for segment in segments:
        start = 0
        while start < len(segment):
            while left == 0:
                channel, left = next(remaining)
            end = min(len(segment), start + left)
            ids, logprobs = segment.token_ids[start:end], segment.logprobs[start:end]
            previous = out[-1] if out else None
            if previous and previous.channel is channel and previous.policy_version == segment.policy_version:
                previous.token_ids += ids
                previous.logprobs += logprobs
            else:
                out.append(Segment(segment.author, channel, ids, logprobs, segment.policy_version))
            left -= end - start
            start = end
    return out


def channel_runs(channels: Iterable[Channel]) -> ChannelRuns:
    """Run lengths."""
    runs: ChannelRuns = []
    for channel in channels:
        if runs and runs[-1][0] is channel:
            runs[-1] = (channel, runs[-1][1] + 1)
        else:
            runs.append((channel, 1))
    return runs


# -- JSON, for checkpoints ------------------------------------------------------------------------------


def trajectory_to_json(trajectory: Trajectory) -> dict[str, Any]:
    """Everything that generation needs, and nothing that comes after it (reward, advantage)."""
    return {
        "problem_id": trajectory.problem_id,
        "draw": trajectory.draw,
        "sample": trajectory.sample,
        "domain": trajectory.domain,
        "effort": trajectory.effort,
        "prompt_ids": trajectory.prompt_ids,
        "segments": [
            [s.author, s.channel, s.token_ids, s.logprobs, s.policy_version] for s in trajectory.segments
        ],
        "status": trajectory.status,
        "stop_reason": trajectory.stop_reason,
        "error": trajectory.error,
        "turns": trajectory.turns,
        "sandbox": trajectory.sandbox,
        "environment_state": trajectory.environment_state,
        "started_step": trajectory.started_step,
        "finished_step": trajectory.finished_step,
        "timings_s": trajectory.timings_s,
        "routing": routing_to_json(trajectory.routing),
    }


_REBUILT = ("segments", "status", "stop_reason", "effort", "routing")


def trajectory_from_json(data: dict[str, Any]) -> Trajectory:
    return Trajectory(
        **{k: v for k, v in data.items() if k not in _REBUILT},
        effort=None if data["effort"] is None else Effort(data["effort"]),
        segments=[
            Segment(Author(author), Channel(channel), ids, logprobs, version)
            for author, channel, ids, logprobs, version in data["segments"]
        ],
        status=Status(data["status"]),
        stop_reason=None if data["stop_reason"] is None else StopReason(data["stop_reason"]),
        routing=routing_from_json(data.get("routing")),
    )


def problem_to_json(problem: Problem) -> dict[str, Any]:
    return {name: getattr(problem, name) for name in Problem.__slots__}


def problem_from_json(data: dict[str, Any]) -> Problem:
    effort = data["effort"]
    return Problem(**{**data, "effort": None if effort is None else Effort(effort)})
