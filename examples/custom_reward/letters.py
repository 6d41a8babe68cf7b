"""A reward of our own for walks along the keyboard: credit for every letter in its place."""

from rewards import Scored, reward


@reward(name="letters")
def letters(scored: Scored, answer: str, extra: float = 0.1) -> dict[str, float]:
    """Share of the answer's letters that stand where they should; each letter too many costs ``extra``."""
    said = scored.content.strip()
    right = sum(a == b for a, b in zip(said, answer))
    return {"right": right / len(answer), "too_long": -extra * max(0, len(said) - len(answer))}
