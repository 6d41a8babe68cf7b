"""Problems of the environment ``code_repair``: make failing tests pass.

    level 1   one wrong operator in a function of one line
    level 2   one wrong detail in a function with a loop
    level 3   the wrong detail is in one of several functions that the tested one uses
    level 4   two wrong details, in two files

The visible tests are some of the cases; the hidden ones are others, so that writing the visible results into the
function does not pass.

    problems = code_repair(size=1000, level=2)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from k3rl.data.agent_tasks import Task, call, make_problems
from k3rl.types import Problem

LEVELS = 4
VISIBLE, HIDDEN = 3, 8
OPERATORS = ("+", "-", "*", "//", "%")
PROMPT = (
    "test_solution.py fails. Find the mistake and mend it without changing the tests. You are done when "
    "`python3 test_solution.py` prints ok."
)


@dataclass(frozen=True, slots=True)
class Bug:
    """A function, a detail of it, and what the detail may be by mistake."""

    source: str
    right: str
    wrong: tuple[str, ...]
    argument: Callable[[random.Random], Any]

    def broken(self, rng: random.Random) -> tuple[str, str]:
        """The source with a mistake, and the mistake."""
        wrong = rng.choice(self.wrong)
        return self.source.replace(self.right, wrong), wrong


def _numbers(rng: random.Random) -> list[int]:
    return [rng.randrange(-9, 30) for _ in range(rng.randint(2, 7))]


def _word(rng: random.Random) -> str:
    return "".join(rng.choice("abcde") for _ in range(rng.randint(3, 8)))


def _count(rng: random.Random) -> int:
    return rng.randint(3, 12)


LOOPS = (
    Bug(
        "def solve(x):\n    total = 0\n    for i in range(1, x + 1):\n        total += i * i\n    return total\n",
        "range(1, x + 1)",
        ("range(1, x)", "range(2, x + 1)"),
        _count,
    ),
    Bug(
        "def solve(x):\n    best = x[0]\n    for n in x:\n        if n > best:\n            best = n\n"
        "    return best\n",
        "n > best",
        ("n < best", "n > best + 1"),
        _numbers,
    ),
    Bug(
        "def solve(x):\n    kept = []\n    for n in x:\n        if n % 2 == 0:\n            kept.append(n)\n"
        "    return kept\n",
        "n % 2 == 0",
        ("n % 2 == 1", "n % 3 == 0"),
        _numbers,
    ),
    Bug(
        "def solve(x):\n    found = {}\n    for c in x:\n        found[c] = found.get(c, 0) + 1\n    return found\n",
        "found.get(c, 0) + 1",
        ("found.get(c, 1) + 1", "found.get(c, 0)"),
        _word,
    ),
    Bug(
        "def solve(x):\n    out = ''\n    for c in x:\n        out = c + out\n    return out\n",
        "c + out",
        ("out + c", "c + out + c"),
        _word,
    ),
    Bug(
        "def solve(x):\n    sums = []\n    total = 0\n    for n in x:\n        total += n\n        sums.append(total)\n"
        "    return sums\n",
        "total += n",
        ("total = n", "total += n + 1"),
        _numbers,
    ),
)
HELPERS = (
    ("clip", "def clip(n):\n    return max(0, min(n, 20))\n", "max(0, min(n, 20))", "min(0, max(n, 20))"),
    ("double", "def double(n):\n    return n + n\n", "n + n", "n + 2"),
    ("flip", "def flip(n):\n    return -n\n", "return -n", "return n"),
    ("digits", "def digits(n):\n    return sum(int(d) for d in str(abs(n)))\n", "abs(n)", "abs(n) + 1"),
)


def code_repair(
    size: int = 1000,
    seed: int = 0,
    level: int = 1,
    domain: str = "coding",
    tools: Sequence[str] = (),
) -> list[Problem]:
    """See the module's docstring. ``tools``: others than the environment's own."""
    return make_problems(
        "code_repair",
        partial(_make, level=level),
        size=size,
        seed=seed,
        level=level,
        levels=LEVELS,
        domain=domain,
        arguments={"tools": list(tools)} if tools else {},
    )


def _make(rng: random.Random, level: int) -> tuple[str, Task]:
    while True:
        right, broken, edits, argument = {1: _operator, 2: _loop, 3: _helper, 4: _two_files}[level](rng)
        task = _task(rng, right, broken, edits, argument)
        if task is not None:
            return PROMPT, task


Draft = tuple[dict[str, str], dict[str, str], list[tuple[str, str, str]], Callable[[random.Random], Any]]
"""Right files, broken files, edits (path, wrong, right) from these to those, and a maker of arguments."""


def _operator(rng: random.Random) -> Draft:
    operator, wrong = rng.sample(OPERATORS, 2)
    number = rng.randrange(2, 10)
    source = f"def solve(x):\n    return x {operator} {number}\n"
    broken = f"def solve(x):\n    return x {wrong} {number}\n"
    edit = ("solution.py", f"x {wrong} ", f"x {operator} ")
    return {"solution.py": source}, {"solution.py": broken}, [edit], lambda r: r.randrange(-20, 60)


def _loop(rng: random.Random) -> Draft:
    bug = rng.choice(LOOPS)
    broken, wrong = bug.broken(rng)
    return (
        {"solution.py": bug.source},
        {"solution.py": broken},
        [("solution.py", wrong, bug.right)],
        bug.argument,
    )


def _helper(rng: random.Random) -> Draft:
    helpers = rng.sample(HELPERS, 3)
    names = [name for name, *_ in helpers]
    sources = [source for _, source, *_ in helpers]
    body = "n"
    for name in names:
        body = f"{name}({body})"
    main = f"def solve(x):\n    return [{body} for n in x]\n"
    _, source, right, wrong = helpers[rng.randrange(3)]
    whole = "\n\n".join([*sources, main])
    broken = whole.replace(source, source.replace(right, wrong))
    return {"solution.py": whole}, {"solution.py": broken}, [("solution.py", wrong, right)], _numbers


def _two_files(rng: random.Random) -> Draft:
    name, source, right, wrong = rng.choice(HELPERS)
    bug = rng.choice([b for b in LOOPS if b.argument is _numbers])
    inner = bug.source.replace("def solve(x):\n", f"def solve(x):\n    x = [{name}(n) for n in x]\n")
    main = f"from helpers import {name}\n\n\n{inner}"
    mistake = rng.choice(bug.wrong)
    files = {"solution.py": main, "helpers.py": source}
    broken = {"solution.py": main.replace(bug.right, mistake), "helpers.py": source.replace(right, wrong)}
    return files, broken, [("solution.py", mistake, bug.right), ("helpers.py", wrong, right)], _numbers


def _task(
    rng: random.Random,
    right: dict[str, str],
    broken: dict[str, str],
    edits: list[tuple[str, str, str]],
    argument: Callable[[random.Random], Any],
) -> Task | None:
    """None where the mistake shows in no visible test, or in a hidden one only."""
    arguments: list[Any] = []
    while len(arguments) < VISIBLE + HIDDEN:
        made = argument(rng)
        if made not in arguments or rng.random() < 0.05:
            arguments.append(made)
    results = [_result(right, a) for a in arguments]
    mistaken = [_result(broken, a) for a in arguments]
    differ = [a != b for a, b in zip(results, mistaken, strict=True)]
    if not any(differ[:VISIBLE]) or not any(differ[VISIBLE:]):
        return None
    if any(broken[path].count(wrong) != 1 for path, wrong, _ in edits):
        return None
    cases = list(zip(arguments, results, strict=True))
    calls = [call("bash", command="python3 test_solution.py; cat *.py")]
    calls += [call("edit", "[written]", path=path, old=wrong, new=good) for path, wrong, good in edits]
    calls.append(call("bash", "ok", command="python3 test_solution.py"))
    return {
        "files": broken | {"test_solution.py": _tests(cases[:VISIBLE])},
        "file": "solution.py",
        "entry": "solve",
        "hidden": [[[a], b] for a, b in cases[VISIBLE:]],
        "solution": {"calls": calls, "answer": ""},
    }


def _result(files: dict[str, str], argument: Any) -> Any:
    """What the function gives; an error stands for itself. The sources are this module's own."""
    namespace: dict[str, Any] = {}
    if "helpers.py" in files:
        exec(files["helpers.py"], namespace)
    source = "\n".join(
        line for line in files["solution.py"].splitlines() if not line.startswith("from helpers")
    )
    try:
        exec(source, namespace)
        return namespace["solve"](argument)
    except ArithmeticError as error:
        return f"{type(error).__name__}"


def _tests(cases: list[tuple[Any, Any]]) -> str:
    lines = ["from solution import solve", ""]
    lines += [f"assert solve({a!r}) == {b!r}, solve({a!r})" for a, b in cases]
    return "\n".join([*lines, "print('ok')"]) + "\n"
