"""The two kinds of failure that a person sees."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Bad input: one sentence that names the file, key or row. The command line prints it and exits with 2."""


class RunError(Exception):
    """An invariant broke while a job ran. The command line prints the reason and exits with 1."""


def nearest(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"``, or the known names where none is near."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known: {', '.join(names)}" if names else ""
