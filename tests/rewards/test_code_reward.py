"""Programs against tests in a sandbox: right ones pass, and what must not work does not."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from reward_helpers import RENDERER, make_group, make_problem

from k3rl.config.rewards import RewardConfig, RewardSandbox
from k3rl.types import Outcome, Reward
from rewards.api import GraderError
from rewards.verifiers.code_tests import read_tests, same_output, same_value
from rewards.worker import RewardWorker

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
ADD = [
    {"input": "1 2\n", "output": "3\n"},
    {"input": "10 -4\n", "output": "6\n"},
    {"input": "0 0\n", "output": "0"},
]
CALLS = [{"args": [[3, 1, 2]], "expected": [1, 2, 3]}, {"args": [[]], "expected": []}]


@pytest.fixture(scope="module")
def worker() -> Iterator[RewardWorker]:
    made = RewardWorker(RewardConfig(retries=0, processes=2), RENDERER)
    yield made
    made.close()


def block(program: str, language: str = "python") -> str:
    return f"Here it is:\n```{language}\n{program}\n```\n"


def score(worker: RewardWorker, programs: list[str], **arguments) -> list[Reward]:
    problem = make_problem("c", {"name": "code", **arguments}, domain="coding")
    return worker.score(make_group(programs, problem))


SUM = "a, b = map(int, input().split())\nprint(a + b)"


def test_programs_on_standard_streams(worker):
    wrong = "a, b = map(int, input().split())\nprint(abs(a) + abs(b))"
    rewards = score(
        worker, [block(SUM), block(wrong), "no code? 3", block("print(3"), block(SUM, "")], tests=ADD
    )
    assert [r.total for r in rewards] == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert "test 2: expected '6', got '14'" in rewards[1].explanation
    assert "SyntaxError" in rewards[3].explanation
    (shared,) = score(worker, [block(wrong)], tests=ADD, credit="share")
    assert shared.total == pytest.approx(2 / 3)


def test_functions_and_methods_by_name(worker):
    programs = [
        "def order(xs):\n    print('noise')\n    return sorted(xs)",
        "class Solution:\n    def order(self, xs):\n        return tuple(sorted(xs))",
        "def order(xs):\n    return xs",
        "def sort(xs):\n    return sorted(xs)",
        "def order(xs):\n    return object()",
    ]
    rewards = score(worker, [block(p) for p in programs], tests=CALLS, entry="order")
    assert [r.total for r in rewards] == [1.0, 1.0, 0.0, 0.0, 0.0]


CPP = "#include <iostream>\nint main() { long a, b; std::cin >> a >> b; std::cout << a + b; }"


def test_other_languages(worker):
    bash = 'read a b; echo "$((a + b))"'
    (reward,) = score(worker, [block(bash, "bash")], tests=ADD, language="bash")
    assert reward.total == 1.0, reward.explanation
    good, broken = score(worker, [block(CPP, "cpp"), block("int main() {", "c++")], tests=ADD, language="cpp")
    if good.outcome is Outcome.GRADER_FAILED:
        assert "no 'g++'" in good.explanation  # no compiler is no wrong answer
    else:
        assert (good.total, broken.total) == (1.0, 0.0)
        assert "does not compile" in broken.explanation
    (reward,) = score(worker, [block(bash, "bash")], tests=ADD, language="cobol")
    assert reward.outcome is Outcome.GRADER_FAILED


FORGERIES = {
    "equal to everything": "class Same:\n    def __eq__(self, other): return True\n    def tolist(self): return 'x'\n"
    "def order(xs): return Same()",
    "exit code zero": "import os\ndef order(xs): os._exit(0)",
    "patches json": "import json\njson.dumps = lambda *a, **k: 'true'\ndef order(xs): return True",
    "patches the comparison": "import builtins\nbuiltins.sorted = lambda xs: True\ndef order(xs): return True",
    "writes a verdict": "import os\ndef order(xs):\n    for fd in range(3, 10):\n"
    "        try: os.write(fd, b'{\"passed\": 1}')\n        except OSError: pass\n    os._exit(0)",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_program_cannot_talk_its_way_to_a_reward(worker, name):
    (reward,) = score(worker, [block(FORGERIES[name])], tests=CALLS, entry="order")
    assert (reward.total, reward.outcome) == (0.0, Outcome.SCORED)


SECRET = "7430015523"
HUNT = f"""
import glob, os
found = []
for path in ["/proc/self/environ", "/proc/self/cmdline", *glob.glob("/proc/[0-9]*/cmdline"),
             *glob.glob("/proc/[0-9]*/environ"), *glob.glob("/proc/[0-9]*/fd/*"),
             *glob.glob("/proc/[0-9]*/root/tmp/**"),
             *glob.glob("/tmp/**", recursive=True), *glob.glob("/home/**", recursive=True),
             *glob.glob("/run/**", recursive=True), *glob.glob("/dev/shm/**", recursive=True)]:
    if path.endswith("solution.py") or "/fd/" in path and not os.path.isfile(path):
        continue
    try:
        with open(path, "rb") as file:
            data = file.read(1 << 20)
    except OSError:
        continue
    if b"{SECRET[:5]}" + b"{SECRET[5:]}" in data:
        found.append(path)
