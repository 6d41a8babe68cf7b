"""Does a response follow instructions that can be checked: lengths, keywords, formats, case?"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from k3rl.errors import nearest
from rewards.api import GraderError, Score, Scored, reward
from rewards.verifiers.constraint_kinds import KINDS


@reward(name="constraints", depends="content", deterministic=True)
def constraints(
    scored: Scored,
    instruction_id_list: list[str],
    kwargs: list[dict[str, Any]] | None = None,
    credit: Literal["all", "share"] = "all",
    loose: bool = False,
) -> Score:
    """1 where all instructions are followed; with ``credit="share"`` the share of those that are.

    ``instruction_id_list`` and ``kwargs`` are as in IFEval's data sets: names such as ``keywords:existence``, and for
    each the arguments, of which empty ones are left out. ``loose`` also accepts a response without its first line,
    without its last, or without asterisks. Components: one per instruction, numbered where its name repeats. An empty
    response follows nothing.
    """
    given = kwargs if kwargs is not None else [{}] * len(instruction_id_list)
    if not instruction_id_list or len(given) != len(instruction_id_list):
        raise GraderError(f"{len(instruction_id_list)} instructions with {len(given)} sets of arguments")
    texts = variants(scored.content) if loose else [scored.content]
    results: dict[str, float] = {}
    for name, arguments in zip(instruction_id_list, given, strict=True):
        label = name if name not in results else f"{name}#{sum(k.startswith(name) for k in results) + 1}"
        results[label] = float(followed(name, arguments or {}, texts))
    share = sum(results.values()) / len(results)
    failed = [label for label, value in results.items() if not value]
    text = f"not followed: {', '.join(failed)}" if failed else ""
    return Score(share if credit == "share" else float(not failed), results, text)


def followed(name: str, arguments: Mapping[str, Any], texts: Sequence[str]) -> bool:
    """Does one of the texts follow the instruction? Raises `GraderError` for an unknown one or wrong arguments."""
    if name not in KINDS:
        raise GraderError(f"there is no instruction '{name}'{nearest(name, KINDS)}")
    check = KINDS[name]
    own = {k: v for k, v in arguments.items() if v is not None}
    try:
        inspect.signature(check).bind("", **own)
    except TypeError as error:
        raise GraderError(f"the instruction '{name}': {error}") from error
    return any(text.strip() and check(text, **own) for text in texts)


def variants(text: str) -> list[str]:
    """The text; without its first line, its last line, both; and each without asterisks."""
    lines = text.split("\n")
    cut = [lines, lines[1:], lines[:-1], lines[1:-1]]
    plain = ["\n".join(some).strip() for some in cut]
    return [*plain, *[p.replace("*", "") for p in plain]]
