"""The chat API over a real native engine: its answers are the engine's own, and what it cannot do it says."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from k3rl.chat import load_renderer
from k3rl.models import ModelConfig, load_model
from rollout.engine import Generation, SamplingParams
from rollout.native import NativeEngine
from rollout.serving import ChatEngine, Served, make_app

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]


@pytest.fixture(scope="module")
def model():
    return load_model(ModelConfig(path="k3-nano"), seed=3).eval().requires_grad_(False)


def engine_of(model, renderer, slots=4):
    return NativeEngine(
        model, max_slots=slots, max_context=512, eos_token_ids=renderer.stop_token_ids, decode=renderer.decode
    )


@pytest.fixture(scope="module")
def renderer():
    return load_renderer("k3-nano")


@pytest.fixture(scope="module")
def server(model, renderer):
    chat = ChatEngine(engine_of(model, renderer), renderer, "nano", 512, thinking=False)
    served = Served(make_app(chat, token="secret"))
    yield served
    served.close()
    chat.close()


def ask(server, body, token="secret"):
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return httpx.post(
        f"{server.url}/chat/completions", json=body, headers=headers, timeout=60, trust_env=False
    )


def test_its_greedy_answer_is_the_engines(server, model, renderer):
    messages = [{"role": "user", "content": "AB <|im_end|> <|open|>"}]
    body = {"model": "nano", "messages": messages, "temperature": 0, "max_tokens": 24, "tools": TOOLS}
    found = ask(server, body).json()
    direct = Generation(
        "x",
        renderer.encode_prompt(messages, TOOLS, None, False),
        SamplingParams(24, temperature=0.0, stop_token_ids=renderer.stop_token_ids),
        key=0,
    )
    engine = engine_of(model, renderer)
    engine.submit([direct])
    while engine.pending():
        engine.step()
    parsed = renderer.parse(direct.token_ids, False)
    (choice,) = found["choices"]
    assert choice["message"]["content"] == parsed.content
    assert choice["finish_reason"] == "length"
    assert found["usage"] == {
        "prompt_tokens": len(direct.context_ids),
        "completion_tokens": 24,
        "total_tokens": len(direct.context_ids) + 24,
    }


def test_more_requests_than_slots_and_a_seed_that_repeats(server):
    async def many():
        async with httpx.AsyncClient(
            timeout=120, headers={"Authorization": "Bearer secret"}, trust_env=False
        ) as c:
            bodies = [
                {"messages": [{"role": "user", "content": str(i % 4)}], "max_tokens": 12, "seed": i % 4}
                for i in range(12)
            ]
            return [
                r.json()["choices"][0]["message"]["content"]
                for r in await asyncio.gather(
                    *(c.post(f"{server.url}/chat/completions", json=b) for b in bodies)
                )
            ]

    texts = asyncio.run(many())
    assert texts[:4] == texts[4:8] == texts[8:]
    assert len(set(texts[:4])) > 1


def test_calls_come_back_parsed(model, renderer):
    """What the engine wrote as a call of a tool is a call in the answer, arguments as JSON text."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    whole = renderer.encode_conversation(messages, TOOLS, None, False).ids
    prompt = renderer.encode_prompt(messages[:1], TOOLS, None, False)
    chat = ChatEngine(engine_of(model, renderer), renderer, "nano", 512, thinking=False)
    try:
        done = Generation("x", prompt, SamplingParams(99), 0, token_ids=whole[len(prompt) :])
        (choice,) = chat._answer(done)["choices"]
    finally:
        chat.close()
    assert choice["finish_reason"] == "tool_calls"
    (found,) = choice["message"]["tool_calls"]
    assert found["function"] == {"name": "add", "arguments": '{"a": 1}'}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "wizard"),
        ({"messages": [{"role": "user", "content": "x"}], "stream": True}, "streams"),
        ({"messages": [{"role": "user", "content": "x"}], "logit_bias": {}}, "logit_bias"),
        ({"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}, "temperature"),
        ({"messages": [{"role": "user", "content": "x" * 2000}]}, "the context 512"),
    ],
)
def test_what_it_cannot_do_it_says(server, body, says):
    response = ask(server, body)
    assert response.status_code == 422
    assert says in response.json()["detail"]


def test_a_token_guards_it(server):
    assert ask(server, {"messages": []}, token="").status_code == 401
    assert httpx.get(f"{server.url}/models", trust_env=False).status_code == 401
    assert httpx.get(f"{server.url[:-3]}/health", trust_env=False).status_code == 200


def test_a_broken_engine_is_an_error_for_who_waits_and_who_comes(model, renderer):
    class Broken(NativeEngine):
        def step(self):
            raise ValueError("out of memory")

    chat = ChatEngine(Broken(model, max_slots=2, max_context=512), renderer, "nano", 512)
    body = {"messages": [{"role": "user", "content": "x"}]}
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            asyncio.run(chat.complete(body))
    chat.close()
