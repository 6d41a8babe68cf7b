"""The comparison with TRL: its arithmetic, its reward, and that both sides are asked the same."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"


@pytest.fixture(scope="module")
def peers() -> ModuleType:
    path = list(sys.path)
    spec = importlib.util.spec_from_file_location("trl_grpo", PEERS / "trl_grpo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


def steps(*of: tuple[float, float, float]) -> dict[str, list[dict[str, float]]]:
    return {"steps": [{"seconds": s, "tokens": t, "reward": r} for s, t, r in of]}


def test_the_first_step_is_warm_up(peers: ModuleType):
    assert peers.rate(steps((100.0, 1, 0), (2.0, 30, 0), (3.0, 20, 0))) == 10.0


def test_time_to_a_reward_is_that_of_three_steps_on_average(peers: ModuleType):
    run = steps((1.0, 1, 0.9), (1.0, 1, 0.0), (1.0, 1, 0.3), (1.0, 1, 0.6), (1.0, 1, 0.6))
    assert peers.to_reward(run, 0.5) == 5.0
    assert peers.to_reward(run, 0.39) == 3.0
    assert peers.to_reward(run, 0.95) is None


@pytest.mark.parametrize(
    ("said", "worth"), [("12", 1.0), ("7 + 5 = 12.", 1.0), ("12 or 13", 0.1), ("twelve", 0.0), ("-12", 0.1)]
)
def test_the_reward_reads_the_last_number(said: str, worth: float):
    from rewards.registry import get_reward

    function = get_reward(f"{PEERS / 'last_number.py'}:last_number").function
    assert function(Namespace(content=said), "12") == worth


def test_problems_are_the_same_for_a_seed_and_sum_to_their_answer(peers: ModuleType):
    rows = peers.problems(20)
    assert rows == peers.problems(20)
    for row in rows:
        a, b = (int(w) for w in row["messages"][1]["content"].removeprefix("What is ")[:-1].split(" + "))
        assert row["answer"] == str(a + b)


def test_memory_is_that_of_a_process_and_its_children(peers: ModuleType):
    child = subprocess.Popen([sys.executable, "-c", "x = bytearray(50 << 20); print(1, flush=True); input()"],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    child.stdout.readline()
    try:
        assert child.pid in peers.descendants(os.getpid())
        assert peers.pss_bytes(child.pid) > 50 << 20
    finally:
        child.communicate(b"\n")
    assert peers.pss_bytes(child.pid) == 0
