"""The quickstart's task against a walk along a real keyboard's rows, and its demonstrations."""

import itertools
import re

import pytest

from k3rl.chat import load_renderer
from k3rl.data.tasks import keyboard_walk, keyboard_walk_demonstrations, thoughts
from k3rl.errors import UserError
from k3rl.types import Effort

ROWS = ["QWERTYUIOP", "ASDFGHJKL", "ZXCVBNM"]
RIGHT = {a: b for row in ROWS for a, b in itertools.pairwise(row)} | {"P": "A", "L": "Z", "M": "Q"}


def walked(start: str, steps: int) -> str:
    for _ in range(steps):
        start = RIGHT[start[0]] + RIGHT[start[1]]
    return start


def test_answers_are_where_the_walk_ends_and_parts_share_nothing():
    train, held_out = keyboard_walk("train"), keyboard_walk("held_out")
    texts = [p.messages[0]["content"] for p in train + held_out]
    assert len(texts) == len(set(texts)) == 26 * 26 * 5
    assert len(held_out) == len(texts) // 10
    for problem in train + held_out:
        start, steps = re.fullmatch(r"([A-Z]{2})>([2-6])", problem.messages[0]["content"]).groups()
        assert problem.reward == {"name": "exact", "answer": walked(start, int(steps))}
        assert problem.budget_tokens == 4 * int(steps)
    assert keyboard_walk("train") == train


def test_thoughts_are_those_of_the_docstring():
    assert thoughts("EP", 3, Effort.LOW) == "2:RA0:YD"
    assert thoughts("EP", 4, Effort.LOW) == "2:TS0:UF"
    assert thoughts("EP", 3, Effort.HIGH) == "2:RA1:TS0:YD"
    assert thoughts("EP", 3, Effort.MAX) == "2:ER1:RT0:TY;2:PA1:AS0:SD"


def test_full_demonstrations_are_right_and_their_length_follows_effort():
    length = dict.fromkeys((Effort.LOW, Effort.HIGH, Effort.MAX), 0)
    held_out = {p.messages[0]["content"] for p in keyboard_walk("held_out")}
    for c in keyboard_walk_demonstrations(size=900, skipped=0, cut=0):
        question, reply = c.messages
        assert question["content"] not in held_out
        start, steps = question["content"].split(">")
        assert reply["content"] == walked(start, int(steps))
        thought = reply["reasoning_content"]
        if c.effort is Effort.MAX:
            fingers = thought.split(";")
            assert reply["content"] == "".join(f[-1] for f in fingers)
            for finger, first in zip(fingers, start, strict=True):
                moves = re.findall(r"\d:(\w)(\w)", finger)
                assert all(RIGHT[a] == b for a, b in moves)
                assert "".join(a for a, _ in moves) + moves[-1][1] == first + "".join(b for _, b in moves)
        else:
            left, keys = int(steps), start
            for n, pair in re.findall(r"(\d):(\w\w)", thought):
                assert pair == walked(keys, left - int(n))
                assert left - int(n) in ((1, 2) if c.effort is Effort.LOW else (1,))
                left, keys = int(n), pair
            assert left == 0
        length[c.effort] += len(thought)
    assert length[Effort.HIGH] > 1.5 * length[Effort.LOW]
    assert length[Effort.MAX] > 1.5 * length[Effort.HIGH]


def test_imperfect_demonstrations_have_their_shares_and_guess():
    conversations = keyboard_walk_demonstrations(size=3000, skipped=0.3, cut=0.2)
    right = complete = 0
    for c in conversations:
        start, steps = c.messages[0]["content"].split(">")
        complete += c.messages[1].get("reasoning_content") == thoughts(start, int(steps), c.effort)
        right += c.messages[1]["content"] == walked(start, int(steps))
    assert 0.46 < complete / 3000 < 0.54
    assert 0 <= right - complete < 20  # a guess is right once in 676


def test_one_character_is_one_token_of_the_nano_tokenizer():
    renderer = load_renderer("k3-nano")
    bare = [{"role": "user", "content": "1"}, {"role": "assistant", "reasoning_content": "1", "content": "1"}]
    for chat in keyboard_walk_demonstrations(size=300, skipped=0, cut=0):
        question, reply = chat.messages
        characters = len(question["content"]) + len(reply["reasoning_content"]) + len(reply["content"])
        overhead = len(renderer.encode_conversation(bare, effort=chat.effort).ids) - 3
        assert (
            len(renderer.encode_conversation(chat.messages, effort=chat.effort).ids) == overhead + characters
        )


def test_bad_arguments_are_named():
    with pytest.raises(UserError, match="min_steps"):
        keyboard_walk(min_steps=0)
    with pytest.raises(UserError, match="'held_out'"):
        keyboard_walk(part="test")
    with pytest.raises(UserError, match="skipped"):
        keyboard_walk_demonstrations(skipped=0.8, cut=0.4)
