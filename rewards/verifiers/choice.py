"""Multiple choice: which letters did the response settle on?"""

from __future__ import annotations

import re

from rewards.api import GraderError, Score, Scored, reward
from rewards.verifiers.extract import LOOKED_AT_CHARACTERS, tagged
from rewards.verifiers.math_extract import boxes

WRAPPING = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}|\*\*|__|`")
PHRASE = re.compile(
    r"\b(?:answers?|choices?|options?)\b\s*(?:is|are|:|=|would\s+be|should\s+be)?\s*:?\s*"
    r"(?:the\s+)?(?:choice|option|letter)?\s*",
    re.IGNORECASE,
)
MAX_PHRASES, MAX_SAID_CHARACTERS = 20, 500


@reward(name="multiple_choice", depends="content", trusted=True, deterministic=True)
def multiple_choice(
    scored: Scored,
    answer: str | int | list[str],
    choices: list[str] | None = None,
    letters: str = "ABCDEFGHIJ",
) -> Score:
    """1 where the response chose the right letter, or all of the right letters and no other.

    ``answer`` is a letter, several (``"AC"`` or a list), or a choice's number from 0. With ``choices``, an answer
    that repeats a choice's text counts as its letter. A response that commits itself to nothing gets 0.
    """
    wanted = right_letters(answer, choices, letters)
    found = chosen(scored.content, letters, choices, len(wanted) > 1)
    return Score(float(found == wanted), {}, f"chose {''.join(sorted(found)) or 'nothing'}")


def right_letters(answer: str | int | list[str], choices: list[str] | None, letters: str) -> set[str]:
    if isinstance(answer, int) and not isinstance(answer, bool):
        if not 0 <= answer < len(letters):
            raise GraderError(f"the answer is choice number {answer}, of letters {letters}")
        return {letters[answer]}
    items = answer if isinstance(answer, list) else [answer]
    found: set[str] = set()
    for item in items:
        text = str(item).strip().strip("().").strip()
        if choices and text in choices:
            found.add(letters[choices.index(text)])
            continue
        marks = set(re.sub(r"[\s,;&]+|and", "", text).upper())
        if not marks or not marks <= set(letters):
            raise GraderError(f"the answer {item!r} is not made of the letters {letters}")
        found |= marks
    return found


def chosen(content: str, letters: str, choices: list[str] | None, several: bool) -> set[str]:
    """The letters a text settles on: in its last box or answer tag, after its last answer phrase, on a line of
    their own, or the only ones in brackets; else the one choice whose text it repeats."""
    marked = [*tagged(content), *boxes(content)]
    if marked:
        return _leading(_plain(marked[-1]), letters, several) or _by_text(
            _plain(marked[-1]), letters, choices
        )
    text = _plain(content[-LOOKED_AT_CHARACTERS:])
    for match in reversed(list(PHRASE.finditer(text))[-MAX_PHRASES:]):
        said = text[match.end() : match.end() + MAX_SAID_CHARACTERS]
        if found := _leading(said, letters, several) or _by_text(said.split("\n")[0], letters, choices):
            return found
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in [*lines[-1:], *lines[:1]]:
        if found := _leading(line, letters, several):
            return found
    bracketed = {m.upper() for m in re.findall(rf"\(([{letters}])\)", text)}
    if len(bracketed) == 1 or (several and bracketed):
        return bracketed
    return _by_text(lines[-1] if lines else "", letters, choices)


def _plain(text: str) -> str:
    return WRAPPING.sub(lambda m: m[1] or "", text)


def _leading(text: str, letters: str, several: bool) -> set[str]:
    """Letters at the start: ``B``, ``(B)``, ``B) 12``, ``B. twelve``, ``A, C and D``. An article is no letter:
    a bare letter counts where nothing but a mark or the end follows."""
    one = rf"\(?\s*([{letters}{letters.lower()}])\s*(?:\)|[.:](?=\s|$)|(?=\s*(?:[,;&]|and\b|or\b|$|\n)))"
    found: list[str] = []
    rest = text.strip()
    while match := re.match(one, rest):
        found.append(match[1].upper())
        rest = rest[match.end() :].lstrip()
        separator = re.match(r"(?:[,;&]|and\b)\s*", rest)
        if not several or separator is None:
            break
        rest = rest[separator.end() :]
    if not found and several and (run := re.fullmatch(rf"[{letters}]{{2,}}\.?", rest)):
        return set(run[0].rstrip("."))
    return set(found)


def _by_text(text: str, letters: str, choices: list[str] | None) -> set[str]:
    if not choices:
        return set()

    def bare(value: str) -> str:
        return re.sub(r"\W+", " ", value).strip().casefold()

    said = bare(text)
    same = {letters[i] for i, choice in enumerate(choices) if bare(choice) == said}
    inside = {letters[i] for i, choice in enumerate(choices) if f" {bare(choice)} " in f" {said} "}
    return same or (inside if len(inside) == 1 else set())
