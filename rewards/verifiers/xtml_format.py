"""Does a response keep to the chat format?"""

from __future__ import annotations

from rewards.api import Score, Scored, reward


@reward(name="xtml_format", depends="response", trusted=True, deterministic=True)
def xtml_format(scored: Scored, think: bool | None = None, content: bool = True) -> Score:
    """1 where every turn is closed and read without errors, no call is malformed, and the last turn says
    something.

    ``think=True`` asks for a non-empty think channel too, ``False`` for an empty one. ``content=False``
    accepts a last turn without response text. Components: ``closed``, ``clean``, ``calls``, ``channels``.
    """
    turns = scored.turns or (scored.response,)
    closed = all(turn.complete for turn in turns)
    errors = [error for turn in turns for error in turn.errors]
    malformed = [call.malformed for call in scored.tool_calls if call.malformed]
    channels = bool(scored.content.strip()) or not content
    if think is not None:
        channels = channels and bool(scored.reasoning.strip()) is think
    good = closed and not errors and not malformed and channels
    parts = {
        "closed": float(closed),
        "clean": float(not errors),
        "calls": float(not malformed),
        "channels": float(channels),
    }
    return Score(float(good), parts, "; ".join([*errors, *malformed]))
