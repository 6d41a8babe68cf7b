"""Problems of the environment ``data_question``: answer a question from a CSV file, with Python.

level 1   the sum of a column of a few rows
level 2   sum, mean, largest or smallest of a column, of many rows
level 3   of the rows with some value in another column
level 4   which group has the largest sum
level 5   of two files, joined by a key; some cells are empty

problems = data_question(size=1000, level=3)
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

from k3rl.data.agent_tasks import Task, call, make_problems
from k3rl.types import Problem

LEVELS = 5
TOWNS = ["Bath", "Derby", "Ely", "Leeds", "Oxford", "Truro", "Wells", "York"]
ITEMS = ["apples", "bread", "cheese", "eggs", "milk", "oats", "rice", "tea"]
MEASURES: dict[str, tuple[str, Callable[[list[int]], float]]] = {
    "the sum": ("sum(x)", sum),
    "the mean": ("sum(x) / len(x)", lambda x: sum(x) / len(x)),
    "the largest": ("max(x)", max),
    "the smallest": ("min(x)", min),
}
READ = "import csv\nrows = list(csv.DictReader(open('sales.csv')))\n"

Rows = list[tuple[str, str, int]]


def data_question(
    size: int = 1000,
    seed: int = 0,
    level: int = 1,
    domain: str = "agent",
    tools: Sequence[str] = (),
) -> list[Problem]:
    """See the module's docstring. ``tools``: others than the environment's own."""
    return make_problems(
        "data_question",
        partial(_make, level=level),
        size=size,
        seed=seed,
        level=level,
        levels=LEVELS,
        domain=domain,
        arguments={"tools": list(tools)} if tools else {},
    )


def _make(rng: random.Random, level: int) -> tuple[str, Task]:
    count = 4 if level == 1 else rng.randint(30, 80)
    rows: Rows = [(rng.choice(TOWNS), rng.choice(ITEMS), rng.randrange(1, 100)) for _ in range(count)]
    if level <= 3:
        return _one_number(rng, rows, level)
    return _largest_group(rng, rows) if level == 4 else _joined(rng, rows)


def _csv(header: str, rows: Sequence[Sequence[object]]) -> str:
    return header + "\n" + "".join(",".join(map(str, row)) + "\n" for row in rows)


def _task(files: dict[str, str], answer: str, code: str) -> Task:
    solution = {"calls": [call("python", answer, code=code)], "answer": answer}
    return {"files": files, "answer": answer, "solution": solution}


def _one_number(rng: random.Random, rows: Rows, level: int) -> tuple[str, Task]:
    measure = "the sum" if level == 1 else rng.choice(list(MEASURES))
    expression, compute = MEASURES[measure]
    town = rng.choice(rows)[0]
    kept = [n for t, _, n in rows if level < 3 or t == town]
    where, condition = (f" where town is {town}", f" if r['town'] == '{town}'") if level == 3 else ("", "")
    code = READ + f"x = [int(r['count']) for r in rows{condition}]\nprint({expression})"
    text = f"What is {measure} of the column count in sales.csv{where}? Answer with the number alone."
    return text, _task({"sales.csv": _csv("town,item,count", rows)}, str(compute(kept)), code)


def _largest_group(rng: random.Random, rows: Rows) -> tuple[str, Task]:
    sums: dict[str, int] = defaultdict(int)
    for town, _, number in rows:
        sums[town] += number
    first, second = [*sorted(sums.values(), reverse=True), 0][:2]
    if first == second:  # one of them must be the largest
        best = max(sums, key=lambda t: (sums[t], t))
        rows = [*rows, (best, ITEMS[0], 1)]
        sums[best] += 1
    answer = max(sums, key=lambda t: sums[t])
    code = (
        READ
        + "sums = {}\nfor r in rows:\n    sums[r['town']] = sums.get(r['town'], 0) + int(r['count'])\n"
        + "print(max(sums, key=sums.get))"
    )
    text = "In sales.csv, for which town is the sum of the column count largest? Answer with its name alone."
    return text, _task({"sales.csv": _csv("town,item,count", rows)}, answer, code)


def _joined(rng: random.Random, rows: Rows) -> tuple[str, Task]:
    prices = {item: rng.randrange(2, 20) for item in ITEMS}
    town = rng.choice(rows)[0]
    cells = [(t, i, "" if rng.random() < 0.1 else n) for t, i, n in rows]
    answer = sum(int(n) * prices[i] for t, i, n in cells if t == town and n != "")
    code = (
        READ
        + "price = {r['item']: int(r['price']) for r in csv.DictReader(open('prices.csv'))}\n"
        + f"kept = [r for r in rows if r['town'] == '{town}' and r['count']]\n"
        + "print(sum(int(r['count']) * price[r['item']] for r in kept))"
    )
    text = (
        f"sales.csv says how many of each item were sold in each town, prices.csv what one costs. What did all sales "
        f"in {town} bring together? Rows without a count bring nothing. Answer with the number alone."
    )
    files = {
        "sales.csv": _csv("town,item,count", cells),
        "prices.csv": _csv("item,price", sorted(prices.items())),
    }
    return text, _task(files, str(answer), code)
