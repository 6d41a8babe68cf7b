"""Programs against tests, in a sandbox of their own.

What a test expects never enters the sandbox: a program gets one test's input at a time and its answer is compared
outside. The sandbox has no network, is fresh for each response, and is killed after it.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rewards.api import GraderError, Score, Scored, reward
from rewards.verifiers.code_tests import Test, read_tests, same_output, same_value
from rewards.verifiers.extract import fences
from sandbox_client import ExecResult, SyncSandbox

HARNESS = Path(__file__).with_name("code_harness.py")
HOME = "/tmp/solution"
OUTPUT_LIMIT_BYTES = 1 << 20
COMPILE_S = 30.0
MAX_TOTAL_S = 240.0  # less than the reward's own limit: slow programs fail, they do not fail the grader


@dataclass(frozen=True, slots=True)
class Language:
    file: str
    names: tuple[str, ...]
    run: tuple[str, ...]
    compile: tuple[str, ...] = ()


COMPILE_CPP = ("g++", "-O2", "-o", "solution", "solution.cpp")
LANGUAGES = {
    "python": Language("solution.py", ("python", "python3", "py"), ("python3", "-B", "solution.py")),
    "bash": Language("solution.sh", ("bash", "sh", "shell"), ("bash", "solution.sh")),
    "cpp": Language("solution.cpp", ("cpp", "c++", "cxx"), ("./solution",), COMPILE_CPP),
}


@reward(name="code", depends="content", sandbox=True, timeout_s=MAX_TOTAL_S + 60)
def code(
    scored: Scored,
    tests: list[dict[str, Any]] | dict[str, Any] | str,
    *,
    sandbox: SyncSandbox,
    entry: str | None = None,
    language: Literal["python", "bash", "cpp"] = "python",
    credit: Literal["all", "share"] = "all",
    tolerance: float = 0.0,
    time_limit_s: float = 5.0,
    total_limit_s: float = 60.0,
) -> Score:
    """1 where the program in the response's last code block passes all tests; with ``credit="share"`` the share of
    tests that it passes.

    Each test is ``{"input": ..., "output": ...}`` on the standard streams; or, where ``entry`` names a function (or
    a method of ``Solution``), ``{"args": [...], "expected": ...}``. ``tolerance`` is relative, absolute below 1.
    A test may take ``time_limit_s``, all of them ``total_limit_s``: those not reached count as failed.
    Components: ``passed`` (share), ``compiles``.
    """
    if language not in LANGUAGES or (entry and language != "python"):
        raise GraderError(f"language '{language}' is not one of {list(LANGUAGES)}, or has no function tests")
    wanted = read_tests(tests, entry)
    kind = LANGUAGES[language]
    program = program_of(scored.content, kind)
    if program is None:
        return Score(0.0, {"passed": 0.0, "compiles": 0.0}, "there is no code block")
    if trouble := _install(sandbox, kind, program, bool(entry)):
        return Score(0.0, {"passed": 0.0, "compiles": 0.0}, trouble)
    deadline_s = time.monotonic() + min(total_limit_s, MAX_TOTAL_S)
    passed, troubles = 0, []
    for number, test in enumerate(wanted, 1):
        limit_s = min(time_limit_s, deadline_s - time.monotonic())
        trouble = _run(sandbox, kind, test, tolerance, limit_s) if limit_s > 0 else "no time left"
        passed += not trouble
        troubles += [f"test {number}: {trouble}"] if trouble else []
        if trouble and (credit == "all" or limit_s <= 0):
            break
    share = passed / len(wanted)
    value = share if credit == "share" else float(passed == len(wanted))
    text = f"{passed} of {len(wanted)} tests passed"
    return Score(value, {"passed": share, "compiles": 1.0}, "; ".join([text, *troubles[:3]])[:1500])


def program_of(content: str, language: Language) -> str | None:
    """The last block in the language or without one; all of a response that has no blocks but looks like code."""
    blocks = fences(content)
    fitting = [body for name, body in blocks if not name or name.split()[0] in language.names]
    if fitting:
        return fitting[-1]
    return content if content.strip() and not blocks else None


def _install(sandbox: SyncSandbox, language: Language, program: str, calls: bool) -> str:
    """Put the program there; what is wrong with it, else an empty text. Raises `GraderError` without a compiler."""
    sandbox.write_file(f"{HOME}/{language.file}", program.encode("utf-8", "replace"))
    if calls:
        sandbox.write_file(f"{HOME}/harness.py", HARNESS.read_bytes())
    if not language.compile:
        return ""
    if not sandbox.exec(["which", language.compile[0]]).ok:
        raise GraderError(f"the sandbox has no '{language.compile[0]}'")
    built = sandbox.exec(list(language.compile), cwd=HOME, timeout_s=COMPILE_S)
    return "" if built.ok else f"does not compile: {built.stderr[:500]}"


def _run(sandbox: SyncSandbox, language: Language, test: Test, tolerance: float, limit_s: float) -> str:
    """One test. What went wrong, else an empty text."""
    if test.entry:
        call = {"file": language.file, "entry": test.entry, "args": test.args, "kwargs": test.kwargs}
        command, stdin = ["python3", "-B", "harness.py"], json.dumps(call)
    else:
        command, stdin = list(language.run), test.stdin
    result = sandbox.exec(
        command, cwd=HOME, timeout_s=limit_s, stdin=stdin.encode(), output_limit_bytes=OUTPUT_LIMIT_BYTES
    )
    if trouble := _fault(result, limit_s):
        return trouble
    if not test.entry:
        return (
            ""
            if same_output(test.expected, result.stdout, tolerance)
            else _differs(test.expected, result.stdout)
        )
    try:
        found = json.loads(result.stdout)
    except (ValueError, RecursionError):
        return "it returned nothing that can be compared"
    return "" if same_value(test.expected, found, tolerance) else _differs(test.expected, found)


def _fault(result: ExecResult, limit_s: float) -> str:
    if result.timed_out:
        return f"took more than {limit_s:.3g} s"
    if result.out_of_memory:
        return "out of memory"
    if result.stdout_bytes > OUTPUT_LIMIT_BYTES:
        return "wrote too much"
    if result.exit_code != 0:
        last = result.stderr.strip().splitlines()[-1:] or [""]
        return f"exit code {result.exit_code} {last[0][:300]}".strip()
    return ""


def _differs(expected: Any, found: Any) -> str:
    return f"expected {str(expected).strip()[:100]!r}, got {str(found).strip()[:100]!r}"