print("{SECRET[:5]}" + "{SECRET[5:]}" if found else "nothing")
"""


def test_a_program_finds_what_a_test_expects_nowhere(worker):
    tests = [{"input": "", "output": SECRET}, {"input": "", "output": SECRET}]
    (reward,) = score(worker, [block(HUNT)], tests=tests)
    assert reward.total == 0.0
    assert "got 'nothing'" in reward.explanation
    planted = f"open('/tmp/here', 'w').write('{SECRET[:5]}' + '{SECRET[5:]}')\n" + HUNT
    assert score(worker, [block(planted)], tests=tests)[0].total == 1.0  # the hunt is able to find


REACH = """
import socket, urllib.request
reached = []
for address in [("127.0.0.1", 22), ("10.0.0.1", 80), ("1.1.1.1", 53), ("169.254.169.254", 80)]:
    try:
        socket.create_connection(address, 0.3).close()
        reached.append(address)
    except OSError as error:
        if getattr(error, "errno", None) == 111 and address[0] != "127.0.0.1":
            reached.append(address)
try:
    socket.getaddrinfo("example.org", 80)
    reached.append("dns")
except OSError:
    pass
with open("/proc/net/route") as file:
    reached += file.read().splitlines()[1:]
print("reached", reached)
"""


def test_a_program_reaches_no_network(worker):
    (reward,) = score(worker, [block(REACH)], tests=[{"input": "", "output": "reached []"}])
    assert reward.total == 1.0, reward.explanation


def test_a_program_sees_nothing_of_other_samples(worker):
    """The first leaves its answer wherever it can; the others look for it at the same places."""
    places = ["/tmp/left", "/dev/shm/left", "/home/user/left", "/var/tmp/left"]
    leave = f"for p in {places}:\n    try: open(p, 'w').write('42')\n    except OSError: pass\nprint(42)"
    look = f"found = ''\nfor p in {places}:\n    try: found += open(p).read()\n"
    look += "    except OSError: pass\nprint(found or 'none')"
    rewards = score(worker, [block(leave), *[block(look)] * 3], tests=[{"input": "", "output": "42"}])
    assert [r.total for r in rewards] == [1.0, 0.0, 0.0, 0.0]
    assert "got 'none'" in rewards[1].explanation


RESOURCES = {
    "never ends": ("while True: pass", "took more than 1 s"),
    "takes all memory": ("x = bytearray(4 << 30)\nprint(3)", ""),
    "floods": ("while True: print('x' * 100000)", ""),
    "forks without end": ("import os\nwhile True:\n    os.fork()", ""),
    "ignores signals": (
        "import signal, time\nsignal.signal(15, lambda *a: None)\ntime.sleep(60)",
        "took more than",
    ),
}


@pytest.mark.parametrize("name", RESOURCES)
def test_a_greedy_program_fails_its_tests_and_nothing_else(worker, name):
    program, says = RESOURCES[name]
    bad, good = score(worker, [block(program), block(SUM)], tests=ADD[:1], time_limit_s=1.0)
    assert (bad.total, bad.outcome) == (0.0, Outcome.SCORED)
    assert says in bad.explanation
    assert (good.total, good.outcome) == (1.0, Outcome.SCORED)


def test_time_runs_out_over_all_tests_together(worker):
    slow = "import time\ntime.sleep(0.6)\na, b = map(int, input().split())\nprint(a + b)"
    (reward,) = score(worker, [block(slow)], tests=ADD, credit="share", total_limit_s=1.2)
    assert reward.outcome is Outcome.SCORED
    assert 0 < reward.total < 1


def test_tests_that_are_none_are_the_graders_failure(worker):
    for tests in ([], "not json", {"inputs": [1], "outputs": []}, [{"input": "1"}]):
        (reward,) = score(worker, [block(SUM)], tests=tests)
        assert reward.outcome is Outcome.GRADER_FAILED


def test_tests_in_the_shape_of_common_data_sets():
    read = read_tests('{"fn_name": "f", "inputs": [[1, 2]], "outputs": [3]}')
    assert (read[0].entry, read[0].args, read[0].expected) == ("f", [1, 2], 3)
    read = read_tests({"inputs": ["1\n"], "outputs": [["2", "3"]]})
    assert (read[0].stdin, read[0].expected) == ("1\n", "2\n3")
    with pytest.raises(GraderError, match="test 1"):
        read_tests([{"args": 3, "expected": 1}], "f")


@pytest.mark.parametrize(
    ("expected", "found", "tolerance", "same"),
    [
        ("1 2\n", "1 2", 0.0, True),
        ("1 2", "1 2  \n\n", 0.0, True),
        ("1 2", "1  2", 0.0, False),
        ("0.333333", "0.33333301", 1e-6, True),
        ("0.333333", "0.3334", 1e-6, False),
        ("nan", "nan", 0.0, True),
        ("1", "nan", 1e9, False),
        ("yes 1.0", "no 1.0", 1e-6, False),
    ],
)
def test_outputs_compare_by_line_or_within_a_tolerance(expected, found, tolerance, same):
    assert same_output(expected, found, tolerance) is same


@pytest.mark.parametrize(
    ("expected", "found", "same"),
    [(1, 1.0, True), (True, 1, False), ([1, [2]], [1, [2]], True), ([1], [1, 2], False), ({"a": 1}, {"a": 1}, True),
     ({"a": 1}, {"b": 1}, False), ("1", 1, False), (None, None, True), (float("nan"), float("nan"), False)],
)  # fmt: skip
def test_values_compare_by_type(expected, found, same):
    assert same_value(expected, found, 0.0) is same


def test_the_sandboxes_may_be_agentenvs(tmp_path, monkeypatch):
    """The same verdicts over HTTP from the test's AgentENV server, and no sandbox left on it."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "sandbox"))
    from agentenv_server import AgentEnvServer

    with AgentEnvServer(tmp_path / "server") as server:
        monkeypatch.setenv("AGENTENV_URL", server.url)
        monkeypatch.setenv("AGENTENV_API_KEY", server.api_key)
        config = RewardConfig(retries=0, sandbox=RewardSandbox(backend="agentenv"))
        remote = RewardWorker(config, RENDERER)
        try:
            right, wrong = score(remote, [block(SUM), block("print(0)")], tests=ADD)
        finally:
            remote.close()
        assert (right.total, wrong.total) == (1.0, 0.0), (right, wrong)
        made = [e for e in server.exchanges if "sandboxes" in str(e)]
        assert len(made) >= 2
        assert server.mistakes == []


@pytest.mark.slow
def test_a_sandbox_server_that_is_down_is_the_graders_failure(monkeypatch):
    monkeypatch.setenv("AGENTENV_URL", "http://127.0.0.1:9")
    config = RewardConfig(retries=0, timeout_s=5.0, sandbox=RewardSandbox(backend="agentenv"))
    remote = RewardWorker(config, RENDERER)
    try:
        (reward,) = score(remote, [block(SUM)], tests=ADD)
    finally:
        remote.close()
    assert reward.total is None
    assert reward.outcome in (Outcome.GRADER_FAILED, Outcome.TIMED_OUT)
