"""The three environments, each by a scripted policy in real sandboxes: right ways earn 1, wrong ones 0."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from k3rl.config.rollout import AgentConfig
from k3rl.data.code_repair import code_repair
from k3rl.data.data_question import data_question
from k3rl.data.shell_lookup import shell_lookup
from k3rl.errors import UserError
from k3rl.types import StopReason
from rollout.environment import make_environment

TOP = ((shell_lookup, 6), (data_question, 5), (code_repair, 4))
EVERY = [(make, level) for make, top in TOP for level in range(1, top + 1)]
ids = [f"{make.__name__}-{level}" for make, level in EVERY]


@pytest.mark.parametrize(("make", "level"), EVERY, ids=ids)
def test_the_right_way_earns_one(make, level, play):
    for problem in make(size=2, seed=7, level=level):
        assert play(problem).solve() == 1.0


@pytest.mark.parametrize(("make", "level"), EVERY, ids=ids)
def test_doing_nothing_or_the_wrong_thing_earns_nothing(make, level, play):
    problem = make(size=3, seed=8, level=level)[2]
    assert play(problem).answer("") == 0.0
    other = play(problem)
    other.turn("", (other.environment.tools[0], {"command": "true", "code": ""}))
    assert other.answer("surely not") == 0.0


@pytest.mark.parametrize(("make", "level"), EVERY, ids=ids)
def test_a_problem_is_a_function_of_its_arguments(make, level):
    first, second = make(size=5, seed=3, level=level), make(size=9, seed=3, level=level)
    assert first == second[:5]
    assert make(size=5, seed=4, level=level) != first
    assert len({p.id for p in second}) == 9
    json.dumps([p.metadata for p in first])  # goes into checkpoints


def test_a_level_that_there_is_not_is_refused():
    with pytest.raises(UserError, match="code_repair: level is 1 to 4, not 5"):
        code_repair(level=5)


def test_the_answer_is_in_the_files_only(play):
    problem = shell_lookup(size=1, level=2, terse=True)[0]
    game = play(problem)
    assert problem.metadata["task"]["answer"] not in json.dumps([problem.messages, game.opening.tools])


def test_submitting_ends_with_the_answer_given(play):
    problem = data_question(size=1, level=1)[0]
    game = play(problem)
    reply = game.turn("", ("submit", {"answer": problem.metadata["task"]["answer"]}))
    assert (reply.done, reply.stop_reason) == (True, StopReason.STOP_TOOL)
    assert game.environment.state()["score"] == 1.0


def test_numbers_are_compared_by_value(play):
    problem = data_question(size=1, level=1)[0]
    assert play(problem).answer(f" {float(problem.metadata['task']['answer'])} ") == 1.0
    assert play(problem).answer("nan") == 0.0


def test_writing_the_visible_results_into_the_function_does_not_pass(play):
    problem = code_repair(size=1, level=1)[0]
    game = play(problem)
    tests = problem.metadata["task"]["files"]["test_solution.py"]
    cases = [line.split("solve(")[1].split(") == ")[0] for line in tests.splitlines() if "assert" in line]
    results = [line.split(" == ")[1].split(", ")[0] for line in tests.splitlines() if "assert" in line]
    known = ", ".join(f"{c}: {r}" for c, r in zip(cases, results, strict=True))
    game.call("bash", command=f"echo 'def solve(x): return {{{known}}}.get(x)' > solution.py")
    assert game.call("bash", command="python3 test_solution.py") == "ok"
    assert game.answer() == 0.0


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(0)",
        "import sys; print('{\"value\": 1}'); sys.exit(0)",
        "class A:\n    def __eq__(self, other): return True\ndef solve(x): return A()",
        "def solve(x):\n    while True: pass",
        "def solve(x): return [[]] * 10**8",
        "this is no python",
    ],
)
def test_code_that_cheats_or_breaks_does_not_pass(play, code):
    problem = code_repair(size=1, level=2)[0]
    game = play(problem)
    game.environment.limits = type(game.environment.limits)(python_s=3.0)
    game.call("bash", command=f"cat > solution.py <<'E'\n{code}\nE")
    assert game.answer() == 0.0


def test_hidden_tests_are_in_no_sandbox_of_the_policy(play):
    """They come after the policy is done. Its code can see the inputs then, in the fork, and tell nobody."""
    problem = code_repair(size=1, level=2)[0]
    hidden = [json.dumps(arguments[0]) for arguments, _ in problem.metadata["task"]["hidden"]]
    telling = max(hidden, key=len)
    game = play(problem)
    spy = "import sys, json; open('/tmp/seen', 'w').write(json.dumps(sys._getframe(1).f_locals['given']))"
    game.call("bash", command=f"cp solution.py s; (echo {json.dumps(spy)}; cat s) > solution.py")
    assert telling not in game.call("bash", command="cat $HOME/* /tmp/* 2>/dev/null; env; ps ax")

    async def judge_and_look(fork):
        return await game.environment._passes(fork), (await fork.read_file("/tmp/seen")).decode()

    passed, seen = game.do(game.environment.in_fork(judge_and_look))
    assert not passed
    assert telling in seen  # the spy works
    assert game.call("bash", command="ls /tmp") == "[no output]"


def test_only_the_declared_tools_can_be_called(play):
    game = play(shell_lookup(size=1)[0])
    assert [t["function"]["name"] for t in game.opening.tools] == ["bash"]
    reply = game.turn("", ("python", {"code": "print(1)"}), ("bash", {"command": "echo 2"}))
    assert [m["content"] for m in reply.messages] == [
        "Error: there is no tool 'python'; there are: bash",
        "2",
    ]
    assert reply.failed_calls == 1


def test_an_unknown_limit_is_told_with_the_nearest_one(sandboxes):
    problem = shell_lookup(size=1)[0]
    named = {"name": "shell_lookup", "arguments": {"bash_sec": 3}}
    problem = replace(problem, metadata=problem.metadata | {"environment": named})
    with pytest.raises(UserError, match="'bash_sec'; did you mean 'bash_s'"):
        make_environment(problem, AgentConfig(), sandboxes)
