"""A record of somebody else's making as a row of rollouts: what it says, in our columns; nothing is made up.

Known shapes: ``messages`` (also ``conversations`` with from/value), ``prompt`` with ``completion``, ``response`` or
``output`` (text or messages), as verifiers, prime-rl, TRL and most data sets write them; and traces as a graph of
``nodes``. What no column is made for stays as a column of its own name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

Record = Mapping[str, Any]
Messages = list[dict[str, Any]]

_PROBLEM = ("problem_id", "example_id", "prompt_id", "question_id", "uid", "id")
_STEP = ("step", "global_step", "training_step", "train_step")
_REWARD = ("reward", "score")
_DOMAIN = ("domain", "task", "env_name", "env_id", "data_source", "dataset", "source", "category", "subset")
_STOP = ("stop_reason", "stop_condition", "finish_reason")
_RESPONSE = ("completion", "response", "output", "completions", "responses", "generation", "generated_text")
_QUESTION = ("prompt", "question", "problem", "instruction", "input", "query")
_CONVERSATION = ("messages", "conversations", "conversation", "chat")
_PARTS = ("reward_components", "rewards", "scores", "metrics")
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
_TOKENS = (
    "prompt_ids",
    "response_ids",
    "logprobs",
    "sampled_mask",
    "channels",
    "token_advantages",
    "trainer_logprobs",
)
_ALIGNED = (
    "logprobs",
    "sampled_mask",
    "channels",
    "token_advantages",
    "trainer_logprobs",
    "teacher_logprobs",
)
_OWN = {
    "effort",
    "error",
    "advantage",
    "is_truncated",
    "truncated",
    "nodes",
    "draw",
    "sample",
    "token_usage",
    "info",
}
_OWN |= {
    "prompt_ids",
    "response_ids",
    "prompt_text",
    "response_text",
    "reasoning",
    "content",
    "messages_json",
    "turns",
}
_OWN |= {"turns_json", "status", "rid", "run"}
_MOST_EXTRA = 64
_LONGEST_EXTRA = 2000


def row_of(record: Record, default_step: int = 0) -> dict[str, Any]:
    """Everything but ``draw`` and ``sample``, which follow from the rows before. Raises `ValueError` where there is
    nothing to read: neither messages nor a prompt nor a response."""
    prompt, said, tokens = _conversation(record)
    if not prompt and not said:
        keys = ", ".join(map(str, record)) or "none"
        raise ValueError(f"it holds no messages, prompt or response; its keys are {keys}")
    last = next((m for m in reversed(said) if m.get("role") == "assistant"), {})
    reward, parts = _reward(record)
    error = record.get("error")
    step = _whole(_first(record, _STEP, _prime_rl(record).get("step")))
    truncated = record.get("is_truncated", record.get("truncated"))
    problem = _first(record, _PROBLEM)
    task = record.get("task")
    if isinstance(task, Mapping) and isinstance(task.get("key") or task.get("hash"), str):
        problem = task.get("key") or task["hash"]  # a trace's own id names the rollout, not the problem
    return {
        "step": step if step is not None and 0 <= step < 2**31 else default_step,
        "problem_id": str(problem) if problem is not None else _digest(prompt or said[:1]),
        "domain": _domain(record),
        "effort": _word(record.get("effort")),
        "status": "failed" if error else "truncated" if truncated is True else "complete",
        "stop_reason": _word(_first(record, _STOP)),
        "error": _text(error) if error else None,
        "reward": reward,
        "reward_outcome": None if reward is None else "scored",
        "reward_components": [{"name": n, "value": v} for n, v in parts.items()],
        "advantage": _number(record.get("advantage")),
        "prompt_text": _transcript(prompt),
        "response_text": _transcript(said)
        if len(said) > 1
        else text_of(last.get("content")) or _transcript(said),
        "reasoning": text_of(last.get("reasoning_content") or last.get("reasoning") or last.get("thinking")),
        "content": text_of(last.get("content")),
        "messages_json": json.dumps(prompt, ensure_ascii=False),
        "turns_json": json.dumps(said, ensure_ascii=False),
        "sampled_tokens": _sampled_tokens(record, tokens),
        "turns": sum(m.get("role") == "assistant" for m in said),
        **tokens,
        **_extra(record),
    }


def text_of(content: Any) -> str:
    """A message's content as text: its text parts, and in brackets what is none."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(
            part if isinstance(part, str) else str(part.get("text") or f"[{part.get('type', 'part')}]")
            for part in content
            if isinstance(part, str | Mapping)
        )
    return _text(content)


