"""The pool, its workers and real sandboxes, with a scripted policy: paused, moved, checkpointed, killed, resumed."""

from __future__ import annotations

import json
import re
import sys
import time
import zlib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "rollout"))

from rollout_helpers import Draws, config, run_step
from scripted_engine import ScriptedEngine

from k3rl.chat import load_renderer
from k3rl.data.shell_lookup import shell_lookup
from k3rl.types import Group, Message, Problem, Status
from rollout.engine import Generation
from rollout.environments.demonstrations import shell_lookup_demonstrations
from rollout.environments.sandboxes import Sandboxes
from rollout.pool import RolloutPool, snapshots_in
from rollout.transport import InlineTransport
from rollout.worker import RolloutWorker

RENDERER = load_renderer("k3-nano")
PROBLEMS = shell_lookup(size=64, level=2, terse=True)


def count_up(trajectory: str) -> list[str]:
    """Commands that show whether the files are as the earlier ones left them; 2 to 6 of them."""
    count = 2 + zlib.crc32(trajectory.encode()) % 5
    return [f"echo {trajectory}/{i} >> log; cat log" for i in range(count)]


class Counting:
    """A policy that writes a line into a file in each turn and looks at all of them."""

    def __init__(self) -> None:
        self.contexts: dict[str, list[list[int]]] = {}

    def __call__(self, generation: Generation) -> list[int]:
        seen, context = self.contexts.setdefault(generation.id, []), list(generation.context_ids)
        if context not in seen:
            seen.append(context)
        commands, turn = count_up(generation.id), seen.index(context)
        if turn < len(commands):
            return turn_ids({"role": "assistant", "content": "", "tool_calls": [bash(commands[turn])]})
        return turn_ids({"role": "assistant", "content": "done"})


def bash(command: str) -> dict:
    return {
        "id": "bash:0",
        "type": "function",
        "function": {"name": "bash", "arguments": {"command": command}},
    }


def turn_ids(message: Message) -> list[int]:
    user: Message = {"role": "user", "content": "x"}
    prompt = RENDERER.encode_prompt([user], thinking=False)
    return RENDERER.encode_conversation([user, message], thinking=False).ids[len(prompt) :]


SETTINGS = config(
    groups=3,
    samples=2,
    workers=2,
    slice_s=0.02,
    max_tokens=2000,
    thinking=False,
    **{"lambda": 0.4},
    agent={"max_turns": 8, "sandbox": {"quota": 6}},
)


class Process:
    """A pool as one process of a run has it, in ``folder``. `die` ends it without any clean-up of its own."""

    def __init__(self, folder: Path, script: Counting, workers: int = 2) -> None:
        self.made: list[Sandboxes] = []
        settings = SETTINGS.model_copy(update={"workers": workers})

        def make(index: int) -> RolloutWorker:
            sandboxes = Sandboxes(settings.agent.sandbox, folder=folder, owner=f"rollout-{index}")
            self.made.append(sandboxes)
            # Slow enough for most trajectories to be paused while the policy writes.
            engine = ScriptedEngine(
                end_id=RENDERER.stop_token_ids[0], script=script, on_step=lambda: time.sleep(0.002)
            )
            return RolloutWorker(
                settings, engine, RENDERER, 4096, name=f"rollout-{index}", sandboxes=sandboxes, get=lambda x: x
            )  # fmt: skip

        self.transport = InlineTransport(make)
        self.pool = RolloutPool(settings, make, run_seed=7, transport=self.transport)

    def die(self) -> None:
        for worker in self.transport.workers.values():
            kill_sandboxes(worker)


def kill_sandboxes(worker: RolloutWorker) -> None:
    """As the kernel does to local sandboxes when their owner dies."""
    sandboxes = worker._sandboxes
    if sandboxes is not None and sandboxes._backend is not None:
        sandboxes._backend.host.close()


