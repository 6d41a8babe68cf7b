"""Runs inside a judge's sandbox, as a plain script: calls of the policy's function, one after the other.

Reads ``{"file", "entry", "calls"}`` from standard input and writes a line of JSON for each call: ``{"value": ...}`` or
``{"error": ...}``. What they should have been is not known here, so that nothing in here can be made to say it.
"""

import io
import json
import os
import sys


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the policy's code prints is not an answer
    given = json.loads(sys.stdin.buffer.read())
    sys.stdin = io.StringIO()
    namespace = {"__name__": "solution"}
    with open(given["file"], encoding="utf-8") as file:
        exec(compile(file.read(), given["file"], "exec"), namespace)
    function = namespace[given["entry"]]
    for arguments in given["calls"]:
        try:
            line = json.dumps({"value": function(*arguments)})
        except Exception as error:
            line = json.dumps({"error": type(error).__name__})
        answers.write(line + "\n")
        answers.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
