"""The vocabulary of k3rl. Read this file first.

Glossary
--------
domain      A family of tasks: ``general``, ``agent``, ``coding``, or any name a user gives.
effort      How much thinking is asked for: ``low``, ``high`` or ``max`` (``medium`` is reserved by XTML).
problem     One task: its messages, tools, how it is rewarded, its budgets.
prompt      The token ids the policy is given before it samples.
segment     Consecutive tokens of one author, in one channel, under one policy version.
trajectory  Everything that happened for one sample of one problem: prompt, then segments.
group       The K trajectories of one problem. Baselines are taken over a group.
behaviour log-prob   Natural log of the probability with which the engine sampled a token, under the
            *processed* distribution (temperature, top-p, top-k, min-p applied), at sampling time.
policy version       Number of optimiser steps behind the weights that sampled a token.
staleness   Trainer's version minus a token's policy version, at the time it is trained on.
reward      One number for a trajectory with its named components, and an outcome that says whether
            it was scored at all: a failed grader is never a zero.
advantage   What the objective multiplies a token's log-prob gradient with.
budget      ``budget_tokens`` b0 and ``reference_length`` l0 of a problem, in tokens (spec/02 §3).

Token ids are the truth; text is derived from them for people. ``x[i]`` of any per-token field belongs to
``token[i]``; nothing is shifted. Plain dataclasses: cheap to make, to send between processes and to store.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Message = dict[str, Any]
"""One chat message in the usual shape: ``role``, ``content``, and by role ``reasoning_content``,
``tool_calls``, ``tool_call_id``, ``tools``, ``name``."""


class Effort(StrEnum):
    LOW = "low"
    MEDIUM = "medium"  # reserved by XTML; K3's recipe uses the other three
    HIGH = "high"
    MAX = "max"


class Author(StrEnum):
    MODEL = "model"  # sampled by the engine: carries log-probs, may carry loss
    ENVIRONMENT = "environment"  # tool results, user turns, forced tokens: never loss


class Channel(StrEnum):
    THINK = "think"
    RESPONSE = "response"
    TOOL_CALL = "tool_call"
    OBSERVATION = "observation"
    STRUCTURE = "structure"  # openers and closers of messages and channels


class Status(StrEnum):
    QUEUED = "queued"  # admitted, nothing sampled yet
    RUNNING = "running"
    PAUSED = "paused"  # cut at lambda completion; resumes first in the next step
    COMPLETE = "complete"  # ended by itself
    TRUNCATED = "truncated"  # ended by a limit
    FAILED = "failed"  # ended by a fault, kept with its reason


class StopReason(StrEnum):
    END_OF_TURN = "end_of_turn"  # eos or one of the request's stop ids
    STOP_STRING = "stop_string"
    MAX_TOKENS = "max_tokens"  # the trajectory's own budget of sampled tokens
    MAX_CONTEXT = "max_context"  # prompt and response fill the model's context
    MAX_TURNS = "max_turns"
    STOP_TOOL = "stop_tool"  # the policy called a tool that ends the task
    REPETITION = "repetition"  # caught in a loop
    STALE = "stale"  # older than max_staleness allows
    ABORTED = "aborted"
    ERROR = "error"  # worker, sandbox or environment failed more often than retries allow


class Outcome(StrEnum):
    """What became of the attempt to score a trajectory."""

    SCORED = "scored"
    GRADER_FAILED = "grader_failed"  # raised, returned nonsense, killed its process
    TIMED_OUT = "timed_out"
    JUDGE_FAILED = "judge_failed"
    SKIPPED = "skipped"  # not gradable, for instance a failed trajectory


@dataclass(frozen=True, slots=True)
class Problem:
    """One task.

    ``reward`` names the reward and its arguments: ``{"name": "math", "answer": "12"}``. ``None`` budgets
    mean that none was estimated and no budget rule applies.
    """

    id: str
    domain: str
    messages: list[Message]
    reward: dict[str, Any]
    effort: Effort | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    budget_tokens: int | None = None
    reference_length: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call the model made. ``malformed`` says why it cannot be run; it is then answered with that reason."""

    name: str
    arguments: dict[str, Any]
    index: int = 1  # 1-based within its message, as XTML counts
    malformed: str = ""
    raw: str = ""  # the arguments' text where it is not JSON; ``arguments`` is then empty


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    """A response read back from its token ids, by channel.

    ``complete`` is true where the message was closed as the format asks. ``channels`` gives the channel of every
    token that was parsed, structure tokens included, so it is as long as the ids. ``errors`` says in words where the
    response departs from the format; what could be read was read all the same.
    """

    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    complete: bool = True
    channels: tuple[Channel, ...] = ()
    errors: tuple[str, ...] = ()


