"""The quickstart's task against plain arithmetic, and its demonstrations."""

import re
from collections import Counter

import pytest

from k3rl.chat import load_renderer
from k3rl.data.tasks import running_sum, running_sum_demonstrations
from k3rl.errors import UserError
from k3rl.types import Effort


def test_answers_are_the_last_digit_of_the_sum():
    problems = running_sum(seed=4, size=500, min_terms=2, max_terms=8)
    lengths = Counter()
    for problem in problems:
        text = problem.messages[0]["content"]
        assert re.fullmatch(r"\d([+-]\d){1,7}=", text)
        assert problem.reward["answer"] == str(sum(map(int, re.findall(r"[+-]?\d", text))) % 10)
        lengths[problem.metadata["terms"]] += 1
    assert set(lengths) == set(range(2, 9))
    assert problems[3] == running_sum(seed=4, size=500)[3] != running_sum(seed=5, size=500)[3]


def test_full_demonstrations_are_right_and_their_length_follows_effort():
    length = dict.fromkeys((Effort.LOW, Effort.HIGH, Effort.MAX), 0)
    for c in running_sum_demonstrations(size=900, skipped=0, cut=0, min_terms=4):
        text, reply = c.messages[0]["content"], c.messages[1]
        terms = list(map(int, re.findall(r"[+-]?\d", text)))
        totals = "".join(str(sum(terms[:n]) % 10) for n in range(2, len(terms) + 1))
        wanted = {
            Effort.LOW: "".join(t for i, t in enumerate(totals) if (len(totals) - 1 - i) % 2 == 0),
            Effort.HIGH: totals,
            Effort.MAX: f"{totals}={totals}",
        }
        assert reply["reasoning_content"] == wanted[c.effort]
        assert reply["content"] == totals[-1]
        length[c.effort] += len(reply["reasoning_content"])
    assert length[Effort.HIGH] > 1.5 * length[Effort.LOW]
    assert length[Effort.MAX] > 1.5 * length[Effort.HIGH]


def test_imperfect_demonstrations_have_their_shares_and_are_mostly_wrong():
    conversations = running_sum_demonstrations(size=3000, skipped=0.3, cut=0.2, min_terms=5)
    silent = [c for c in conversations if "reasoning_content" not in c.messages[1]]
    right = 0
    for c in silent:
        terms = map(int, re.findall(r"[+-]?\d", c.messages[0]["content"]))
        right += c.messages[1]["content"] == str(sum(terms) % 10)
    assert 0.27 < len(silent) / 3000 < 0.42  # a cut at 0 is silent too
    assert 0.05 < right / len(silent) < 0.15


def test_one_character_is_one_token_of_the_nano_tokenizer():
    renderer = load_renderer("k3-nano")
    for chat in running_sum_demonstrations(size=30, skipped=0, cut=0):
        question, reply = chat.messages
        characters = len(question["content"]) + len(reply["reasoning_content"]) + len(reply["content"])
        bare = [
            {"role": "user", "content": "1"},
            {"role": "assistant", "reasoning_content": "1", "content": "1"},
        ]
        overhead = len(renderer.encode_conversation(bare, effort=chat.effort).ids) - 3
        assert (
            len(renderer.encode_conversation(chat.messages, effort=chat.effort).ids) == overhead + characters
        )


def test_bad_arguments_are_named():
    with pytest.raises(UserError, match="min_terms"):
        running_sum(min_terms=1)
    with pytest.raises(UserError, match="skipped"):
        running_sum_demonstrations(skipped=0.8, cut=0.4)
