"""Secrets out of what is shared: keys of known shapes, values that are called secret, this machine's own, home folders.

A pattern finds what looks like a secret, not what is one: a bundle should still be read before it is sent.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

MARK = "⟦redacted⟧"
_CALLED_SECRET = (
    r"(?:api[_-]?key|access[_-]?key|secret(?:[_-]?key)?|token|passw(?:or)?d|credentials?|authorization)"
)
# every repetition is bounded: the text is a policy's, and may be made to cost time
_SHAPES = re.compile(
    r"""
      -----BEGIN\ [A-Z ]{0,30}PRIVATE\ KEY-----.*?(?:-----END\ [A-Z ]{0,30}PRIVATE\ KEY-----|\Z)
    | \bsk-[A-Za-z0-9_-]{16,}                                   # OpenAI, Anthropic
    | \b(?:hf|gh[pousr]|glpat|npm|pypi|dckr_pat|r8)[_-][A-Za-z0-9_-]{16,}
    | \bgithub_pat_[A-Za-z0-9_]{20,}
    | \b(?:AKIA|ASIA)[0-9A-Z]{16}\b                             # AWS
    | \bAIza[0-9A-Za-z_-]{35}                                   # Google
    | \bxox[abprs]-[A-Za-z0-9-]{10,}                            # Slack
    | \beyJ[A-Za-z0-9_-]{8,999}\.[A-Za-z0-9_-]{8,9999}\.[A-Za-z0-9_-]*  # JSON web tokens
    | (?<=://)[^\s/:@]{1,64}:[^\s/@]{1,128}(?=@)                # user:password@ in an address
    """,
    re.VERBOSE | re.DOTALL,
)
_NAMED = re.compile(
    rf"\b[\w-]{{0,40}}{_CALLED_SECRET}\b[\"']?\s*[=:]\s*[\"']?(?:(?:bearer|basic)\s+)?([^\s\"',;<>{{}}]{{8,}})",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\bbearer\s+([A-Za-z0-9._~+/=-]{12,})", re.IGNORECASE)
_HOME = re.compile(r"(?:/home|/Users)/([^/\s\"'<>:]+)(?=/|\b)")
_NAME_OF_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


class Redactor:
    """Finds and replaces secrets; ``count`` is how many. Values of this process's own secret variables count too."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        own = {
            v for k, v in environment.items() if _NAME_OF_SECRET.search(k) and len(v) >= 8 and not v.isalpha()
        }
        ordered = sorted(own, key=len, reverse=True)
        self._own = re.compile("|".join(map(re.escape, ordered))) if ordered else None
        self.count = 0

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Where secrets are, in order, without overlaps."""
        found = [m.span() for m in _SHAPES.finditer(text)]
        found += [m.span(1) for pattern in (_NAMED, _BEARER, _HOME) for m in pattern.finditer(text)]
        found += [m.span() for m in self._own.finditer(text)] if self._own else []
        joined: list[tuple[int, int]] = []
        for start, end in sorted(found):
            if joined and start < joined[-1][1]:
                joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
            elif end > start:
                joined.append((start, end))
        return joined

    def text(self, text: str) -> str:
        parts, at = [], 0
        for start, end in self.spans(text):
            parts += [text[at:start], MARK]
            at = end
            self.count += 1
        return "".join([*parts, text[at:]])

    def pieces(self, pieces: Iterable[str]) -> list[str]:
        """The same for a text in pieces: a secret may span several, and the mark stands in its first."""
        found = list(pieces)
        spans = self.spans("".join(found))
        self.count += len(spans)
        at = 0
        for i, piece in enumerate(found):
            start, at = at, at + len(piece)
            found[i] = _without(piece, start, spans)
        return found

    def everything(self, value: Any) -> Any:
        """All texts of a value of JSON, names of keys too."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(str(k)): self._named(str(k), v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.everything(v) for v in value]
        return value

    def _named(self, name: str, value: Any) -> Any:
        """A text under a name such as ``api_key`` is one whatever its shape."""
        if (
            isinstance(value, str)
            and len(value) >= 8
            and re.fullmatch(rf"[\w-]*{_CALLED_SECRET}", name, re.IGNORECASE)
        ):
            self.count += 1
            return MARK
        return self.everything(value)


def _without(piece: str, start: int, spans: list[tuple[int, int]]) -> str:
    kept, at = "", 0
    for first, last in spans:
        if last <= start or first >= start + len(piece):
            continue
        kept += piece[at : max(0, first - start)] + (MARK if first >= start else "")
        at = min(len(piece), last - start)
    return kept + piece[at:]
