"""Runs inside the sandbox, as a plain script: one call of the policy's function.

Reads ``{"file", "entry", "args", "kwargs"}`` from standard input and writes the result as one line of JSON. What it
should have been is not known here. Standard output of the policy's code goes to standard error.
"""

import io
import json
import os
import sys


def plain(value):
    """JSON for what JSON lacks: sets in order, other iterables as lists, numbers of other libraries as numbers."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    for convert in ("tolist", "item"):
        if hasattr(value, convert):
            return getattr(value, convert)()
    return list(value)


def find(namespace, entry):
    owner, _, name = entry.rpartition(".")
    if not owner and entry not in namespace and hasattr(namespace.get("Solution"), entry):
        owner, name = "Solution", entry
    return getattr(namespace[owner](), name) if owner else namespace[name]


def main():
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    call = json.loads(sys.stdin.buffer.read())
    sys.stdin = io.StringIO()
    namespace = {"__name__": "solution"}
    with open(call["file"], encoding="utf-8") as file:
        exec(compile(file.read(), call["file"], "exec"), namespace)
    result = find(namespace, call["entry"])(*call["args"], **call["kwargs"])
    answer.write(json.dumps(result, default=plain) + "\n")
    answer.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
