"""What a response's ids say beyond their text: which of them are structure, and which tools they call."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from k3rl.chat import Renderer
from k3rl.errors import UserError

_BROKEN = (UserError, KeyError, IndexError, ValueError, OverflowError)


def special_ids(renderer: Renderer | None, ids: list[int]) -> list[int]:
    """The structure tokens among these ids, each once: text that only looks like one has other ids."""
    return [i for i in sorted(set(ids)) if renderer is not None and _is_special(renderer, i)]


def _is_special(renderer: Renderer, token: int) -> bool:
    try:
        return bool(renderer.decode([token])) and not renderer.decode_text([token])
    except _BROKEN:
        return False  # not in the vocabulary


def tool_calls(renderer: Renderer | None, values: dict[str, Any]) -> list[dict[str, Any]]:
    """``{start, calls: [{name, arguments, malformed, raw}]}`` by turn that calls tools; ``start``: its first token.

    Turns that the format cannot read are left to their text.
    """
    ids, mask, channels = (values.get(n) or [] for n in ("response_ids", "sampled_mask", "channels"))
    if renderer is None or "tool_call" not in channels or len(mask) != len(ids):
        return []
    found = []
    for sampled, places in groupby(range(len(ids)), key=lambda i: mask[i]):
        turn = list(places)
        if not sampled or not any(channels[i] == "tool_call" for i in turn):
            continue
        try:
            calls = renderer.parse([ids[i] for i in turn]).tool_calls
        except _BROKEN:
            continue
        said = [
            {"name": c.name, "arguments": c.arguments, "malformed": c.malformed, "raw": c.raw} for c in calls
        ]
        if said:
            found.append({"start": turn[0], "calls": said})
    return found
