"""Responses that are JSON of a given shape."""

from __future__ import annotations

import json
from typing import Any, Literal

from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.exceptions import SchemaError
from referencing import Registry
from referencing.exceptions import Unresolvable

from rewards.api import GraderError, Score, Scored, reward
from rewards.verifiers.extract import fences


class NotJson(ValueError):
    """Why a text is not JSON."""


@reward(name="json_schema", depends="content", deterministic=True)
def json_schema(
    scored: Scored,
    schema: dict[str, Any] | str | None = None,
    answer: Any = None,
    where: Literal["whole", "fence"] = "fence",
) -> Score:
    """1 where the response is JSON that the schema (draft 2020-12) allows and that equals ``answer``, if one is
    given.

    ``where``: ``whole`` reads all of the response; ``fence`` its last fenced block, or all of it where there is
    none. References to other documents are not followed. Components: ``parses``, ``valid``. Runs in a killable
    process: a schema's patterns can take exponential time.
    """
    validator = _validator(schema)
    try:
        value = read_json(scored.content, where)
    except NotJson as error:
        return Score(0.0, {"parses": 0.0, "valid": 0.0}, str(error))
    try:
        errors = [f"{e.json_path}: {e.message}" for e in validator.iter_errors(value)]
    except Unresolvable as error:
        raise GraderError(f"the schema refers to what it does not hold: {error}") from error
    if not errors and answer is not None and value != _as_value(answer):
        errors = ["it is not the right answer"]
        return Score(0.0, {"parses": 1.0, "valid": 1.0}, errors[0])
    return Score(float(not errors), {"parses": 1.0, "valid": float(not errors)}, "; ".join(errors[:3])[:500])


def _validator(schema: dict[str, Any] | str | None) -> Draft202012Validator:
    value = schema if schema is not None else {}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise GraderError(f"the schema is not JSON: {error}") from error
    try:
        Draft202012Validator.check_schema(value)
    except SchemaError as error:
        raise GraderError(f"the schema is no JSON schema: {error.message}") from error
    return Draft202012Validator(value, registry=Registry(), format_checker=FormatChecker())


def _as_value(answer: Any) -> Any:
    if not isinstance(answer, str):
        return answer
    try:
        return json.loads(answer)
    except ValueError:
        return answer


def read_json(content: str, where: str) -> Any:
    """The JSON value of a response. A key given twice and numbers that JSON lacks are refused. Raises
    `NotJson`."""
    fenced = [body for _, body in fences(content)] if where == "fence" else []
    text = fenced[-1] if fenced else content

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise NotJson("a key is given twice")
        return found

    def never(name: str) -> Any:
        raise NotJson(f"'{name}' is no JSON number")

    try:
        return json.loads(text.strip(), object_pairs_hook=once, parse_constant=never)
    except RecursionError as error:
        raise NotJson("it is nested too deeply") from error
    except NotJson:
        raise
    except ValueError as error:
        raise NotJson(f"not JSON: {error}") from error
