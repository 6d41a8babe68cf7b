"""Mathematical answers.

Reads the answer from the response (a box, an answer phrase, the last formula or line), reads both it and the
gold answer into what they are, and compares like with like. Expressions that the reader does not know are
left to math-verify, without its time limits, which work in the main thread only: this runs in a process that
is killed.
"""

from __future__ import annotations

import logging
import re
from fractions import Fraction

import sympy

from rewards.api import GraderError, Score, Scored, reward
from rewards.verifiers.math_answer import Answer, Relation, Sequence, Union, Words, read_answer
from rewards.verifiers.math_clean import clean
from rewards.verifiers.math_compare import equal_expressions
from rewards.verifiers.math_extract import boxes, candidates
from rewards.verifiers.math_parse import TooLarge, Unreadable, parse_expression
from rewards.verifiers.math_same import same

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the time limits that we do without
MAX_ANSWER_CHARACTERS = 5_000
BEYOND = re.compile(r"\\(?:sum|prod|int|iint|oint|lim|mathbb|partial|bigcup|bigcap)(?![a-zA-Z])")
# math-verify's parser computes what it reads: powers of powers, long exponents and large factorials stay out.
ENORMOUS = re.compile(r"\^\s*\{[^{}]*\^|\^\s*[\w.]+\s*\^|\^\s*\{?\s*-?[\d.]{4,}|\d{4,}\s*!|!\s*!")


@reward(name="math", depends="content", deterministic=True)
def math(scored: Scored, answer: str | int | float | list[str]) -> Score:
    """1 where the response's answer equals the right one; ``answer`` may list several right ones."""
    golds = answer if isinstance(answer, list) else [answer]
    if not golds or not all(str(gold).strip() for gold in golds):
        raise GraderError("there is no right answer to compare with")
    for gold in golds:
        found, right = judge(str(gold), scored.content)
        if right:
            return Score(1.0, {}, f"read {found!r}")
    return Score(0.0, {}, f"read {found!r}" if found is not None else "no answer found")


def judge(gold: str, response: str) -> tuple[str | None, bool]:
    """The answer that was read from the response (`None`: there is none), and whether it is right."""
    boxed = boxes(gold)
    right = read_answer(boxed[-1] if boxed else gold)
    parts = (
        len(right.items)
        if isinstance(right, Sequence)
        else len(right.parts)
        if isinstance(right, Union)
        else 1
    )
    found = candidates(response, parts)
    for position, text in enumerate(found):
        if len(text) > MAX_ANSWER_CHARACTERS:
            continue
        read = read_answer(text)
        if equal_answers(right, read, gold, text):
            return text, True
        spread = parts > 1 and position == 0 and len(found) > 1
        if not spread and not has_words(read):
            return text, False
    return (found[-1] if found else None), False


def has_words(answer: Answer) -> bool:
    """Is some of it not mathematics?"""
    match answer:
        case Words():
            return answer.text != "ldots"
        case Sequence():
            return any(map(has_words, answer.items))
        case Union():
            return any(map(has_words, answer.parts))
        case Relation():
            return any(map(has_words, answer.sides))
        case _:
            return False


def equal_answers(gold: Answer, answer: Answer, gold_text: str, answer_text: str) -> bool:
    """Are they equal? What our reader does not know goes to math-verify."""
    if same(gold, answer) or _same_word(gold_text, answer_text):
        return True
    if has_words(gold) or has_words(answer):
        return _by_math_verify(gold_text, answer_text)
    return False


def _same_word(gold: str, answer: str) -> bool:
    """One word, whatever its case; or a choice's letter, that the choice's text may follow."""
    gold, answer = clean(gold), clean(answer)
    letter = re.fullmatch(r"\(?([A-E])\)?", gold)
    if letter:
        chosen = re.match(r"\(?([A-Ea-e])(?:\)|[.:]|$)", answer)
        return chosen is not None and chosen[1].upper() == letter[1]
    return re.fullmatch(r"[A-Za-z]{2,}", gold) is not None and gold.lower() == answer.lower()


def _by_math_verify(gold_text: str, answer_text: str) -> bool:
    """For what our reader does not know (sums, integrals): both sides through LaTeX's full parser. Both
    texts must be formulas, and be read as expressions: numbers picked from inside something unread prove
    nothing."""
    texts = [clean(gold_text), clean(answer_text)]
    if any(
        len(t) > 1000 or re.search(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}", t) or ENORMOUS.search(t) for t in texts
    ):
        return False  # words are no formula
    if not any(BEYOND.search(t) for t in texts):
        return False
    from latex2sympy2_extended.latex2sympy2 import latex2sympy
    from math_verify.grader import verify

    read = []
    for text in texts:
        try:
            parse_expression(text)
        except TooLarge:
            return False
        except Unreadable:
            pass
        try:
            read.append(latex2sympy(text, is_real=True, convert_degrees=False, normalization_config=None))
        except Exception:  # the generated parser raises many kinds; unread is unequal
            return False
    if not all(isinstance(r, sympy.Basic) for r in read):
        return False
    if not all(_all_read(t, r) for t, r in zip(texts, read, strict=True)):
        return False
    if all(isinstance(r, sympy.Expr) for r in read):
        done = [_realised(r.doit()) for r in read]
        if not any(d.has(sympy.Sum, sympy.Integral, sympy.Product, sympy.Limit) for d in done):
            return equal_expressions(done[0], done[1])
    return bool(verify(read[0], read[1], timeout_seconds=None))


def _realised(expression: sympy.Expr) -> sympy.Expr:
    return expression.subs({s: sympy.Symbol(s.name, real=True) for s in expression.free_symbols})


def _all_read(text: str, expression: sympy.Basic) -> bool:
    """Every number written in the text must be in the expression, or be part of one that was computed from
    it."""
    written = {Fraction(n) for n in re.findall(r"\d+(?:\.\d+)?", text)}
    kept = {Fraction(int(n.p), int(n.q)) for n in expression.atoms(sympy.Rational)}
    return not written or bool(kept) or not expression.free_symbols


__all__ = ["judge", "math"]