@dataclass(slots=True)
class Segment:
    """Consecutive tokens of one author, in one channel, under one policy version.

    ``logprobs`` are behaviour log-probs, one per token, for ``Author.MODEL``; empty for the environment.
    """

    author: Author
    channel: Channel
    token_ids: list[int]
    logprobs: list[float] = field(default_factory=list)
    policy_version: int = -1

    def __post_init__(self) -> None:
        expected = len(self.token_ids) if self.author is Author.MODEL else 0
        if len(self.logprobs) != expected:
            raise ValueError(
                f"segment by {self.author}: {len(self.token_ids)} tokens need {expected} log-probs, "
                f"got {len(self.logprobs)}"
            )

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True)
class Reward:
    """``total`` is meaningful only where ``outcome`` is ``SCORED``; it is ``None`` otherwise."""

    total: float | None
    components: dict[str, float] = field(default_factory=dict)
    outcome: Outcome = Outcome.SCORED
    explanation: str = ""
    seconds_s: float = 0.0
    trace: str = ""
    """JSON of what a judge did; empty where none was asked."""


@dataclass(slots=True)
class Trajectory:
    """One sample of one problem, from prompt to reward.

    ``draw`` is the ordinal of the draw of its problem in this run: (draw, sample) is unique in a run, where
    ``problem_id`` repeats when a data set is passed over again.
    """

    problem_id: str
    draw: int
    sample: int
    domain: str
    effort: Effort | None
    prompt_ids: list[int]
    segments: list[Segment] = field(default_factory=list)
    status: Status = Status.QUEUED
    stop_reason: StopReason | None = None
    error: str = ""
    turns: int = 0
    sandbox: dict[str, str] | None = None  # ids by which a paused sandbox is found again
    environment_state: dict[str, Any] = field(default_factory=dict)  # JSON; what reset() would lose
    started_step: int = -1
    finished_step: int = -1
    timings_s: dict[str, float] = field(default_factory=dict)
    reward: Reward | None = None
    advantage: float | None = None
    token_advantages: list[float] | None = None  # by sampled token; distillation fills it
    teacher_logprobs: list[float] | None = None  # by sampled token
    teacher_top: Any = None  # by sampled token: (int32 ids [n, K], float32 log-probs [n, K]) of the teacher
    trainer_logprobs: list[float] | None = None  # by sampled token, before the update it was trained in
    routing: Any = None  # the engine's experts: int16 array [tokens read, expert layers, experts a token]

    @property
    def id(self) -> str:
        return f"{self.draw}.{self.sample}"

    @property
    def token_ids(self) -> list[int]:
        """Response: everything after the prompt, whoever wrote it."""
        return [t for s in self.segments for t in s.token_ids]

    @property
    def sampled_mask(self) -> list[bool]:
        """By response token: did the policy sample it (and so, does it carry loss)?"""
        return [s.author is Author.MODEL for s in self.segments for _ in s.token_ids]

    @property
    def logprobs(self) -> list[float]:
        """Behaviour log-probs of the sampled tokens, in order."""
        return [p for s in self.segments for p in s.logprobs]

    @property
    def policy_versions(self) -> list[int]:
        """By sampled token."""
        return [s.policy_version for s in self.segments if s.author is Author.MODEL for _ in s.token_ids]

    @property
    def sampled_tokens(self) -> int:
        return sum(len(s) for s in self.segments if s.author is Author.MODEL)

    def channel_tokens(self, channel: Channel) -> int:
        """Sampled tokens in one channel."""
        return sum(len(s) for s in self.segments if s.author is Author.MODEL and s.channel is channel)

    @property
    def done(self) -> bool:
        return self.status in (Status.COMPLETE, Status.TRUNCATED, Status.FAILED)


@dataclass(slots=True)
class Group:
    """One problem's K trajectories, ordered by sample index."""

    problem: Problem
    draw: int
    trajectories: list[Trajectory]

    @property
    def done(self) -> bool:
        return all(t.done for t in self.trajectories)


def stream_key(run_seed: int, problem_id: str, draw: int, sample: int) -> int:
    """63-bit key of a trajectory's random stream.

    A function of what the trajectory is, never of the batch or worker it runs in, so that a piece generated
    again after a fault comes out the same.
    """
    digest = hashlib.blake2b(f"{run_seed}\x1f{problem_id}\x1f{draw}\x1f{sample}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little") >> 1
