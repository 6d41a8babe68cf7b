"""Rewards over HTTP: a server as `k3rl rewards serve` runs it, and workers that ask it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
from reward_helpers import RENDERER, make_group, make_problem

from k3rl.config.rewards import RewardConfig, RewardPart
from k3rl.errors import UserError
from k3rl.types import Outcome, Reward
from rewards.registry import get_reward
from rewards.wire import Malformed, scored_from_json, scored_to_json, verdict_from_json
from rewards.worker import RewardWorker, scored_view

HOSTILE = Path(__file__).with_name("hostile_rewards.py")


def started(*arguments: str, token: str = "") -> tuple[subprocess.Popen[str], str]:
    """A server in its own process, and its address."""
    environment = {**os.environ, "K3RL_REWARDS_TOKEN": token}
    command = [sys.executable, "-m", "k3rl.cli", "rewards", "serve", "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    for line in process.stdout:
        if found := re.search(r"http://[\d.]+:\d+", line):
            return process, found[0]
    raise AssertionError("the server did not start")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    process, url = started("--module", str(HOSTILE), "--timeout-s", "1.5")
    yield url
    process.terminate()
    process.wait(20)


def scores(url: str, contents: list[str], reward: dict | None = None, **options) -> list[Reward]:
    part = RewardPart(reward=url, arguments=reward or {})
    worker = RewardWorker(RewardConfig(parts=(part,), retries=0, **options), RENDERER)
    try:
        return worker.score(make_group(contents, make_problem("p", {"name": "exact", "answer": "8"})))
    finally:
        worker.close()


def test_a_remote_reward_says_what_the_local_one_says(server):
    contents = [r"\boxed{8}", "The answer is 9.", "16/2", "none"]
    remote = scores(f"{server}/math", contents)
    worker = RewardWorker(RewardConfig(), RENDERER)
    local = worker.score(make_group(contents, make_problem("p", {"name": "math", "answer": "8"})))
    worker.close()
    assert [r.total for r in remote] == [r.total for r in local] == [1.0, 0.0, 1.0, 0.0]
    assert "read '16/2'" in remote[2].explanation


def test_group_rewards_and_failures_keep_their_kind(server):
    assert [r.total for r in scores(f"{server}/wrong_length", ["1", "2"])] == [1.0, 1.0]
    first, bad, last = scores(f"{server}/raises", ["1", "bad", "2"])
    assert (first.total, last.total) == (1.0, 1.0)
    assert bad.outcome is Outcome.GRADER_FAILED
    assert "the reward's own bug" in bad.explanation
    slow, good = scores(f"{server}/loops_forever", ["bad", "1"])
    assert (slow.outcome, good.total) == (Outcome.TIMED_OUT, 1.0)


def test_what_the_server_does_not_know_is_refused_with_the_nearest_name(server):
    with pytest.raises(UserError, match="did you mean 'math'"):
        get_reward(f"{server}/mth")
    with pytest.raises(UserError, match="does not answer"):
        get_reward("http://127.0.0.1:9/math")
    for name in (f"{HOSTILE}:raises".replace("/", "%2F"), "os:system", "os.system"):
        assert httpx.get(f"{server}/rewards/{name}", trust_env=False).status_code == 404
        body = {"arguments": {}, "items": []}
        assert httpx.post(f"{server}/rewards/{name}", json=body, trust_env=False).status_code in (404, 422)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"not json", "not JSON"),
        (b"[1]", "not a mapping"),
        (b"[" * 100_000, "not JSON"),
        (b'{"items": 3}', "a list"),
        (b'{"arguments": {"answer": 1}, "items": [{"problem": 3}]}', "not a trajectory"),
        (b'{"arguments": {"answr": 1}, "items": []}', "did you mean 'answer'"),
    ],
)
def test_malformed_requests_are_refused_and_the_server_lives(server, body, says):
    reply = httpx.post(f"{server}/rewards/exact", content=body, trust_env=False)
    assert reply.status_code == 422
    assert says in reply.json()["detail"]
    assert httpx.get(f"{server}/health", trust_env=False).json() == {"status": "ok"}


def test_a_token_guards_everything_but_health(monkeypatch):
    process, url = started(token="open-sesame")
    try:
        assert httpx.get(f"{url}/rewards/exact", trust_env=False).status_code == 401
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
        monkeypatch.setenv("K3RL_REWARDS_TOKEN", "wrong")
        with pytest.raises(UserError, match="asks for a token"):
            get_reward(f"{url}/exact")
        monkeypatch.setenv("K3RL_REWARDS_TOKEN", "open-sesame")
        assert [r.total for r in scores(f"{url}/exact", ["8", "9"])] == [1.0, 0.0]
    finally:
        process.terminate()
        process.wait(20)


class Unreliable(BaseHTTPRequestHandler):
    """Busy twice, then an answer of the kind that the test asks for."""

    busy = 2
    answer = b""

    def do_GET(self) -> None:
        self._send(200, json.dumps({"scope": "trajectory", "depends": "content", "deterministic": False,
                                    "timeout_s": None, "doc": ""}).encode())  # fmt: skip

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        cls = type(self)
        if cls.busy:
            cls.busy -= 1
            self._send(503, b"busy")
        else:
            self._send(200, cls.answer)

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


GOOD = {"outcome": "scored", "value": 0.5, "components": {}, "explanation": "", "seconds_s": 0.1}


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ({"verdicts": [GOOD]}, Outcome.SCORED),
        ({"verdicts": []}, Outcome.GRADER_FAILED),
        ({"verdicts": [{**GOOD, "value": float("nan")}]}, Outcome.GRADER_FAILED),
        ({"verdicts": [{**GOOD, "value": "high"}]}, Outcome.GRADER_FAILED),
        ({"verdicts": [{**GOOD, "outcome": "great"}]}, Outcome.GRADER_FAILED),
        ({"other": 1}, Outcome.GRADER_FAILED),
    ],
)
def test_a_busy_server_is_asked_again_and_nonsense_is_no_zero(answer, outcome):
    Unreliable.busy, Unreliable.answer = 2, json.dumps(answer).encode()
    fake = HTTPServer(("127.0.0.1", 0), Unreliable)
    thread = threading.Thread(target=fake.serve_forever, daemon=True)
    thread.start()
    try:
        (reward,) = scores(f"http://127.0.0.1:{fake.server_port}/x", ["8"], timeout_s=20.0)
    finally:
        fake.shutdown()
        fake.server_close()
    assert reward.outcome is outcome
    assert reward.total == (0.5 if outcome is Outcome.SCORED else None)


def test_a_trajectory_survives_the_journey():
    group = make_group(
        ["8 <|tool|> é 數"], make_problem("p", {"name": "exact", "answer": "8"}, budget_tokens=5)
    )
    view = scored_view(group.problem, group.trajectories[0], RENDERER)
    again = scored_from_json(json.loads(json.dumps(scored_to_json(view))))
    assert (again.problem, again.response, again.turns) == (view.problem, view.response, view.turns)
    assert again.trajectory.token_ids == view.trajectory.token_ids
    assert again.thinking_tokens == view.thinking_tokens
    with pytest.raises(Malformed):
        verdict_from_json({"outcome": "scored"})
