"""The two small domains with a sandbox: right demonstrations, nothing shared between the parts, and verdicts by the
sandbox itself."""

import re
import string
import subprocess

import pytest

from k3rl.chat import load_renderer
from k3rl.data.cipher_programs import cipher_program_demonstrations, cipher_programs
from k3rl.data.shell_walk import shell_walk, shell_walk_demonstrations
from k3rl.errors import UserError
from k3rl.types import Effort


def back(letter: str, steps: int) -> str:
    letters = string.ascii_lowercase if letter.islower() else string.ascii_uppercase
    return letters[(letters.index(letter) - steps) % 26]


def by_effort(conversations) -> dict[Effort, float]:
    lengths: dict[Effort, list[int]] = {}
    for c in conversations:
        lengths.setdefault(c.effort, []).append(len(c.messages[-1].get("reasoning_content", "")))
    return {effort: sum(found) / len(found) for effort, found in lengths.items()}


@pytest.mark.parametrize("make", [shell_walk, cipher_programs])
def test_parts_share_no_problem_and_are_the_same_every_time(make):
    train, held_out = make("train"), make("held_out")
    assert make("train") == train
    key = [p.id.split("-", 2)[2] for p in train + held_out]
    assert len(key) == len(set(key)) > 3000
    assert 0.05 < len(held_out) / len(key) < 0.15


def test_the_answer_of_a_shell_walk_is_where_its_files_lead():
    hops = 0
    for problem in shell_walk("held_out"):
        name, steps = re.fullmatch(r"([A-Z])>([2-6])", problem.messages[0]["content"]).groups()
        files, answer = problem.metadata["task"]["files"], problem.metadata["task"]["answer"]
        text = files[name].strip()
        if text.startswith("@"):
            text, hops = files[text[1]].strip(), hops + 1
        assert answer == "".join(back(letter, int(steps)) for letter in text)
        assert problem.budget_tokens == 4 * int(steps)
    assert 0.4 < hops / len(shell_walk("held_out")) < 0.6


def test_careful_demonstrations_of_shell_walks_read_then_think_as_finely_as_their_effort():
    held_out = {p.metadata["task"]["answer"] + str(p.metadata["steps"]) for p in shell_walk("held_out")}
    made = shell_walk_demonstrations(size=300, unread=0, skipped=0, cut=0)
    for c in made:
        steps = int(c.messages[0]["content"][2])
        last = c.messages[-2]
        assert last["role"] == "tool"
        assert not last["content"].startswith("@")
        answer = "".join(back(letter, steps) for letter in last["content"])
        assert c.messages[-1]["content"] == answer
        assert answer + str(steps) not in held_out
    lengths = by_effort(made)
    assert lengths[Effort.LOW] < 0.7 * lengths[Effort.HIGH] < 0.5 * lengths[Effort.MAX]
    careless = shell_walk_demonstrations(size=300, unread=1)
    assert all(len(c.messages) in (2, 4) and "reasoning_content" not in c.messages[-1] for c in careless)
    with pytest.raises(UserError, match="from 0 to 1"):
        shell_walk_demonstrations(size=1, unread=1.5)


def test_right_programs_pass_the_hidden_tests_and_wrong_ones_fail():
    """Run by this machine's own shell: the programs are this module's."""

    def passed(program: str, tests) -> bool:
        command = ["bash", "-c", program]
        said = [
            subprocess.run(command, input=t["input"], capture_output=True, text=True, check=False).stdout
            for t in tests
        ]
        return said == [t["output"] for t in tests]

    tests = {p.messages[0]["content"]: p.reward["tests"] for p in cipher_programs("train")}
    for c in cipher_program_demonstrations(size=30, skipped=0, cut=0):
        assert passed(c.messages[-1]["content"], tests[c.messages[0]["content"]])
    guesses = cipher_program_demonstrations(size=30, skipped=1, cut=0)
    assert sum(passed(c.messages[-1]["content"], tests[c.messages[0]["content"]]) for c in guesses) <= 1


def test_the_thoughts_of_a_cipher_walk_back_to_a():
    made = cipher_program_demonstrations(size=300, skipped=0, cut=0)
    for c in made:
        example, end = c.messages[0]["content"].split(":")
        steps = ord(example[0]) - ord("a")
        assert example[1] == example[0].upper()
        assert 2 <= steps <= 6
        low, high = (back(letter, steps) for letter in end)
        assert c.messages[-1]["content"].startswith(f"tr a-zA-Z {low}-za-")
        assert f"{high}-ZA-" in c.messages[-1]["content"]
        if c.effort is not Effort.MAX:
            assert c.messages[-1]["reasoning_content"].endswith(f"a:{low}{high}")
    lengths = by_effort(made)
    assert lengths[Effort.LOW] < 0.7 * lengths[Effort.HIGH] < 0.5 * lengths[Effort.MAX]


def test_a_character_of_thoughts_is_a_token():
    renderer = load_renderer("k3-nano")
    for c in [*shell_walk_demonstrations(size=20), *cipher_program_demonstrations(size=20)]:
        thought = c.messages[-1].get("reasoning_content", "")
        bare = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in c.messages]
        longer, shorter = (renderer.encode_conversation(m, [], c.effort).ids for m in (c.messages, bare))
        assert 0.9 * len(thought) - 1 <= len(longer) - len(shorter) <= len(thought)
