"""One row per trajectory that left a run: everything there is to know about it, in one record.

Per-token lists are aligned to ``response_ids``; where a token was not sampled, its numbers are null.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from k3rl.chat import Renderer
from k3rl.types import Author, Channel, Problem, Segment, Trajectory

ROLLOUT_SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("problem_id", pa.string()),
        ("draw", pa.int64()),
        ("sample", pa.int32()),
        ("domain", pa.string()),
        ("effort", pa.string()),
        ("status", pa.string()),
        ("stop_reason", pa.string()),
        ("error", pa.string()),
        ("fate", pa.string()),  # "trained", or "dropped:<reason>"
        ("reward", pa.float64()),
        ("reward_outcome", pa.string()),
        # A list, since the `datasets` library knows no maps.
        ("reward_components", pa.list_(pa.struct([("name", pa.string()), ("value", pa.float64())]))),
        ("reward_explanation", pa.string()),
        ("advantage", pa.float64()),
        ("prompt_text", pa.string()),
        ("response_text", pa.string()),
        ("reasoning", pa.string()),
        ("content", pa.string()),
        ("messages_json", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),
        ("sampled_mask", pa.list_(pa.bool_())),
        ("channels", pa.list_(pa.string())),
        ("logprobs", pa.list_(pa.float32())),
        ("policy_versions", pa.list_(pa.int32())),
        ("trainer_logprobs", pa.list_(pa.float32())),
        ("teacher_logprobs", pa.list_(pa.float32())),
        ("token_advantages", pa.list_(pa.float32())),
        ("policy_version", pa.int32()),  # the trainer's, when this row was trained on
        ("started_step", pa.int32()),
        ("finished_step", pa.int32()),
        ("staleness_mean", pa.float64()),
        ("staleness_max", pa.int32()),
        ("thinking_tokens", pa.int32()),
        ("sampled_tokens", pa.int32()),
        ("budget_tokens", pa.int32()),
        ("reference_length", pa.int32()),
        ("turns", pa.int32()),
        ("timings_json", pa.string()),
        ("judge_trace_json", pa.string()),
        ("sandbox_json", pa.string()),
    ]
)


def rollout_row(
    trajectory: Trajectory,
    problem: Problem,
    fate: str,
    *,
    step: int,
    version: int,
    renderer: Renderer,
    thinking: bool,
) -> dict[str, Any]:
    """``version`` is the trainer's before the update of this step. ``fate``: ``trained`` or ``dropped:<reason>``."""
    t, response = trajectory, trajectory.token_ids
    sampled = [s for s in t.segments if s.author is Author.MODEL and s.token_ids]
    count = sum(map(len, sampled))
    parsed = renderer.parse(_last_turn(t), thinking=thinking)
    reward = t.reward
    return {
        "step": step,
        "problem_id": t.problem_id,
        "draw": t.draw,
        "sample": t.sample,
        "domain": t.domain,
        "effort": t.effort and str(t.effort),
        "status": str(t.status),
        "stop_reason": t.stop_reason and str(t.stop_reason),
        "error": t.error,
        "fate": fate,
        "reward": reward.total if reward else None,
        "reward_outcome": str(reward.outcome) if reward else None,
        "reward_components": [{"name": n, "value": v} for n, v in reward.components.items()]
        if reward
        else [],
        "reward_explanation": reward.explanation if reward else "",
        "advantage": t.advantage,
        "prompt_text": renderer.decode(t.prompt_ids),
        "response_text": renderer.decode(response),
        "reasoning": parsed.reasoning,
        "content": parsed.content,
        "messages_json": json.dumps(problem.messages, ensure_ascii=False),
        "prompt_ids": t.prompt_ids,
        "response_ids": response,
        "sampled_mask": _joined([s.author is Author.MODEL] * len(s) for s in t.segments),
        "channels": _joined([str(s.channel)] * len(s) for s in t.segments),
        "logprobs": _joined(s.logprobs or [None] * len(s) for s in t.segments),
        "policy_versions": _joined(
            [s.policy_version if s.author is Author.MODEL else None] * len(s) for s in t.segments
        ),
        "trainer_logprobs": spread(t.trainer_logprobs, t.segments),
        "teacher_logprobs": spread(t.teacher_logprobs, t.segments),
        "token_advantages": spread(t.token_advantages, t.segments),
        "policy_version": version,
        "started_step": t.started_step,
        "finished_step": t.finished_step,
        "staleness_mean": sum((version - s.policy_version) * len(s) for s in sampled) / count
        if count
        else None,
        "staleness_max": max((version - s.policy_version for s in sampled), default=None),
        "thinking_tokens": t.channel_tokens(Channel.THINK),
        "sampled_tokens": count,
        "budget_tokens": problem.budget_tokens,
        "reference_length": problem.reference_length,
        "turns": t.turns,
        "timings_json": json.dumps(t.timings_s),
        "judge_trace_json": (reward.trace or None) if reward else None,
        "sandbox_json": json.dumps(t.sandbox) if t.sandbox else None,
    }


def spread(sampled: Sequence[Any] | None, segments: Sequence[Segment]) -> list[Any] | None:
    """Values by sampled token to values by response token; the others are null. Raises `ValueError` where the counts
    differ: a number never moves to a neighbour's token."""
    if sampled is None:
        return None
    count = sum(len(s) for s in segments if s.author is Author.MODEL)
    if len(sampled) != count:
        raise ValueError(f"{len(sampled)} values for {count} sampled tokens")
    values: list[Any] = []
    at = 0
    for segment in segments:
        n = len(segment)
        if segment.author is Author.MODEL:
            values += sampled[at : at + n]
            at += n
        else:
            values += [None] * n
    return values


def _joined(parts: Iterable[Sequence[Any]]) -> list[Any]:
    # A segment at a time: a step has a million tokens, and its thread shares the interpreter with the training.
    whole: list[Any] = []
    for part in parts:
        whole += part
    return whole


def _last_turn(trajectory: Trajectory) -> list[int]:
    """Ids of the last run of sampled segments: the final response."""
    ids: list[int] = []
    for segment in reversed(trajectory.segments):
        if segment.author is not Author.MODEL:
            if ids:
                break
            continue
        ids = segment.token_ids + ids
    return ids
