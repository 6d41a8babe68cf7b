"""Tests of programs: read from the shapes that data sets use, and compared with what a program said."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rewards.api import GraderError


@dataclass(frozen=True, slots=True)
class Test:
    """One call of a function (``entry``), or one run of a program with standard input."""

    expected: Any
    stdin: str = ""
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    entry: str = ""


def read_tests(tests: Any, entry: str | None = None) -> list[Test]:
    """Tests from: a list of ``{input, output}`` (standard streams) or ``{args, kwargs, expected}`` (calls of
    ``entry``); or a mapping ``{inputs, outputs, fn_name}``; either as JSON text too. Raises `GraderError`."""
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError as error:
            raise GraderError(f"the tests are text but not JSON: {error}") from error
    if isinstance(tests, Mapping):
        entry = entry or tests.get("fn_name")
        inputs, outputs = tests.get("inputs"), tests.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise GraderError("tests given as a mapping need 'inputs' and 'outputs', lists of one length")
        key = ("args", "expected") if entry else ("input", "output")
        tests = [dict(zip(key, pair, strict=True)) for pair in zip(inputs, outputs, strict=True)]
    if not isinstance(tests, list) or not tests:
        raise GraderError("there are no tests")
    return [_read_test(test, number, entry) for number, test in enumerate(tests, 1)]


def _read_test(test: Any, number: int, entry: str | None) -> Test:
    if not isinstance(test, Mapping):
        raise GraderError(f"test {number} is a {type(test).__name__}, not a mapping")
    if entry:
        expected = test.get("expected", test.get("output"))
        args = test.get("args", test.get("input", []))
        if not isinstance(args, list) or ("expected" not in test and "output" not in test):
            raise GraderError(f"test {number} of '{entry}' needs 'args' (a list) and 'expected'")
        return Test(expected, args=args, kwargs=test.get("kwargs") or {}, entry=entry)
    if "output" not in test:
        raise GraderError(f"test {number} needs 'output'; for calls of a function give its name as 'entry'")
    return Test(_text(test["output"]), stdin=_text(test.get("input", "")))


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def same_output(expected: str, found: str, tolerance: float) -> bool:
    """Equal but for white space at the ends of lines and of the text; or word by word, numbers within
    ``tolerance``."""

    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in text.rstrip().splitlines()]

    if lines(expected) == lines(found):
        return True
    wanted, said = expected.split(), found.split()
    return tolerance > 0 and len(wanted) == len(said) and all(map(_close_words(tolerance), wanted, said))


def _close_words(tolerance: float):
    def close(a: str, b: str) -> bool:
        if a == b:
            return True
        try:
            return _close(float(a), float(b), tolerance)
        except ValueError:
            return False

    return close


def _close(a: float, b: float, tolerance: float) -> bool:
    return math.isfinite(a) and math.isfinite(b) and abs(a - b) <= tolerance * max(1.0, abs(a))


def same_value(expected: Any, found: Any, tolerance: float) -> bool:
    """Equal JSON values; true and false are no numbers, numbers within ``tolerance``."""
    if isinstance(expected, bool) or isinstance(found, bool):
        return expected is found
    if isinstance(expected, int | float) and isinstance(found, int | float):
        return expected == found or (tolerance > 0 and _close(float(expected), float(found), tolerance))
    if isinstance(expected, list) and isinstance(found, list):
        same_length = len(expected) == len(found)
        return same_length and all(same_value(a, b, tolerance) for a, b in zip(expected, found, strict=True))
    if isinstance(expected, dict) and isinstance(found, dict):
        same_keys = expected.keys() == found.keys()
        return same_keys and all(same_value(expected[k], found[k], tolerance) for k in expected)
    return type(expected) is type(found) and expected == found
