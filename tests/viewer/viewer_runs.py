"""Runs for the viewer's tests: written by `RunStore` from real trajectories of k3-nano's tokenizer.

The "policy" adds two numbers. Early steps are often wrong, later ones seldom; some trajectories are paused and resumed,
cut, looping, agentic, or hostile. Everything follows from the seed.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from k3rl.chat import load_renderer
from k3rl.store import RunStore, rollout_row
from k3rl.types import (
    Author,
    Channel,
    Effort,
    Outcome,
    Problem,
    Reward,
    Segment,
    Status,
    StopReason,
    Trajectory,
)

RENDERER = load_renderer("k3-nano")
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script><|open|>"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            },
        },
    }
]
EFFORTS = (Effort.LOW, Effort.HIGH, Effort.MAX)
DOMAINS = ("arithmetic", "agent", "words")


def problems(count: int = 12) -> list[Problem]:
    found = []
    for i in range(count):
        a, b = 3 + i, 10 + 2 * i
        found.append(
            Problem(
                id=f"sum-{i:03d}",
                domain=DOMAINS[i % 3],
                messages=[{"role": "user", "content": f"What is {a} + {b}?"}],
                reward={"name": "exact", "answer": str(a + b)},
                effort=EFFORTS[(i // 3) % 3],
                tools=TOOLS if DOMAINS[i % 3] == "agent" else [],
                budget_tokens=200 + 50 * (i % 3),
                reference_length=120,
            )
        )
    return found


def write_run(
    path: Path,
    *,
    steps: int = 4,
    groups: int = 6,
    samples: int = 4,
    seed: int = 0,
    skill: float = 0.3,
    name: str | None = None,
    learning_rate: float = 1e-3,
    close: bool = True,
    teacher: bool = True,
) -> RunStore:
    """A run of ``steps`` steps. With ``close=False`` it is still being written: call `write_step`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = path.parent / "problems.jsonl"
    data.write_text(
        "".join(
            json.dumps({"id": p.id, "messages": p.messages, "reward": p.reward, "domain": p.domain}) + "\n"
            for p in problems()
        )
    )
    config = (
        f"kind: rl\nname: {name or path.name}\nsteps: {steps}\nseed: {seed}\nmodel: {{path: k3-nano}}\n"
        f"data: {{type: jsonl, path: {data}}}\nrollout: {{groups: {groups}, samples: {samples}}}\n"
        f"trainer: {{optimizer: {{type: adamw, lr: {learning_rate}}}}}\n"
    )
    store = RunStore.create(path, config)
    for step in range(steps):
        write_step(store, step, groups, samples, seed, skill, teacher=teacher)
    store.set_status(
        "finished" if close else "running", steps_done=steps, steps_asked=steps if close else steps + 3
    )
    if close:
        store.close()
    return store


def write_step(
    store: RunStore,
    step: int,
    groups: int = 6,
    samples: int = 4,
    seed: int = 0,
    skill: float = 0.3,
    *,
    teacher: bool = True,
    metrics: bool = True,
) -> None:
    rng = random.Random(f"{seed}/{step}")
    known, rows = problems(), []
    for g in range(groups):
        draw = step * groups + g
        problem = known[draw % len(known)]
        trajectories = [
            _trajectory(problem, draw, k, step, min(0.95, skill + 0.12 * step), rng, teacher)
            for k in range(samples)
        ]
        _advantages(trajectories)
        for t in trajectories:
            fate = "dropped:failed" if t.status is Status.FAILED else "trained"
            row = rollout_row(t, problem, fate, step=step, version=step, renderer=RENDERER, thinking=True)
            if problem.domain == "words":
                row["judge_trace_json"] = json.dumps(_judge_trace(t, rng))
            rows.append(row)
    store.write_rollouts(step, rows)
    if metrics:
        store.log_metrics(step, step_metrics(rows, rng))


