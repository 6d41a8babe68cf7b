"""Where in a response the answer stands: boxes, answer tags, answer phrases, formulas, the last line, the
last number."""

from __future__ import annotations

import re

from rewards.verifiers.extract import LOOKED_AT_CHARACTERS, NUMBER, tagged

BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{")
MARK = re.compile(rf"(?P<box>{BOX.pattern})|\\.|[{{}}]", re.DOTALL)  # a brace after a backslash is no brace
MAX_BOXES = 64
PHRASE = re.compile(
    r"(?:final\s+answer|answer|result|(?:correct|right)\s+(?:option|choice))\s*(?:is|are|:|=|\*\*|will\s+be|would\s+be)+\s*:?\s*(?:\*\*)?\s*",
    re.IGNORECASE,
)
FORMULA = re.compile(  # with a longest length: openers that nothing closes cost no more
    r"(?<!\\)\$\$(.{1,2000}?)(?<!\\)\$\$|\\\[(.{1,2000}?)\\\]|\\\((.{1,2000}?)\\\)|(?<![\\\d])\$([^$\n]{1,2000}?)(?<!\\)\$",
    re.DOTALL,
)
CORRECTION = re.compile(r",?\s+(?:\(?not|instead\s+of|rather\s+than)\s")
SENTENCE_END = re.compile(r"(?:[.!?](?=\s|$)|\n)")


def boxes(text: str) -> list[str]:
    """Contents of the last boxes, in order, braces matched. An unclosed box is no box."""
    spans: list[tuple[int, int]] = []
    opened: list[tuple[int, int]] = []  # depth outside, start of the content
    depth = 0
    for mark in MARK.finditer(text):
        if mark[0] == "}":
            depth -= 1
            if opened and opened[-1][0] == depth:
                spans.append((opened.pop()[1], mark.start()))
            depth = max(depth, opened[-1][0] + 1 if opened else 0)
        elif mark[0] == "{":
            depth += 1
        elif mark["box"]:
            opened.append((depth, mark.end()))
            depth += 1
    spans.sort()
    return [text[start:end].strip() for start, end in spans[-MAX_BOXES:]]


def formulas(text: str) -> list[str]:
    return [next(g for g in match if g).strip() for match in FORMULA.findall(text)]


def box_left_open(text: str) -> bool:
    """Did the response stop inside a box?"""
    starts = [match.start() for match in BOX.finditer(text)]
    return bool(starts) and not boxes(text[starts[-1] :])


def candidates(text: str, parts: int) -> list[str]:
    """What the response may mean as its answer, best first.

    The first that can be read decides, but for a list put together from several boxes or formulas, which a
    gold answer of several parts may be spread over: it comes first.

    A response that stops inside a box has no answer: nobody knows how it would have gone on.
    """
    if box_left_open(text):
        return []
    for group in (tagged(text)[-MAX_BOXES:], boxes(text)):
        if group:
            return [*_together(list(dict.fromkeys(group)), parts), group[-1].strip()]
    text = text[-LOOKED_AT_CHARACTERS:]
    phrases = list(PHRASE.finditer(text))
    if phrases and (rest := text[phrases[-1].end() :].strip()):
        return _after_phrase(rest, parts)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return []
    inside = formulas(text)
    found = [lines[0]] if len(lines) == 1 else []
    if inside:
        return [*found, *_together(inside, parts), inside[-1]]
    if len(lines) > 1:
        found.append(lines[-1])
    if re.search(r"[a-zA-Z]{3,}", lines[-1]):  # a sentence; a formula is not taken apart
        found += [lines[-1].rpartition("=")[2].strip()] if "=" in lines[-1] else []
        found += NUMBER.findall(lines[-1])[-1:]
    return found


def _together(group: list[str], parts: int) -> list[str]:
    return [", ".join(group[-parts:])] if parts > 1 and len(group) > 1 else []


def _after_phrase(rest: str, parts: int) -> list[str]:
    """What follows "the answer is": a formula that starts there, the sentence, its first number."""
    inside = formulas(rest)
    sentence = CORRECTION.split(SENTENCE_END.split(rest, maxsplit=1)[0], maxsplit=1)[0]
    found = _together(inside[:parts], parts)
    if inside and rest.find(inside[0]) < max(4, len(sentence)):
        found.append(inside[0])
    found.append(sentence)
    return found + NUMBER.findall(sentence)[:1]
