"""The math verifier on pairs of the kinds that public reports name, with plain math-verify beside it."""

from __future__ import annotations

import json
import multiprocessing
import random
import re
import threading
import time
from functools import cache

import pytest
from math_pairs import PAIRS as FIRST
from math_pairs_later import LATER_PAIRS, THIRD_PAIRS
from reward_helpers import RENDERER, make_group, make_problem

from k3rl.config.rewards import RewardConfig
from k3rl.types import Outcome
from rewards.verifiers.math import judge
from rewards.worker import RewardWorker

PAIRS = {**FIRST, "second table": LATER_PAIRS, "third table": THIRD_PAIRS}
ROWS = [(kind, gold, response, right) for kind, rows in PAIRS.items() for gold, response, right in rows]


@pytest.mark.parametrize("kind", PAIRS)
def test_every_pair_of_a_kind_gets_its_verdict(kind):
    wrong = [(g, r, v) for g, r, v in PAIRS[kind] if judge(g, r)[1] is not v]
    assert not wrong


def test_the_table_is_large_and_has_both_verdicts():
    assert len({(g, r) for _, g, r, _ in ROWS}) == len(ROWS) >= 250
    assert min(sum(v for *_, v in ROWS), sum(not v for *_, v in ROWS)) >= 100


def delimited(response: str) -> str:
    """A bare formula between dollar signs; a text as it is."""
    bare = not re.search(r"\$|\\\(|\\\[|boxed|fbox|<answer>|\*\*", response)
    return f"${response}$" if bare and not re.search(r"(?<!\\)\b[A-Za-z]{3,}\b", response) else response


def plain_math_verify(rows: list[tuple[str, str, str, bool]]) -> list[bool | None]:
    """math-verify's own verdicts as its manual says to call it, bare formulas between dollar signs; `None` where
    it raises."""
    from math_verify import parse, verify

    found: list[bool | None] = []
    for _, gold, response, _ in rows:
        try:
            found.append(bool(verify(parse(f"${gold}$"), parse(delimited(response)))))
        except Exception:
            found.append(None)
    return found


def _in_process(rows, connection) -> None:
    import logging

    logging.disable(logging.CRITICAL)
    connection.send(plain_math_verify(rows))


@cache
def peer() -> tuple[bool | None, ...]:
    """In a process of its own: it sets alarms and patches modules."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_in_process, args=(ROWS, theirs), daemon=True
    )
    process.start()
    assert ours.poll(120), "math-verify did not finish"
    verdicts = tuple(ours.recv())
    process.join()
    return verdicts


def test_plain_math_verify_is_wrong_on_this_table_more_often(capsys):
    """Prints, kind by kind, the false verdicts of math-verify beside ours."""
    negatives = [(k, g, r) for (k, g, r, v), p in zip(ROWS, peer(), strict=True) if v and not p]
    positives = [(k, g, r) for (k, g, r, v), p in zip(ROWS, peer(), strict=True) if not v and p]
    ours = [(k, g, r) for k, g, r, v in ROWS if judge(g, r)[1] is not v]
    with capsys.disabled():
        print(
            f"\n{len(ROWS)} pairs; false negatives / false positives of math-verify, false verdicts of ours"
        )
        for kind, rows in PAIRS.items():
            count = [sum(k == kind for k, *_ in some) for some in (negatives, positives, ours)]
            print(f"  {kind:32} {len(rows):4} {count[0]:4} /{count[1]:3} {count[2]:4}")
        print(f"  {'all':32} {len(ROWS):4} {len(negatives):4} /{len(positives):3} {len(ours):4}")
        for label, some in (("false negative", negatives), ("false positive", positives)):
            for kind, gold, response in some:
                print(f"    {label}: {kind}: gold {json.dumps(gold)} response {json.dumps(response)}")
    assert not ours
    assert len(positives) > 0
    assert len(negatives) > 0


def test_exponentials_of_a_variable_cost_little():
    began = time.process_time()
    for base in (80, 12, 2310, 999_999):
        assert judge(f"{base}^x", f"{base}^{{x+1}}/{base}")[1] is True
        assert judge(f"{base}^x", f"x^{{{base}}}")[1] is False
    assert time.process_time() - began < 5.0


REPORTED = [
    (r"\frac{1}{2004!}", r"\frac{1}{2006!}"),
    ("n=2,3,4", "n=1,2,3"),
    ("12:00", "1:00"),
    (r"\pm 2021", "2021"),
]


@pytest.mark.parametrize(("gold", "answer"), REPORTED)
def test_pairs_that_were_reported_as_wrongly_equal(gold, answer):
    assert judge(gold, f"${answer}$")[1] is False
    assert judge(answer, f"${gold}$")[1] is False
    assert judge(gold, f"${gold}$")[1] is True


def test_verdicts_come_from_any_thread():
    """Time limits by signal fail off the main thread; ours are the killable process's."""
    worker = RewardWorker(RewardConfig(processes=2), RENDERER)
    problem = make_problem("m", {"name": "math", "answer": r"\frac{1}{2}"})
    results: list[list[float | None]] = []

    def score() -> None:
        results.append([r.total for r in worker.score(make_group(["0.5", "0.6"], problem))])

    threads = [threading.Thread(target=score) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    worker.close()
    assert results == [[1.0, 0.0]] * 4


def test_a_gold_answer_that_is_empty_is_the_graders_failure():
    worker = RewardWorker(RewardConfig(retries=0), RENDERER)
    try:
        (reward,) = worker.score(make_group(["1"], make_problem("m", {"name": "math", "answer": " "})))
        assert reward.outcome is Outcome.GRADER_FAILED
        (reward,) = worker.score(make_group(["7"], make_problem("m", {"name": "math", "answer": ["3", "7"]})))
        assert reward.total == 1.0
    finally:
        worker.close()


def test_answers_mangled_at_random_are_judged_and_break_nothing():
    """Texts of the tables with pieces of others put in: no exception, no long computation."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    texts = [t for _, gold, response, _ in ROWS for t in (gold, response) if not re.search(r"\\(sum|int)", t)]
    pieces = [
        *texts,
        *r"\{}()[]$^_,;:.0!=<>|%&",
        r"\frac",
        r"\sqrt",
        r"\boxed{",
        "9" * 50,
        "10^{9000}",
        "e^{e^9}",
        "log_0",
    ]

    def mangled() -> str:
        text = rng.choice(texts)
        for _ in range(rng.randint(0, 3)):
            at = rng.randrange(len(text) + 1)
            text = text[:at] + rng.choice(pieces) + text[at + rng.randrange(3) :]
        return text

    slowest = (0.0, "", "")
    for _ in range(1200):
        gold, response = mangled(), mangled()
        began = time.process_time()
        assert judge(gold, response)[1] in (True, False)
        slowest = max(slowest, (time.process_time() - began, gold, response))
    assert slowest[0] < 8.0, slowest