def _trajectory(
    problem: Problem, draw: int, sample: int, step: int, skill: float, rng: random.Random, teacher: bool
) -> Trajectory:
    answer, right = problem.reward["answer"], rng.random() < skill
    said = answer if right else str(int(answer) + rng.choice([-10, -1, 1, 10]))
    t = Trajectory(
        problem_id=problem.id,
        draw=draw,
        sample=sample,
        domain=problem.domain,
        effort=problem.effort,
        prompt_ids=RENDERER.encode_prompt(problem.messages, problem.tools, problem.effort),
        started_step=max(0, step - (sample == 1)),
        finished_step=step,
        timings_s={"queued": rng.random(), "decode": 2 * rng.random()},
    )
    thought = " ".join(
        f"I take {rng.randint(1, 99)} and carry." for _ in range(2 + EFFORTS.index(problem.effort))
    )
    if sample == 2 and draw % 5 == 0:
        said, right = HOSTILE, False
    if sample == 3 and draw % 6 == 5:
        _fail(t)
        return t
    if problem.domain == "agent":
        _agent_turns(t, problem, thought, said, sample, step, rng)
    else:
        assistant = {"role": "assistant", "reasoning_content": thought, "content": f"{said} 中文 café 🙂"}
        _say(t, _reply(problem, assistant), step, rng)
    t.turns = t.turns or 1
    t.status, t.stop_reason = Status.COMPLETE, StopReason.END_OF_TURN
    if sample == 3 and draw % 4 == 1:
        _cut(t)
    t.reward = _reward(t, right, rng)
    n = t.sampled_tokens
    t.trainer_logprobs = [p + rng.gauss(0, 0.02) for p in t.logprobs]
    if sample == 0 and draw % 7 == 3:
        t.trainer_logprobs[n // 2] -= 6.0
    if teacher:
        t.teacher_logprobs = [min(0.0, p + rng.gauss(0.1, 0.4)) for p in t.logprobs]
    return t


def _reply(problem: Problem, assistant: dict[str, Any]) -> list[int]:
    prompt = RENDERER.encode_prompt(problem.messages, problem.tools, problem.effort)
    whole = RENDERER.encode_conversation([*problem.messages, assistant], problem.tools, problem.effort).ids
    return whole[len(prompt) :]


def _agent_turns(
    t: Trajectory, problem: Problem, thought: str, said: str, sample: int, step: int, rng: random.Random
) -> None:
    calls = 5 if sample == 2 else 1
    for _ in range(calls):
        call = {
            "id": "add:0",
            "type": "function",
            "function": {"name": "add", "arguments": {"a": 3, "b": 4}},
        }
        ids = _reply(
            problem, {"role": "assistant", "reasoning_content": thought, "content": "", "tool_calls": [call]}
        )
        _say(t, ids, step, rng)
        result = [
            {
                "role": "tool",
                "content": HOSTILE if sample == 1 else "7",
                "tool_call_id": "add:0",
                "name": "add",
            }
        ]
        t.segments.append(Segment(Author.ENVIRONMENT, Channel.OBSERVATION, RENDERER.extend(ids, result)))
        t.turns += 1
    _say(
        t,
        _reply(problem, {"role": "assistant", "reasoning_content": "Now I know.", "content": said}),
        step,
        rng,
    )
    t.turns += 1
    t.sandbox = {"id": f"box-{t.draw}-{sample}", "snapshot": "s1"}


def _say(t: Trajectory, ids: list[int], step: int, rng: random.Random) -> None:
    """Sampled tokens by channel; a trajectory that began a step ago changes its version on the way."""
    channels = RENDERER.parse(ids).channels
    change = len(ids) // 3 if t.started_step < step and not t.segments else 0
    last: Any = None
    for i, (token, channel) in enumerate(zip(ids, channels, strict=True)):
        version = t.started_step if i < change else step
        if (channel, version) != last:
            t.segments.append(Segment(Author.MODEL, channel, [], [], version))
            last = (channel, version)
        t.segments[-1].token_ids.append(token)
        t.segments[-1].logprobs.append(
            -abs(rng.gauss(0, 0.7)) if rng.random() < 0.4 else -abs(rng.gauss(0, 0.02))
        )


def _cut(t: Trajectory) -> None:
    t.status, t.stop_reason = Status.TRUNCATED, StopReason.MAX_TOKENS
    last = t.segments[-1]
    keep = max(1, len(last) // 2)
    t.segments[-1] = Segment(
        last.author, last.channel, last.token_ids[:keep], last.logprobs[:keep], last.policy_version
    )


def _fail(t: Trajectory) -> None:
    t.status, t.stop_reason, t.error = Status.FAILED, StopReason.ERROR, "the worker died three times"
    t.reward = Reward(None, {}, Outcome.SKIPPED, "a failed trajectory is not graded")


def _reward(t: Trajectory, right: bool, rng: random.Random) -> Reward:
    if t.draw % 9 == 4 and t.sample == 0:
        return Reward(None, {}, Outcome.JUDGE_FAILED, "the judge answered in prose")
    task = float(right)
    length = -0.2 if t.status is Status.TRUNCATED or rng.random() < 0.1 else 0.0
    said = "equal" if right else "not equal"
    return Reward(
        task + length, {"task": task, "length": length}, Outcome.SCORED, f"exact: {said} to the answer"
    )


def _advantages(group: list[Trajectory]) -> None:
    scored = [t for t in group if t.reward and t.reward.total is not None]
    mean = sum(t.reward.total for t in scored) / len(scored) if scored else 0.0
    for t in scored:
        t.advantage = t.reward.total - mean
        t.token_advantages = [t.advantage] * t.sampled_tokens


def _judge_trace(t: Trajectory, rng: random.Random) -> dict[str, Any]:
    return {
        "rubric": [
            {
                "name": "correct",
                "weight": 0.7,
                "score": round(rng.random(), 2),
                "reason": "The sum is checked.",
            },
            {"name": "clear", "weight": 0.3, "score": round(rng.random(), 2), "reason": HOSTILE},
        ],
        "scorepad": "First I read both answers.\nThen I compare.",
        "pairs": [
            {
                "a": f"{t.draw}.{t.sample}",
                "b": f"{t.draw}.{(t.sample + 1) % 4}",
                "winner": "a",
                "swapped": "a",
            },
        ],
        "candidate": t.sample,
        "judgements": [
            {
                "first": t.sample,
                "second": (t.sample + 1) % 4,
                "stage": "recorded",
                "scores": {"A": {"correct": 9.0}, "B": {"correct": 4.0}},
                "justifications": {"A": "The sum is right.", "B": HOSTILE},
                "steps": [{"tool": "record", "accepted": True}],
                "tokens": 120,
            }
        ],
    }


def step_metrics(rows: list[dict[str, Any]], rng: random.Random) -> dict[str, float]:
    rewards = [r["reward"] for r in rows if r["reward"] is not None]
    metrics = {
        "reward/mean": sum(rewards) / len(rewards),
        "reward/unscored_share": 1 - len(rewards) / len(rows),
        "rollout/logprob_diff": 0.015 + 0.005 * rng.random(),
        "rollout/logprob_diff_p99": 0.05 + 0.02 * rng.random(),
        "staleness/mean": 0.2 * rng.random(),
        "staleness/max": 1.0,
        "train/loss": rng.gauss(0, 0.1),
        "train/grad_norm": math.exp(rng.gauss(0, 0.3)),
        "groups/zero_variance": rng.random() / 3,
        "entropy": 0.5 + rng.random() / 9,
        "teacher/kl": 0.04 + rng.random() / 99,
        "judge/void_rate": rng.random() / 9,
        "judge/agreement": 1 - rng.random() / 4,
        "time/rollout_s": 4 + rng.random(),
        "time/train_s": 2 + rng.random(),
        "time/publish_s": 0.1,
        "time/record_s": 0.01,
        "time/step_s": 7.0,
    }
    for domain in DOMAINS:
        own = [r["reward"] for r in rows if r["domain"] == domain and r["reward"] is not None]
        if own:
            metrics[f"reward/domain/{domain}"] = sum(own) / len(own)
    for effort in EFFORTS:
        own = [r for r in rows if r["effort"] == str(effort)]
        if own:
            metrics[f"length/thinking/effort/{effort}"] = sum(r["thinking_tokens"] for r in own) / len(own)
    return metrics
