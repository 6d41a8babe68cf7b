"""Multi-turn trajectories with tools: token ids of every turn's prompt, masks, faults, limits."""

from __future__ import annotations

import random
from typing import Any

import pytest
from rollout_helpers import MAX_CONTEXT, Draws, config, problem, run_step
from scripted_engine import ScriptedEngine
from test_faults import FaultyTransport

from k3rl.chat import load_renderer
from k3rl.types import Author, Channel, Message, Status, StopReason, Trajectory
from rollout.engine import Generation
from rollout.pool import RolloutPool
from rollout.tools import Tool, ToolEnvironment
from rollout.transport import InlineTransport
from rollout.worker import RolloutWorker

RENDERER = load_renderer("k3-nano")


def add(a: int, b: int, memory: dict[str, Any]) -> str:
    memory["calls"] = memory.get("calls", 0) + 1
    return f"{a} + {b} is {a + b}; call {memory['calls']}"


def shout(text: str) -> str:
    return text.upper()


TOOLS = [Tool("add", add, "Adds."), Tool("shout", shout, "Makes it loud.")]


def call(name: str, number: int, **arguments: Any) -> dict[str, Any]:
    return {"id": f"{name}:{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(thought: str, content: str, *calls: dict[str, Any]) -> Message:
    return {"role": "assistant", "reasoning_content": thought, "content": content, "tool_calls": list(calls)}


THREE_TURNS = [
    assistant("First I add, and shout meanwhile.", "", call("add", 0, a=2, b=3), call("shout", 1, text="hi")),
    assistant("Again: <|open|> is only text here.", "One more.", call("add", 0, a=5, b=5)),
    assistant("Done.", "It is 10."),
]
RESULTS: list[list[Message]] = [
    [
        {"role": "tool", "tool_call_id": "add:0", "name": "add", "content": "2 + 3 is 5; call 1"},
        {"role": "tool", "tool_call_id": "shout:1", "name": "shout", "content": "HI"},
    ],
    [{"role": "tool", "tool_call_id": "add:0", "name": "add", "content": "5 + 5 is 10; call 2"}],
]


def turn_ids(turns: list[Message]) -> list[list[int]]:
    """What the policy samples in each turn: the renderer's own conversation beyond its own generation prompt."""
    user: Message = {"role": "user", "content": "x"}
    prompt = RENDERER.encode_prompt([user])
    conversations = [RENDERER.encode_conversation([user, message]).ids for message in turns]
    assert all(ids[: len(prompt)] == prompt for ids in conversations)
    return [ids[len(prompt) :] for ids in conversations]


class Script:
    """The policy: turn by turn what `turns` says. Notes each turn's context, pauses and retries being the same."""

    def __init__(self, turns: list[Message]) -> None:
        self.turns, self.contexts = turn_ids(turns), {}

    def __call__(self, generation: Generation) -> list[int]:
        seen = self.contexts.setdefault(generation.id, [])
        context = list(generation.context_ids)
        if context not in seen:
            seen.append(context)
        return self.turns[seen.index(context)]


def pool_with(script: Script, settings: Any, share: float = 0.0, seed: int = 0) -> RolloutPool:
    def make(index: int) -> RolloutWorker:
        engine = ScriptedEngine(end_id=RENDERER.stop_token_ids[0], script=script)
        return RolloutWorker(
            settings, engine, RENDERER, MAX_CONTEXT, name=f"rollout-{index}", get=lambda x: x,
            environment=lambda p: ToolEnvironment(p, TOOLS),
        )  # fmt: skip

    transport = FaultyTransport(make, random.Random(seed), share) if share else InlineTransport(make)
    return RolloutPool(settings, make, run_seed=7, transport=transport)


def settings_with(**fields: Any) -> Any:
    base = {"groups": 2, "samples": 3, "workers": 2, "slice_s": 1e-6, "max_tokens": 2000, "max_retries": 200}
    return config(**(base | {"max_worker_faults": 100_000, "lambda": 1.0} | fields))


def trajectories(pool: RolloutPool, steps: int = 1) -> list[Trajectory]:
    draws = Draws()
    return [t for s in range(steps) for g in run_step(pool, s, draws) for t in g.trajectories]


@pytest.mark.parametrize(("share", "lambda_"), [(0.0, 1.0), (0.0, 0.4), (0.2, 0.6)])
def test_each_turns_prompt_begins_with_the_last_turns_ids_exactly(share, lambda_):
    """Also where trajectories are paused between and within turns, and where workers die."""
    seed = random.randrange(2**32)
    print("seed", seed)
    script = Script(THREE_TURNS)
    # A worker that may die must live long enough, in seconds, for a tool's thread to answer.
    slice_s = 0.002 if share else 1e-6
    pool = pool_with(script, settings_with(slice_s=slice_s, **{"lambda": lambda_}), share, seed)
    done = trajectories(pool, steps=1 if lambda_ == 1.0 else 4)
    assert len(done) >= 6
    if share:
        assert pool.fleet.transport.deaths > 1
    for t in done:
        assert (t.status, t.stop_reason, t.turns) == (Status.COMPLETE, StopReason.END_OF_TURN, 3), t.error
        first, second, third = script.contexts[t.id]
        assert first == t.prompt_ids
        assert second[: len(first) + len(script.turns[0])] == first + script.turns[0]
        assert third[: len(second) + len(script.turns[1])] == second + script.turns[1]
        assert t.prompt_ids + t.token_ids == third + script.turns[2]


def test_the_whole_is_what_the_renderer_makes_of_the_conversation_and_the_mask_is_what_was_sampled():
    script = Script(THREE_TURNS)
    sampled = [token for turn in script.turns for token in turn]
    for t in trajectories(pool_with(script, settings_with())):
        conversation: list[Message] = list(problem(t.draw).messages)
        for turn, results in zip(THREE_TURNS, [*RESULTS, []], strict=True):
            conversation += [turn, *results]
        declared = [tool.declaration() for tool in TOOLS]
        whole = RENDERER.encode_conversation(conversation, declared, problem(t.draw).effort)
        assert t.prompt_ids + t.token_ids == whole.ids
        assert [i for i, m in zip(t.token_ids, t.sampled_mask, strict=True) if m] == sampled
        for segment in t.segments:
            observed = segment.author is Author.ENVIRONMENT
            assert observed is (segment.channel is Channel.OBSERVATION)
            assert len(segment.logprobs) == (0 if observed else len(segment))
        calls = [s.channel for s in t.segments].count(Channel.TOOL_CALL)
        assert calls >= 2


def test_a_tools_memory_survives_every_pause_and_death():
    script = Script(THREE_TURNS)
    pool = pool_with(script, settings_with(slice_s=0.002, **{"lambda": 0.4}), 0.2, 5)
    for t in trajectories(pool, steps=4):
        text = RENDERER.decode(t.token_ids)
        assert "2 + 3 is 5; call 1" in text
        assert "5 + 5 is 10; call 2" in text


def test_limits_of_turns_context_and_stop_tools_end_a_trajectory_with_their_reason():
    endless = [assistant("More.", "", call("add", 0, a=1, b=1))] * 4
    for fields, reason, turns in (
        ({"agent": {"max_turns": 2}}, StopReason.MAX_TURNS, 2),
        ({"agent": {"stop_tools": ["add"]}}, StopReason.STOP_TOOL, 1),
        ({"max_tokens": 50}, StopReason.MAX_TOKENS, 1),
    ):
        for t in trajectories(pool_with(Script(endless), settings_with(**fields))):
            assert (t.stop_reason, t.turns) == (reason, turns), (t.stop_reason, t.turns, t.error)
            assert t.token_ids
    prompt = len(trajectories(pool_with(Script(endless), settings_with(max_tokens=1)))[0].prompt_ids)
    for t in trajectories(pool_with(Script(endless), settings_with(max_context=prompt + 60))):
        assert t.stop_reason is StopReason.MAX_CONTEXT
        assert len(t.prompt_ids) + len(t.token_ids) <= prompt + 60


def test_what_a_tool_or_call_does_wrong_is_told_to_the_policy():
    turns = [assistant("?", "", call("subtract", 0, a=1), call("add", 1, a=1)), assistant("Ah.", "Sorry.")]
    for t in trajectories(pool_with(Script(turns), settings_with())):
        text = RENDERER.decode(t.token_ids)
        assert "there is no tool 'subtract'; there are: add, shout" in text
        assert "missing a required argument: 'b'" in text
        assert t.status is Status.COMPLETE
