"""Rewards of another machine, over HTTP: ``http://host:port/NAME``, as `k3rl rewards serve` offers them.

The server says once what the reward is (scope, what it depends on), then scores. A connection that fails and a server
that is busy are tried again; a refusal is not. The token of ``K3RL_REWARDS_TOKEN`` is sent along where it is set.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from k3rl.errors import UserError
from k3rl.types import Outcome
from rewards.api import GraderError, JudgeError, RewardFunction, Score, Scored, Verdict
from rewards.wire import Malformed, scored_to_json, verdict_from_json

TOKEN_VARIABLE = "K3RL_REWARDS_TOKEN"
CONNECT_S, DESCRIBE_S = 5.0, 20.0
ATTEMPTS, PAUSE_S = 4, 0.25
RETRIED = frozenset({429, 502, 503, 504})
MAX_REPLY_BYTES = 16 << 20


def _headers() -> dict[str, str]:
    token = os.environ.get(TOKEN_VARIABLE)
    return {"Authorization": f"Bearer {token}"} if token else {}


def remote_reward(address: str) -> RewardFunction:
    """The reward behind an address. Raises `UserError` where nobody answers or the server has no such reward."""
    url, _, name = address.rstrip("/").rpartition("/")
    if not name or url.endswith(":/") or "//" not in url:
        raise UserError(f"the remote reward '{address}' is not of the form http://host:port/NAME")
    try:
        reply = httpx.get(
            f"{url}/rewards/{name}",
            headers=_headers(),
            timeout=DESCRIBE_S,
            trust_env=False,
            follow_redirects=False,
        )
    except httpx.HTTPError as error:
        raise UserError(f"the remote reward '{address}' does not answer: {error}") from error
    if reply.status_code != 200:
        raise UserError(f"the remote reward '{address}' refuses: {_reason(reply.status_code, reply.content)}")
    try:
        described = reply.json()
        scope, depends = described["scope"], described["depends"]
        deterministic, timeout_s = bool(described["deterministic"]), described["timeout_s"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"'{address}' does not speak the protocol of `k3rl rewards serve`") from error
    if scope not in ("trajectory", "group") or depends not in ("content", "response", "trajectory"):
        raise UserError(f"'{address}' describes its reward as {scope!r} by {depends!r}")
    function = _group(url, name) if scope == "group" else _single(url, name)
    function.__doc__ = str(described.get("doc", ""))
    return RewardFunction(
        address, function, scope, depends, True, deterministic, timeout_s, origin=address, address=address
    )


def _single(url: str, name: str) -> Callable[..., Any]:
    async def score(scored: Scored, **arguments: Any) -> Score:
        return _unwrap((await _ask(url, name, [scored], arguments))[0])

    return score


def _group(url: str, name: str) -> Callable[..., Any]:
    async def score(group: Sequence[Scored], **arguments: Any) -> list[Score]:
        return [_unwrap(v) for v in await _ask(url, name, group, arguments)]

    return score


def _unwrap(verdict: Verdict) -> Score:
    """The other side's failure keeps its kind here."""
    match verdict.outcome:
        case Outcome.SCORED:
            assert verdict.score is not None
            return verdict.score
        case Outcome.TIMED_OUT:
            raise TimeoutError(verdict.explanation)
        case Outcome.JUDGE_FAILED:
            raise JudgeError(verdict.explanation)
    raise GraderError(verdict.explanation)


async def _ask(url: str, name: str, items: Sequence[Scored], arguments: dict[str, Any]) -> list[Verdict]:
    body = json.dumps({"arguments": arguments, "items": [scored_to_json(s) for s in items]}).encode()
    headers = {**_headers(), "Content-Type": "application/json"}
    timeout = httpx.Timeout(None, connect=CONNECT_S)  # the call's own limit is set around it
    trouble = ""
    async with httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=timeout) as client:
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(PAUSE_S * 2**attempt)
            try:
                status, content = await _post(client, f"{url}/rewards/{name}", body, headers)
            except httpx.TransportError as error:
                trouble = f"{type(error).__name__}: {error}"
                continue
            if status == 200:
                return _verdicts(content, len(items), url)
            trouble = _reason(status, content)
            if status not in RETRIED:
                break
    raise GraderError(f"the reward server {url} failed: {trouble}")


async def _post(
    client: httpx.AsyncClient, url: str, body: bytes, headers: dict[str, str]
) -> tuple[int, bytes]:
    parts, size = [], 0
    async with client.stream("POST", url, content=body, headers=headers) as reply:
        async for part in reply.aiter_bytes():
            size += len(part)
            if size > MAX_REPLY_BYTES:
                raise GraderError(f"the reward server {url} sent more than {MAX_REPLY_BYTES} bytes")
            parts.append(part)
        return reply.status_code, b"".join(parts)


def _verdicts(content: bytes, count: int, url: str) -> list[Verdict]:
    try:
        lines = json.loads(content)["verdicts"]
        verdicts = [verdict_from_json(line) for line in lines]
    except (ValueError, KeyError, TypeError, Malformed) as error:
        raise GraderError(f"the reward server {url} answered nonsense: {error}") from error
    if len(verdicts) != count:
        raise GraderError(f"the reward server {url} answered {len(verdicts)} verdicts for {count}")
    return verdicts


def _reason(status: int, content: bytes) -> str:
    try:
        detail = json.loads(content)["detail"]
    except (ValueError, KeyError, TypeError):
        detail = content[:200].decode(errors="replace")
    return f"{detail} (HTTP {status})"
