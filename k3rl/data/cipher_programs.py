"""Programs by example, for very small models: write the shell command that does to every text what was done to one.

The question ``cC:iY`` is an example of a cipher that moves every lower-case letter by one distance along the alphabet
and every upper-case letter by another: c became i, C became Y. The answer is a program, run in a sandbox on texts that
the policy has not seen:

    tr a-zA-Z g-za-fW-ZA-V

To write it one must know what a and A become. That is found by walking back, example and result together, as finely as
the effort asks (`k3rl.data.tasks`; the letter before each colon is the example's):

    low   cC:iY   a:gW
    high  cC:iY   b:hXa:gW
    max   cC:iY   b:iha:hg;b:YXa:XW

    problems = cipher_programs(part="train")                    # for reinforcement learning
    conversations = cipher_program_demonstrations(size=9600)    # for the cold start
"""

from __future__ import annotations

import random

from k3rl.data.conversations import Conversation
from k3rl.data.tasks import EFFORTS, RINGS, Part, careless, questions, said, step, thoughts
from k3rl.types import Effort, Problem

LOWER = RINGS["alphabet"]
UPPER = LOWER.upper()
LETTERS = LOWER[::-1]
TESTS = 2


def cipher_programs(
    part: Part = "train", min_steps: int = 2, max_steps: int = 6, domain: str = "coding"
) -> list[Problem]:
    """A problem for each pair of distances and each letter of the example, in a fixed shuffled order. ``min_steps`` and
    ``max_steps``: how far that letter is from a. ``budget_tokens`` (b0) is the thoughts' length at high effort."""
    return [
        Problem(
            id=f"cipher-program-{end}-{steps}",
            domain=domain,
            messages=[{"role": "user", "content": _question(end, steps)}],
            reward={"name": "code", "language": "bash", "tests": _tests(end, steps)},
            budget_tokens=len(_thoughts(end, steps, Effort.HIGH)),
            metadata={"steps": steps},
        )
        for end, steps in _questions(part, min_steps, max_steps)
    ]


def cipher_program_demonstrations(
    size: int = 9600,
    seed: int = 1,
    min_steps: int = 2,
    max_steps: int = 6,
    skipped: float = 0.3,
    cut: float = 0.2,
    domain: str = "coding",
) -> list[Conversation]:
    """Demonstrations over the train part, a third each at low, high and max effort. A share of ``skipped`` has no
    thoughts and a share of ``cut`` ends them early; the program is then a guess."""
    asked = _questions("train", min_steps, max_steps)
    rng = random.Random(f"cipher program {seed}")
    out = []
    for index in range(size):
        (end, steps), effort = rng.choice(asked), EFFORTS[index % len(EFFORTS)]
        thought, answer = careless(
            rng,
            _thoughts(end, steps, effort),
            program(_image_of_a(end, steps)),
            lambda: program(rng.choice(LOWER[:-1]) + rng.choice(UPPER[:-1])),
            skipped,
            cut,
        )
        messages = [{"role": "user", "content": _question(end, steps)}, said(answer, thought)]
        name = f"cipher-program-demonstration-{index}"
        out.append(Conversation(name, messages, effort=effort, domain=domain))
    return out


def program(images: str) -> str:
    """The command under which a and A become these two letters, neither of them itself."""
    (low, before_low), (high, before_high) = ((key, step(key, 1, LOWER, UPPER)) for key in images)
    return f"tr a-zA-Z {low}-za-{before_low}{high}-ZA-{before_high}"


def enciphered(text: str, images: str) -> str:
    """What the right program makes of a text."""
    moved = {LETTERS: images[0], LETTERS.upper(): images[1]}
    table: dict[int, int] = {}
    for letters, image in moved.items():
        shift = letters.index(image)
        table |= str.maketrans(letters, letters[shift:] + letters[:shift])
    return text.translate(table)


def _questions(part: Part, min_steps: int, max_steps: int) -> list[tuple[str, int]]:
    """What the example became, and how far its letter is from a; without ciphers that leave letters as they are."""
    found = []
    for end, steps in questions(part, min_steps, max_steps, LOWER):
        letters = end[0] + end[1].upper()
        if not set(_image_of_a(letters, steps)) & {"a", "A"}:
            found.append((letters, steps))
    return found


def _image_of_a(end: str, steps: int) -> str:
    return step(end, steps, LOWER, UPPER)


def _question(end: str, steps: int) -> str:
    letter = LETTERS[steps]
    return f"{letter}{letter.upper()}:{end}"


def _thoughts(end: str, steps: int, effort: Effort) -> str:
    return thoughts(end, steps, effort, LOWER, UPPER, counted=LETTERS)


def _tests(end: str, steps: int) -> list[dict[str, str]]:
    """Every letter occurs in each."""
    rng = random.Random(f"cipher tests {end} {steps}")
    images, out = _image_of_a(end, steps), []
    for _ in range(TESTS):
        letters = rng.sample(LETTERS + LETTERS.upper(), 52)
        text = " ".join("".join(letters[i : i + 6]) for i in range(0, 52, 6))
        out.append({"input": text + "\n", "output": enciphered(text, images) + "\n"})
    return out