# -- the conversation --------------------------------------------------------------------------------------


def _conversation(record: Record) -> tuple[Messages, Messages, dict[str, Any]]:
    """What was given, what was answered, and the tokens of both where the record has them."""
    if isinstance(record.get("nodes"), list):
        return _graph(record["nodes"])
    tokens = {name: list(record[name]) for name in _TOKENS if isinstance(record.get(name), list)}
    tokens = _aligned(tokens)
    whole = _messages(_first(record, _CONVERSATION))
    answer = _messages(_single(_first(record, _RESPONSE)), "assistant")
    if whole and not answer:
        cut = next((i for i, m in enumerate(whole) if m.get("role") == "assistant"), len(whole))
        return whole[:cut], whole[cut:], tokens
    prompt = whole or _messages(_single(_first(record, _QUESTION)), "user")
    if not answer and "answer" in record and prompt:
        answer = _messages(record["answer"], "assistant")
    return prompt, answer, tokens


def _messages(value: Any, role: str = "") -> Messages:
    """Messages of a list, of JSON in text, or one message of a text by ``role``."""
    if isinstance(value, str):
        if role or not value.lstrip().startswith("["):
            return [{"role": role, "content": value}] if role and value else []
        try:
            value = json.loads(value)
        except ValueError:
            return []
    if isinstance(value, Mapping):
        value = [value]
    found = []
    for message in value if isinstance(value, list) else []:
        if not isinstance(message, Mapping):
            return []
        said = {k: v for k, v in message.items() if v is not None}
        if "from" in said and "value" in said:
            said = {"role": said.pop("from"), "content": said.pop("value"), **said}
        said["role"] = _ROLES.get(str(said.get("role")), str(said.get("role") or role or "user"))
        found.append(said)
    return found


def _graph(nodes: list[Any]) -> tuple[Messages, Messages, dict[str, Any]]:
    """The path to the last node of a graph of messages, and its tokens."""
    path: list[Mapping[str, Any]] = []
    at: Any = len(nodes) - 1
    while (
        isinstance(at, int)
        and 0 <= at < len(nodes)
        and len(path) <= len(nodes)
        and isinstance(nodes[at], Mapping)
    ):
        path.insert(0, nodes[at])
        at = nodes[at].get("parent")
    cut = next((i for i, node in enumerate(path) if node.get("sampled")), len(path))
    said = [_messages(node.get("message")) for node in path]
    prompt, answer = [m for some in said[:cut] for m in some], [m for some in said[cut:] for m in some]
    ids = [i for node in path for i in node.get("token_ids") or ()]
    mask = [bool(m) for node in path for m in node.get("mask") or ()]
    if not ids or len(ids) != len(mask) or True not in mask:
        return prompt, answer, {}
    first = mask.index(True)
    tokens = {"prompt_ids": ids[:first], "response_ids": ids[first:], "sampled_mask": mask[first:]}
    for ours, theirs in (
        ("logprobs", "logprobs"),
        ("token_advantages", "advantages"),
        ("trainer_logprobs",) * 2,
    ):
        values = [v for node in path for v in node.get(theirs) or ()]
        if len(values) == sum(mask):
            numbers = iter(values)
            tokens[ours] = [next(numbers) if m else None for m in mask][first:]
    return prompt, answer, tokens


def _aligned(tokens: dict[str, Any]) -> dict[str, Any]:
    """Without what is not as long as the response: a number never moves to a neighbour's token."""
    length = len(tokens.get("response_ids") or ())
    return {name: v for name, v in tokens.items() if name not in _ALIGNED or (length and len(v) == length)}


