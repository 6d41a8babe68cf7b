"""The reward of trl_grpo.py, for both frameworks: does the response's last number equal the answer?"""

from __future__ import annotations

import re

from rewards import Scored, reward


def value(text: str, answer: str) -> float:
    """1 or 0; a tenth for a response that has a number at all, so that groups differ early."""
    found = re.findall(r"-?\d+", text)
    return 1.0 if found and found[-1] == answer else 0.1 * bool(found)


@reward(name="last_number", depends="content", deterministic=True, trusted=True)
def last_number(scored: Scored, answer: str) -> float:
    """See `value`."""
    return value(scored.content, answer)
