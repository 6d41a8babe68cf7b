"""The judge behind HTTP: a real server that is well, slow, busy, down, or talks nonsense."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rewards.api import JudgeError
from rewards.grm import JudgeSession, Stage, play
from rewards.grm.judges import EndpointJudge
from rewards.grm.protocol import Criterion
from rewards.grm.reward import Court

_path = list(sys.path)
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from tournament import noise_for, trial  # noqa: E402

sys.path[:] = _path

Answer = Callable[[dict[str, Any], int], tuple[int, dict[str, str], bytes]]


def scripted(request: dict[str, Any]) -> dict[str, Any]:
    """A chat model that follows the protocol and prefers the candidate with more letters 'a'."""
    messages = request["messages"]
    asked = json.loads(next(m["content"] for m in messages if m["role"] == "user").split("\n")[1])
    read = [
        json.loads(m["content"]) for m in messages if m["role"] == "tool" and m["content"].startswith("{")
    ]
    done = sum(m["role"] == "tool" for m in messages)
    labels = asked["candidates"]
    if done < len(labels):
        calls = [("read_candidate", {"candidate": label}) for label in labels]
    elif done == len(labels):
        calls = [("write_rubric", {"criteria": [{"name": "a", "description": "letters a", "weight": 1}]})]
    elif done == len(labels) + 1:
        calls = [
            (
                "score_candidate",
                {"candidate": r["candidate"], "scores": {"a": found}, "justification": "counted"},
            )
            for r in read
            for found in [min(10, r["text"].count("a"))]
        ]
    else:
        calls = [("record", {})]
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": f"c{n}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for n, (name, arguments) in enumerate(calls)
        ],
    }


def completion(message: dict[str, Any]) -> bytes:
    usage = {"prompt_tokens": 100, "completion_tokens": 10}
    return json.dumps({"choices": [{"message": message}], "usage": usage}).encode()


def well(request: dict[str, Any], number: int) -> tuple[int, dict[str, str], bytes]:
    return 200, {}, completion(scripted(request))


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], str]]:
    servers: list[ThreadingHTTPServer] = []

    def start(answer: Answer) -> str:
        counter = iter(range(10**6))

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, headers, body = answer(request, next(counter))
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}/v1"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def judged(url: str, **fields: Any) -> tuple[JudgeSession, EndpointJudge, str]:
    """One judgement; and what it failed with."""

    async def run() -> tuple[JudgeSession, EndpointJudge, str]:
        session = JudgeSession("Which?", {"A": "banana <|close|>", "B": "cherry a"})
        judge = EndpointJudge(url, "m", **{"pause_s": 0.01, "timeout_s": 2.0, **fields})
        try:
            await judge(session)
        except JudgeError as error:
            return session, judge, str(error)
        finally:
            await judge.close()
        return session, judge, ""

    return asyncio.run(run())


def test_a_judge_that_keeps_to_the_protocol_is_heard_and_its_tokens_counted(serve):
    session, judge, _ = judged(serve(well), input_price=2.0, output_price=10.0)
    assert session.totals() == {"A": 3.0, "B": 1.0}
    assert (session.tokens, judge.tokens) == (440, 440)
    assert session.cost == pytest.approx(4 * (100 * 2 + 10 * 10) / 1e6)


def test_a_busy_server_is_asked_again_as_late_as_it_wishes(serve):
    times: list[float] = []

    def busy(request: dict[str, Any], number: int) -> tuple[int, dict[str, str], bytes]:
        times.append(time.monotonic())
        return (429, {"Retry-After": "0.4"}, b"") if number in (0, 2) else well(request, number)

    session, _, _ = judged(serve(busy))
    assert session.stage is Stage.RECORDED
    assert times[1] - times[0] >= 0.4


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_a_server_in_trouble_is_asked_again_and_then_given_up(serve, status):
    session, _, why = judged(serve(lambda r, n: (status, {}, b"no")), retries=2)
    assert session.void
    assert f"HTTP {status}, 3 times" in why


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{not json", "no chat completion"),
        (b'{"choices": []}', "no chat completion"),
        (b'{"choices": [{"message": "10/10"}]}', "without a message"),
        (b"[]", "no chat completion"),
    ],
)
def test_an_answer_that_is_none_is_no_score(serve, body, words):
    session, _, why = judged(serve(lambda r, n: (200, {}, body)))
    assert session.void
    assert words in why


def test_a_half_written_answer_is_asked_for_again(serve):
    def half(request: dict[str, Any], number: int) -> tuple[int, dict[str, str], bytes]:
        status, headers, body = well(request, number)
        return (
            (status, {"Content-Length": str(len(body) + 50)}, body[:40])
            if number == 1
            else (status, headers, body)
        )

    def closing(request: dict[str, Any], number: int) -> tuple[int, dict[str, str], bytes]:
        status, headers, body = half(request, number)
        return status, {**headers, "Connection": "close"}, body

    session, _, why = judged(serve(closing))
    assert (session.stage, why) == (Stage.RECORDED, "")


def test_prose_is_no_judgement(serve):
    prose = completion({"role": "assistant", "content": "A is better: 10/10. record(A)"})
    session, _, _ = judged(serve(lambda r, n: (200, {}, prose)))
    assert session.void
    assert [s.accepted for s in session.steps] == [False] * 4


def test_slow_and_absent_servers_end_in_time(serve):
    def slow(request: dict[str, Any], number: int) -> tuple[int, dict[str, str], bytes]:
        time.sleep(1.5)
        return well(request, number)

    began = time.monotonic()
    session, _, why = judged(serve(slow), judgement_timeout_s=0.5)
    assert session.void
    assert "no verdict within 0.5 s" in why
    assert time.monotonic() - began < 1.4
    session, _, why = judged("http://127.0.0.1:9/v1", retries=1)
    assert session.void
    assert "2 times" in why


def test_a_spent_budget_ends_judging(serve):
    url = serve(well)
    session, _, why = judged(url, max_tokens_total=200)
    assert session.void
    assert "budget of 200 tokens is spent" in why


def test_a_tournament_survives_a_server_that_fails_now_and_then(serve):
    """Every sixth request fails for good: its judgement is void, the rest stand, and the ranking is right."""

    def flaky(request: dict[str, Any], number: int) -> tuple[int, dict[str, str], bytes]:
        return (400, {}, b"bad luck") if number % 16 == 15 else well(request, number)

    async def run() -> tuple[Any, Court]:
        court = Court(EndpointJudge(serve(flaky), "m"), "Which?", ["", "a", "aa", "aaa", "aaaa"])
        try:
            return await play("all_pairs", 5, court.pair), court
        finally:
            await court.judge.close()

    result, court = asyncio.run(run())
    assert 0 < result.health()["void_rate"] < 0.5
    assert court.failures
    assert all(won == float(i > j) for i, j, won in result.played)


def test_swiss_ranks_as_all_pairs_do_for_less_than_half_of_the_calls():
    scale = noise_for(0.9)
    means = {}
    for kind in ("all_pairs", "swiss"):
        found = [trial(kind, 16, scale, 0.5, seed) for seed in range(100)]
        means[kind] = [sum(f[k] for f in found) / len(found) for k in (0, 1)]
    assert means["all_pairs"][0] - means["swiss"][0] < 0.03
    assert means["swiss"][1] < 0.5 * means["all_pairs"][1]


def test_a_weak_judge_is_led_through_the_protocol_and_asked_only_where_it_has_a_choice(serve):
    """A model that can do no more than fill in the schema it is given."""
    asked = []

    def filled(request: dict[str, Any], _: int) -> tuple[int, dict[str, str], bytes]:
        form = request["response_format"]["json_schema"]
        asked.append(form["name"])
        assert "tools" not in request
        content = json.dumps(fill(form["schema"], request["messages"][0]["content"]))
        message = {"role": "assistant", "content": content}
        body = {"choices": [{"message": message}], "usage": {"prompt_tokens": 5, "completion_tokens": 5}}
        return 200, {}, json.dumps(body).encode()

    judge = EndpointJudge(serve(filled), "weak", steer=True)
    session = JudgeSession("Most a?", {"A": "a<b", "B": "aaa"}, [Criterion("a", "letters a", 2.0)])

    async def run() -> None:
        try:
            await judge(session)
        finally:
            await judge.close()

    asyncio.run(run())
    assert session.stage is Stage.RECORDED
    assert asked == ["write_rubric", "score_candidate", "score_candidate"]
    assert [s.tool for s in session.steps] == ["read_candidate"] * 2 + asked + ["record"]
    assert session.totals() == {"A": 1.0, "B": 3.0}


def fill(schema: dict[str, Any], prompt: str) -> Any:
    """The least value of a schema; a number is how many letters a the candidate that is scored has."""
    if "enum" in schema:
        return schema["enum"][0]
    match schema["type"]:
        case "object":
            return {key: fill(part, prompt) for key, part in schema["properties"].items()}
        case "array":
            return [fill(schema["items"], prompt)] * schema.get("minItems", 1)
        case "integer":
            read = map(json.loads, re.findall(r'\{"candidate": "\w", "text".*\}', prompt))
            texts = {r["candidate"]: r["text"] for r in read}
            return texts[prompt.rsplit("candidate: ", 1)[1]].count("a") if "candidate: " in prompt else 1
        case _:
            return "so"