def _single(value: Any) -> Any:
    """The only text of a list of one."""
    return value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str) else value


def _transcript(messages: Messages) -> str:
    """Messages as a person reads them, each under its role."""
    return "\n\n".join(f"[{m.get('role')}]\n{_spoken(m)}" for m in messages)


def _spoken(message: Mapping[str, Any]) -> str:
    calls = message.get("tool_calls")
    thought = text_of(message.get("reasoning_content") or message.get("reasoning"))
    parts = [f"(thinking) {thought}" if thought else "", text_of(message.get("content"))]
    parts += [f"(calls) {_text(c.get('function', c) if isinstance(c, Mapping) else c)}" for c in calls or ()]
    return "\n".join(p for p in parts if p)


# -- the other columns -------------------------------------------------------------------------------------


def _reward(record: Record) -> tuple[float | None, dict[str, float]]:
    """The total and its named parts. Weighted rewards add up where there is no total."""
    parts: dict[str, float] = {}
    weighted: list[float] = []
    for name in _PARTS:
        for key, value in _pairs(record.get(name)):
            score = _number(value.get("score")) if isinstance(value, Mapping) else _number(value)
            if score is not None:
                parts[key] = score
                if isinstance(value, Mapping):
                    weighted.append(score * (_number(value.get("weight")) or 1.0))
    total = _number(_first(record, _REWARD))
    return (sum(weighted) if total is None and weighted else total), parts


def _pairs(value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(str(k), v) for k, v in value.items()]
    if isinstance(value, list):
        return [(str(p["name"]), p.get("value")) for p in value if isinstance(p, Mapping) and "name" in p]
    return []


def _domain(record: Record) -> str | None:
    for name in _DOMAIN:
        value = record.get(name)
        if isinstance(value, str) and value:
            return value
    named = _prime_rl(record).get("env_name")
    if named is None and isinstance(record.get("task"), Mapping):
        named = record["task"].get("type")
    return str(named) if named else None


def _prime_rl(record: Record) -> Mapping[str, Any]:
    info = record.get("info")
    inner = info.get("prime_rl") if isinstance(info, Mapping) else None
    return inner if isinstance(inner, Mapping) else {}


def _sampled_tokens(record: Record, tokens: Mapping[str, Any]) -> int | None:
    if tokens.get("sampled_mask"):
        return sum(map(bool, tokens["sampled_mask"]))
    usage = record.get("token_usage")
    if isinstance(usage, Mapping):
        return _whole(usage.get("output_tokens"))
    return len(tokens["response_ids"]) if tokens.get("response_ids") else None


def _extra(record: Record) -> dict[str, Any]:
    """What no column is made for. Nested values as JSON."""
    used = {
        *_PROBLEM,
        *_STEP,
        *_REWARD,
        *_STOP,
        *_RESPONSE,
        *_QUESTION,
        *_CONVERSATION,
        *_PARTS,
        *_ALIGNED,
        *_OWN,
    }
    found: dict[str, Any] = {}
    for name, value in record.items():
        if len(found) == _MOST_EXTRA:
            break
        if str(name).lower() in used or value is None or (name == "domain" and isinstance(value, str)):
            continue
        key = re.sub(r"[\x00-\x1f]", " ", str(name))[:80]
        found[key] = value if isinstance(value, bool | int | float) else _text(value)[:_LONGEST_EXTRA]
    if isinstance(record.get("info"), Mapping | list | str) and record["info"]:
        found["info"] = _text(record["info"])[:_LONGEST_EXTRA]
    return found


def _first(record: Record, names: Iterable[str], default: Any = None) -> Any:
    return next((record[n] for n in names if record.get(n) is not None), default)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _whole(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _word(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _digest(messages: Messages) -> str:
    whole = json.dumps(messages, ensure_ascii=False, sort_keys=True, default=str)
    return hashlib.blake2b(whole.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()
