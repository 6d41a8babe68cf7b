"""Which part of a response a verifier reads."""

from __future__ import annotations

import re
from typing import Literal

from k3rl.errors import UserError

Extract = Literal["whole", "last_number", "first_number", "answer_tag", "last_line"]

NUMBER = re.compile(
    r"(?<![\w.])[-+\u2212]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w])|(?<![\w.])[-+\u2212]?\.\d+"
)
TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


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
            found = TAG.findall(content)
            return found[-1].strip() if found else None
        case "last_number" | "first_number":
            numbers = NUMBER.findall(content)
            if not numbers:
                return None
            number = numbers[-1] if how == "last_number" else numbers[0]
            return number.replace(",", "").replace("\u2212", "-").removeprefix("+")
    raise UserError(f"'extract' is '{how}', which is none of {', '.join(Extract.__args__)}")  # type: ignore[attr-defined]
