"""Which part of a response a verifier reads. All of it in time linear in the text: policies write long loops."""

from __future__ import annotations

import re
from typing import Literal, get_args

from k3rl.errors import UserError

Extract = Literal["whole", "last_number", "first_number", "answer_tag", "last_line"]
LOOKED_AT_CHARACTERS = 20_000
"""Patterns are searched for in so much of a text's end (or beginning)."""

NUMBER = re.compile(
    r"(?<![\w.])[-+\u2212]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w])|(?<![\w.])[-+\u2212]?\.\d+"
)


def extract(content: str, how: Extract = "whole") -> str | None:
    """The part of the response channel that counts as the answer; `None` where there is none.

    ``answer_tag`` takes the last ``<answer>...</answer>``. Numbers keep their sign and lose thousands
    separators.
    """
    match how:
        case "whole":
            return content.strip()
        case "last_line":
            lines = [line.strip() for line in content.splitlines() if line.strip()]
            return lines[-1] if lines else None
        case "answer_tag":
            found = tagged(content)
            return found[-1].strip() if found else None
        case "last_number":
            return _number(NUMBER.findall(content[-LOOKED_AT_CHARACTERS:])[-1:])
        case "first_number":
            return _number(NUMBER.findall(content[:LOOKED_AT_CHARACTERS])[:1])
    raise UserError(f"'extract' is '{how}', which is none of {', '.join(get_args(Extract))}")


def _number(found: list[str]) -> str | None:
    return found[0].replace(",", "").replace("\u2212", "-").removeprefix("+") if found else None


def tagged(text: str, tag: str = "answer") -> list[str]:
    """Contents of ``<answer>...</answer>``, in order, whatever the tag's case."""
    lower, opening, closing = text.lower(), f"<{tag}>", f"</{tag}>"
    found, at = [], 0
    while (start := lower.find(opening, at)) >= 0 and (end := lower.find(closing, start)) >= 0:
        found.append(text[start + len(opening) : end])
        at = end + len(closing)
    return found


def fences(text: str) -> list[tuple[str, str]]:
    """Language and body of each fenced block, in order. A block that is not closed ends with the text."""
    found: list[tuple[str, str]] = []
    language: str | None = None
    body: list[str] = []
    for line in text.splitlines():
        mark = line.strip()
        if language is None and mark.startswith("```"):
            language, body = mark.lstrip("`").strip().lower(), []
        elif language is not None and mark == "```":
            found.append((language, "\n".join(body)))
            language = None
        elif language is not None:
            body.append(line)
    if language is not None:
        found.append((language, "\n".join(body)))
    return found
