"""`Scored` and `Verdict` as JSON: between a worker and its reward processes, and between machines.

What comes from outside is checked field by field; nothing is unpickled. Log-probs and routing stay at home: no reward
reads them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from k3rl.types import (
    Author,
    Channel,
    Effort,
    Outcome,
    ParsedResponse,
    Problem,
    Segment,
    Status,
    StopReason,
    ToolCall,
    Trajectory,
)
from rewards.api import Score, Scored, Verdict

MAX_EXPLANATION_CHARACTERS = 4000
MAX_TRACE_CHARACTERS = 4_000_000


class Malformed(ValueError):
    """What arrived is not what it should be."""


def verdict_to_json(verdict: Verdict) -> dict[str, Any]:
    score = verdict.score
    return {
        "outcome": verdict.outcome.value,
        "value": score.value if score else None,
        "components": score.components if score else {},
        "explanation": verdict.explanation,
        "trace": score.trace if score else "",
        "seconds_s": verdict.seconds_s,
    }


def verdict_from_json(line: Any) -> Verdict:
    """Raises `Malformed`, also for numbers that are not finite."""
    try:
        outcome = Outcome(line["outcome"])
        explanation = str(line["explanation"])[:MAX_EXPLANATION_CHARACTERS]
        seconds_s = float(line["seconds_s"])
        if outcome is not Outcome.SCORED:
            return Verdict(outcome, None, explanation, seconds_s)
        value = float(line["value"])
        components = {str(k): float(v) for k, v in line["components"].items()}
        trace = str(line.get("trace", ""))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Malformed(f"it is not a verdict ({error})") from error
    if not all(math.isfinite(v) for v in (value, seconds_s, *components.values())):
        raise Malformed("its value is not finite")
    if len(trace) > MAX_TRACE_CHARACTERS:
        raise Malformed(f"its trace has {len(trace)} characters, at most {MAX_TRACE_CHARACTERS} are kept")
    return Verdict(outcome, Score(value, components, explanation, trace), explanation, seconds_s)


def response_to_json(response: ParsedResponse) -> dict[str, Any]:
    return {**asdict(response), "channels": [c.value for c in response.channels]}


def response_from_json(value: Mapping[str, Any]) -> ParsedResponse:
    return ParsedResponse(
        reasoning=str(value["reasoning"]),
        content=str(value["content"]),
        tool_calls=tuple(ToolCall(**call) for call in value.get("tool_calls", ())),
        complete=bool(value.get("complete", True)),
        channels=tuple(Channel(c) for c in value.get("channels", ())),
        errors=tuple(map(str, value.get("errors", ()))),
    )


def problem_to_json(problem: Problem) -> dict[str, Any]:
    return {**asdict(problem), "effort": problem.effort and problem.effort.value}


def problem_from_json(value: Mapping[str, Any]) -> Problem:
    effort = value.get("effort")
    return Problem(**{**value, "effort": Effort(effort) if effort else None})


def scored_to_json(scored: Scored) -> dict[str, Any]:
    t = scored.trajectory
    return {
        "problem": problem_to_json(scored.problem),
        "response": response_to_json(scored.response),
        "turns": [response_to_json(turn) for turn in scored.turns],
        "trajectory": {
            "draw": t.draw,
            "sample": t.sample,
            "effort": t.effort and t.effort.value,
            "prompt_ids": t.prompt_ids,
            "segments": [
                {"author": s.author.value, "channel": s.channel.value, "token_ids": s.token_ids}
                for s in t.segments
            ],
            "status": t.status.value,
            "stop_reason": t.stop_reason and t.stop_reason.value,
            "environment_state": t.environment_state,
        },
    }


def scored_from_json(value: Any) -> Scored:
    """Raises `Malformed`. The trajectory's log-probs are NaN: they did not travel."""
    try:
        problem = problem_from_json(value["problem"])
        t = value.get("trajectory") or {}
        effort, stop = t.get("effort"), t.get("stop_reason")
        trajectory = Trajectory(
            problem_id=problem.id,
            draw=int(t.get("draw", 0)),
            sample=int(t.get("sample", 0)),
            domain=problem.domain,
            effort=Effort(effort) if effort else problem.effort,
            prompt_ids=[int(i) for i in t.get("prompt_ids", ())],
            segments=[_segment(s) for s in t.get("segments", ())],
            status=Status(t.get("status", Status.COMPLETE)),
            stop_reason=StopReason(stop) if stop else None,
            environment_state=dict(t.get("environment_state") or {}),
        )
        response = response_from_json(value["response"])
        turns = tuple(response_from_json(turn) for turn in value.get("turns", ()))
        return Scored(problem, response, trajectory, turns)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Malformed(f"it is not a trajectory to be scored ({type(error).__name__}: {error})") from error


def _segment(value: Mapping[str, Any]) -> Segment:
    author, ids = Author(value["author"]), [int(i) for i in value["token_ids"]]
    logprobs = [math.nan] * len(ids) if author is Author.MODEL else []
    return Segment(author, Channel(value["channel"]), ids, logprobs)
