"""The order of draws: a permutation in each pass, the same after any resume, right shares of efforts."""

import json
import random
from collections import Counter

import pytest
from pydantic import TypeAdapter

from k3rl.data import ConversationStream, DataConfig, ProblemStream, load_conversations, load_problems
from k3rl.data.stream import effort_of_draw, permuted
from k3rl.errors import UserError
from k3rl.types import Effort

ADAPTER = TypeAdapter(DataConfig)


def walks(size=20, **more):
    config = {
        "type": "callable",
        "function": "k3rl.data.tasks:keyboard_walk",
        "limit": size,
        **more,
    }
    return load_problems(ADAPTER.validate_python(config))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 16, 17, 100, 1023, 1025])
def test_permuted_is_a_permutation_for_every_size_and_key(size):
    for key in range(5):
        assert sorted(permuted(i, size, key) for i in range(size)) == list(range(size))


def test_permutations_look_random():
    """Over keys, every element is about equally often in every place (chi-square, 49 degrees of freedom)."""
    size, keys = 8, 4000
    counts = Counter((i, permuted(i, size, key * 7919)) for key in range(keys) for i in range(size))
    expected = keys / size
    chi_square = sum((counts[i, j] - expected) ** 2 / expected for i in range(size) for j in range(size))
    print("chi-square", chi_square)
    assert chi_square < 100


def test_each_pass_has_every_problem_once_in_another_order():
    stream = ProblemStream(walks(20), seed=3)
    passes = [[stream.next().id for _ in range(20)] for _ in range(4)]
    assert all(sorted(p) == sorted(passes[0]) for p in passes)
    assert len({tuple(p) for p in passes}) == 4
    assert [ProblemStream(walks(20), seed=3).next().id] == passes[0][:1]
    assert [ProblemStream(walks(20), seed=4).at(i).id for i in range(20)] != passes[0]


def test_resume_at_any_draw_goes_on_exactly_there_pass_borders_included():
    seed = random.randrange(10**6)
    print("seed", seed)
    whole = ProblemStream(walks(7, efforts={"low": 1, "max": 1}), seed)
    expected = [(p.id, p.effort) for p in (whole.next() for _ in range(30))]
    for cut in range(30):
        first = ProblemStream(walks(7, efforts={"low": 1, "max": 1}), seed)
        for _ in range(cut):
            first.next()
        state = json.loads(json.dumps(first.state_dict()))
        second = ProblemStream(walks(7, efforts={"low": 1, "max": 1}), seed)
        second.load_state_dict(state)
        assert [(p.id, p.effort) for p in (second.next() for _ in range(30 - cut))] == expected[cut:]


def test_a_state_of_other_data_is_refused():
    state = ProblemStream(walks(20), seed=3).state_dict()
    with pytest.raises(UserError, match="seed 3, this run 4"):
        ProblemStream(walks(20), seed=4).load_state_dict(state)
    with pytest.raises(UserError, match="other problems"):
        ProblemStream(walks(21), seed=3).load_state_dict(state)
    other = load_problems(
        ADAPTER.validate_python(
            {
                "type": "callable",
                "function": "k3rl.data.tasks:keyboard_walk",
                "arguments": {"part": "held_out"},
                "limit": 20,
            }
        )
    )
    with pytest.raises(UserError, match="other problems"):
        ProblemStream(other, seed=3).load_state_dict(state)


def test_efforts_have_their_shares_in_every_window_and_problems_vary_in_effort():
    stream = ProblemStream(walks(10, efforts={"low": 1, "high": 1, "max": 2}), seed=0)
    drawn = [stream.next() for _ in range(400)]
    for start in range(0, 400, 40):
        window = Counter(p.effort for p in drawn[start : start + 40])
        assert abs(window[Effort.MAX] - 20) <= 2
        assert abs(window[Effort.LOW] - 10) <= 2
    assert len({(p.id, p.effort) for p in drawn}) == 30
    assert effort_of_draw({}, 0, 5) is None
    assert {effort_of_draw({Effort.LOW: 0.0, Effort.HIGH: 1.0}, 0, d) for d in range(100)} == {Effort.HIGH}


def test_conversations_resume_too():
    config = {
        "type": "callable",
        "function": "k3rl.data.tasks:keyboard_walk_demonstrations",
        "arguments": {"size": 9},
    }
    source = load_conversations(ADAPTER.validate_python(config))
    whole = ConversationStream(source, 5)
    expected = [whole.next().id for _ in range(20)]
    assert sorted(expected[:9]) == sorted(source[i].id for i in range(9))
    first = ConversationStream(source, 5)
    for _ in range(9):
        first.next()
    second = ConversationStream(source, 5)
    second.load_state_dict(first.state_dict())
    assert [second.next().id for _ in range(11)] == expected[9:]