def all_rest(process: Process, within_s: float = 10.0) -> bool:
    """Calls that were under way when their trajectories were paused have ended, and no sandbox is awake."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        seen = [w._measured() for w in process.transport.workers.values()]
        if all(m.get("alive") == m.get("paused") for m in seen):
            return True
        time.sleep(0.02)
    return False


def steps(pool: RolloutPool, first: int, count: int, draws: Draws) -> list[Group]:
    return [group for step in range(first, first + count) for group in run_step(pool, step, draws)]


def drawn(number: int) -> Problem:
    return PROBLEMS[number]


def check(groups: list[Group]) -> None:
    """Every trajectory saw in each turn what its own earlier turns had written, and nothing else."""
    assert groups
    for t in (t for g in groups for t in g.trajectories):
        assert (t.status, t.turns) == (Status.COMPLETE, 1 + len(count_up(t.id))), t.error
        said = [RENDERER.decode_text(s.token_ids) for s in t.segments if not s.logprobs]
        for turn, text in enumerate(said):
            lines = re.findall(r"\d+\.\d+/\d", text)
            assert lines == [f"{t.id}/{i}" for i in range(turn + 1)]


def test_trajectories_that_span_steps_find_their_files_again(tmp_path):
    process = Process(tmp_path, Counting(), workers=1)
    groups = steps(process.pool, 0, 4, Draws(make=drawn))
    check(groups)
    assert any(t.finished_step > t.started_step for g in groups for t in g.trajectories)
    metrics = process.pool.metrics()
    assert all_rest(process), "the step is over"
    assert metrics["sandbox/replayed"] == metrics["sandbox/faults"] == 0
    assert 0 < metrics["sandbox/exec_p50_s"] <= metrics["sandbox/exec_p99_s"]
    process.pool.close(over=True)
    assert not list((tmp_path / "snapshots").iterdir())


def test_a_run_that_was_killed_goes_on_from_its_snapshots(tmp_path):
    script, draws = Counting(), Draws(make=drawn)
    process = Process(tmp_path, script, workers=1)
    for step in range(8):
        steps(process.pool, step, 1, draws)
        process.pool.save_sandboxes()
        state = json.loads(json.dumps(process.pool.state_dict()))
        process.pool.checkpointed(state)
        paused = [
            t for g in state["controller"]["groups"] for t in g["trajectories"] if t["status"] == "paused"
        ]
        snapshotted = [t for t in paused if "snapshot" in (t["sandbox"] or {})]
        if len(snapshotted) >= 2:
            break
    assert snapshotted  # the others were within a call, which is made again
    others = [
        t["environment_state"]["environment"]["journal"]
        for t in paused
        if t not in snapshotted and t["sandbox"]
    ]
    steps(process.pool, step + 1, 2, Draws(make=drawn, first=draws.next))  # and it goes on, and dies
    process.die()

    second = Process(tmp_path, script, workers=1)
    second.pool.load_state_dict(state)
    check(steps(second.pool, step + 1, 3, draws))
    metrics = second.pool.metrics()
    assert metrics["sandbox/recovered"] == len(snapshotted)
    assert metrics["sandbox/replayed"] == sum(map(len, others))
    second.pool.close(over=True)


def test_a_worker_that_died_costs_no_trajectory_its_files(tmp_path):
    process = Process(tmp_path, Counting())
    draws = Draws(make=drawn)
    steps(process.pool, 0, 1, draws)
    member = process.pool.fleet.members[0]
    kill_sandboxes(process.transport.workers[0])
    process.pool.fleet.fault(member, "killed by the test")
    check(steps(process.pool, 1, 4, draws))
    process.pool.close(over=True)


def test_trajectories_go_on_in_another_worker(tmp_path):
    """Fewer workers after the restart: those of the second are taken over by the first."""
    script, draws = Counting(), Draws(make=drawn)
    process = Process(tmp_path, script)
    steps(process.pool, 0, 2, draws)
    process.pool.save_sandboxes()
    state = process.pool.state_dict()
    process.die()
    alone = Process(tmp_path, script, workers=1)
    alone.pool.load_state_dict(json.loads(json.dumps(state)))
    check(steps(alone.pool, 2, 3, draws))
    alone.pool.close(over=True)


def test_snapshots_last_as_long_as_a_checkpoint_names_them(tmp_path):
    process, draws = Process(tmp_path, Counting()), Draws(make=drawn)
    kept = []
    for step in range(4):
        steps(process.pool, step, 1, draws)
        process.pool.save_sandboxes()
        state = process.pool.state_dict()
        before = snapshots_in(kept[-1]) if kept else set()
        assert {f.stem for f in (tmp_path / "snapshots").glob("*.tar")} == before | snapshots_in(state)
        process.pool.checkpointed(state)
        process.pool.fleet.until(lambda: not any(m.calls for m in process.pool.fleet.members), "deletions")
        assert {f.stem for f in (tmp_path / "snapshots").glob("*.tar")} == snapshots_in(state)
        kept.append(state)
    assert any(map(snapshots_in, kept))
    process.pool.close()
    assert snapshots_in(kept[-1]) == {f.stem for f in (tmp_path / "snapshots").glob("*.tar")}


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_demonstrations_are_what_really_happens(tmp_path, level, play):
    """Token by token: prompt, turns and observations of a demonstration are those of a trajectory in a sandbox."""
    demonstrations = shell_lookup_demonstrations(size=4, seed=5, level=level)
    problems = shell_lookup(size=4, seed=5, level=level, terse=True)
    for problem, demonstration in zip(problems, demonstrations, strict=True):
        game = play(problem)
        messages = list(problem.messages)
        for tool, arguments, _ in problem.metadata["task"]["solution"]["calls"]:
            said = game.call(tool, **arguments)
            call = {"id": f"{tool}:0", "type": "function", "function": {"name": tool, "arguments": arguments}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": f"{tool}:0", "name": tool, "content": said})
        answer = problem.metadata["task"]["answer"]
        assert demonstration.messages == [*messages, {"role": "assistant", "content": answer}]
        assert demonstration.tools == game.opening.tools
        assert game.answer(answer) == 1.0


def test_a_share_of_the_demonstrations_is_careless():
    some = shell_lookup_demonstrations(size=400, level=2, guessed=0.25, cut=0.5)
    calls = [sum(m["role"] == "tool" for m in d.messages) for d in some]
    problems = shell_lookup(size=400, seed=1, level=2, terse=True)
    right = [
        d.messages[-1]["content"] == p.metadata["task"]["answer"] for d, p in zip(some, problems, strict=True)
    ]
    assert 0.18 < calls.count(0) / 400 < 0.32
    assert 0.3 < sum(right) / 400 < 0.6
