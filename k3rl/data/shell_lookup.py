"""Problems of the environment ``shell_lookup``: find a fact in files, with a shell.

    level 1   a file holds the fact
    level 2   a file holds ``@`` and the name of the file that holds the fact
    level 3   as 2, and there may be none, one, two or three such files before
    level 4   the fact is in some line of some file
    level 5   two facts, one behind the other, in folders of files
    level 6   as 5, with facts that changed: the last one counts

``terse`` leaves the first four levels' instructions and the tools' declaration out: the message is the key alone, one
letter, and facts are one digit, for models that learn the task by example and for which every token costs.

    problems = shell_lookup(size=1000, level=2, terse=True)
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

from k3rl.data.agent_tasks import Task, call, make_problems
from k3rl.types import Problem

KEYS = "QWERTYUIOPASDFGHJKLZXCVBNM"
DECOYS = 4
LEVELS = 6
NAMES = (
    "Ada",
    "Alan",
    "Barbara",
    "Claude",
    "Dennis",
    "Donald",
    "Edsger",
    "Frances",
    "Grace",
    "Ivan",
    "John",
    "Ken",
)
LAST_NAMES = (
    "Baker",
    "Cole",
    "Dean",
    "Ellis",
    "Frost",
    "Grant",
    "Hayes",
    "Irwin",
    "Jones",
    "Knight",
    "Lowe",
    "Marsh",
)


def shell_lookup(
    size: int = 1000,
    seed: int = 0,
    level: int = 1,
    terse: bool = False,
    domain: str = "agent",
    tools: Sequence[str] = (),
) -> list[Problem]:
    """See the module's docstring. ``tools``: others than the environment's own."""
    return make_problems(
        "shell_lookup",
        partial(_make, level=level, terse=terse),
        size=size,
        seed=seed,
        level=level,
        levels=LEVELS,
        domain=domain,
        arguments=({"tools": list(tools)} if tools else {}) | ({"declare": False} if terse else {}),
    )


def _make(rng: random.Random, level: int, terse: bool) -> tuple[str, Task]:
    if level <= 3:
        return _chain(rng, level - 1 if level < 3 else rng.randint(0, 3), terse)
    return _lines(rng, terse) if level == 4 else _offices(rng, changes=level == 6)


def value(rng: random.Random, terse: bool) -> str:
    """A fact of the first four levels."""
    return str(rng.randrange(10)) if terse else f"{rng.randrange(100):02d}"


def _distinct(rng: random.Random, count: int, letters: int) -> list[str]:
    keys: dict[str, None] = {}
    while len(keys) < count:
        keys["".join(rng.sample(KEYS, letters))] = None
    return list(keys)


def _chain(rng: random.Random, hops: int, terse: bool) -> tuple[str, Task]:
    keys = _distinct(rng, 1 + hops + DECOYS, letters=1 if terse else 2)
    path, answer = keys[: 1 + hops], value(rng, terse)
    contents = [f"@{following}" for following in path[1:]] + [answer]
    files = dict(zip(path, contents, strict=True))
    files |= {key: value(rng, terse) for key in keys[1 + hops :]}
    calls = [call("bash", files[key], command=f"cat {key}") for key in path]
    text = (
        f"The file {path[0]} holds a number, or @ and the name of the file to read next. Find the number, and answer "
        "with it alone."
    )
    task = {"files": {k: v + "\n" for k, v in sorted(files.items())}, "answer": answer}
    return path[0] if terse else text, task | {"solution": {"calls": calls, "answer": answer}}


def _lines(rng: random.Random, terse: bool) -> tuple[str, Task]:
    keys = _distinct(rng, 24, letters=1 if terse else 2)
    values = [value(rng, terse) for _ in keys]
    wanted = rng.randrange(len(keys))
    lines = [f"{k} {v}" for k, v in zip(keys, values, strict=True)]
    files = {f"{name}": "\n".join(lines[i::4]) + "\n" for i, name in enumerate("abcd")}
    text = f"Some line of some file here begins with {keys[wanted]}. Answer with the number in it alone."
    found = call("bash", lines[wanted], command=f"grep -h {keys[wanted]} *")
    solution = {"calls": [found], "answer": values[wanted]}
    return f"*{keys[wanted]}" if terse else text, {
        "files": files,
        "answer": values[wanted],
        "solution": solution,
    }


def _offices(rng: random.Random, changes: bool) -> tuple[str, Task]:
    """People work in rooms, rooms have telephones; with ``changes`` people moved."""
    people = [f"{a} {b}" for a, b in zip(rng.sample(NAMES, 12), rng.sample(LAST_NAMES, 12), strict=True)]
    rooms = [str(n) for n in rng.sample(range(100, 400), 12)]
    phones = dict(zip(rooms, map(str, rng.sample(range(2000, 9999), 12)), strict=True))
    wanted = rng.randrange(12)
    rows = []
    for person, room in zip(people, rooms, strict=True):
        days = sorted(rng.sample(range(1, 29), 3 if changes else 1))
        homes = [rng.choice(rooms) for _ in days[1:]] + [room]
        rows += [f"2026-03-{d:02d} {person} works in room {h}" for d, h in zip(days, homes, strict=True)]
    rng.shuffle(rows)
    files = {
        f"staff/{name}.txt": "\n".join(rows[i::3]) + "\n" for i, name in enumerate(("east", "north", "west"))
    }
    for floor in "123":
        on_it = [f"room {r}: telephone {p}" for r, p in sorted(phones.items()) if r.startswith(floor)]
        files[f"rooms/floor{floor}.txt"] = "\n".join(on_it) + "\n"
    person, room = people[wanted], rooms[wanted]
    last = sorted(r for r in rows if f" {person} " in r)[-1]
    calls = [
        call("bash", last, command=f"grep -rh '{person}' staff | sort | tail -1"),
        call("bash", f"room {room}: telephone {phones[room]}", command=f"grep -rh 'room {room}:' rooms"),
    ]
    text = (
        f"The folders staff and rooms say who works in which room and which telephone is there. What is the number of "
        f"the telephone in {person}'s room{' now' if changes else ''}? Answer with the number alone."
    )
    return text, {
        "files": files,
        "answer": phones[room],
        "solution": {"calls": calls, "answer": phones[room]},
    }
