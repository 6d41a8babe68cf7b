"""Build the k3-nano tokenizer: ``python -m k3rl.chat.build_nano_tokenizer [folder]``. Deterministic.

A byte-level BPE of 512 ids for models that run on two cores, where each prompt token costs. In order of ids:
256 bytes, then merges for frequent pieces of English, then whole units (a word, an attribute name, the fixed
text of an option) that are looked up before any merging, then K3's structure tokens, `[PAD]` last as in K3.
Digits and arithmetic symbols stand alone, always.
"""

from __future__ import annotations

import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from k3rl.chat.vocabulary import byte_level_text
from k3rl.chat.xtml_format import (
    CHOICE_NONE_TEXT,
    CHOICE_REQUIRED_TEXT,
    EFFORT_TEXT,
    END_OF_MESSAGE,
    JSON_OBJECT_TEXT,
    JSON_SCHEMA_TEXT,
    MORE_TOOLS_TEXT,
    OPTION_TYPES,
    PAD,
    STRUCTURE_TOKENS,
    TOOLS_TEXT,
)
from k3rl.types import Effort

VOCABULARY_SIZE = 512
NANO_FOLDER = Path(__file__).parent / "nano"

# Whole texts of option messages, or what precedes their variable part. Matched where a segment begins.
OPENINGS = [
    *(EFFORT_TEXT.format(effort) for effort in Effort),
    TOOLS_TEXT.split("{}")[0],
    MORE_TOOLS_TEXT.split("{}")[0],
    CHOICE_REQUIRED_TEXT,
    CHOICE_NONE_TEXT,
    JSON_OBJECT_TEXT,
    JSON_SCHEMA_TEXT.split("{}")[0],
]
# Text segments that XTML writes alone. Matched only where they are a whole segment.
WHOLE_SEGMENTS = ['="', *OPTION_TYPES]
# Punctuation of compact and spaced JSON. No arithmetic symbol among them.
PUNCTUATION = [
    '{"',
    '"}',
    '":"',
    '":{"',
    '","',
    '":',
    '":[',
    '"},"',
    '"}}',
    '"}]',
    ', "',
    '": ',
    "\n```",
    "\n\n",
    "    ",
]

WORDS = """
message think response tools call argument json user assistant system tool
 role| type| key| index| name| tool
string number boolean null object array integer function name parameters properties type required description
low high max medium true false
 the| a| of| and| to| is| in| are| with| for| from| by| that| it| as| on| at| be| or| not| each| all| one
 two| then| how| many| what| which| so| we| you| this| there| have| has| if| no| yes| an| do| first| last
 next| than| number| numbers| digit| digits| sum| list| word| words| letter| letters| order| answer| result
 total| value| left| count| sort| reverse| plus| minus| times| equals| divided| only| more| less| after
 before| between| now| same
The What How Find Compute Add Answer Give Count Sort Reply So Now It Is You
is the and of answer result sum
"""

CORPUS = """
What is the sum of these numbers? Compute the value and give only the answer. Add them one by one, carry
when needed. How many letters are in the word? Count each of them, then report the total. Sort the list
in ascending order. Reverse the digits of the number. Find the greatest common divisor of two integers.
Please solve this problem step by step and write the final result. A person has several apples and gives
some of them to another person; how many remain? There were three trains leaving the station at different
times. Which one arrives first? The quick brown fox jumps over the lazy dog. Thinking longer helps with
harder questions, but a short answer is better for an easy one. Use the tool to run the command, read its
output, and continue until the tests pass. Determine whether the statement is true or false. If it is
not, explain the reason. Consider the following sequence and predict the next element. Multiply,
subtract, divide, compare, check, verify, correct, return, repeat, change, choose, remember. Yesterday
the children walked along the river and watched the boats. Reading, writing, and arithmetic are taught in
school. Information about the environment, its operation, and the condition of each component should be
reported.
"""


def split_pattern() -> str:
    """Regular expression (Oniguruma) of what is looked up or merged as one unit; alternatives in order."""
    return "|".join(
        [
            r"\A(?:" + "|".join(_literal(text) for text in OPENINGS) + ")",
            r"\A(?:" + "|".join(_literal(text) for text in WHOLE_SEGMENTS) + r")\z",
            *(_literal(text) for text in sorted(PUNCTUATION, key=len, reverse=True)),
            r" ?\p{L}[\p{L}\p{M}]*",
            r"\p{N}",
            r"[\s\S]",
        ]
    )


def build() -> dict[str, Any]:
    """The tokenizer as the JSON of Hugging Face's `tokenizers`."""
    base = [byte_level_text(bytes([b])) for b in range(256)]
    units = list(dict.fromkeys([*OPENINGS, *WHOLE_SEGMENTS, *PUNCTUATION, *_words()]))
    whole = [byte_level_text(unit.encode()) for unit in units]
    room = VOCABULARY_SIZE - len(base) - len(STRUCTURE_TOKENS)
    merges = learn_merges(CORPUS, room - len(whole), taken=set(whole))
    entries = base + [a + b for a, b in merges] + whole
    vocabulary = {token: i for i, token in enumerate(entries)}
    specials = {token: len(entries) + i for i, token in enumerate(STRUCTURE_TOKENS)}
    if len(vocabulary) + len(specials) != VOCABULARY_SIZE:
        raise ValueError(f"{len(vocabulary)} entries and {len(specials)} specials are not {VOCABULARY_SIZE}")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": split_pattern()}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False}
            | {"normalized": False, "special": True}
            for token, i in specials.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,  # a unit that is an entry is one token, however its bytes would merge
            "vocab": vocabulary,
            "merges": [[a, b] for a, b in merges],
        },
    }


def learn_merges(corpus: str, count: int, taken: set[str]) -> list[tuple[str, str]]:
    """The `count` most frequent byte-pair merges of `corpus` that do not spell an entry in `taken`."""
    words = [list(byte_level_text(w.encode())) for w in re.findall(r" ?[A-Za-z]+", " ".join(corpus.split()))]
    words = [w for w in words if "".join(w) not in taken]
    merges: list[tuple[str, str]] = []
    taken = set(taken)
    while len(merges) < count:
        counts: dict[tuple[str, str], int] = {}
        for word in words:
            for pair in pairwise(word):
                if pair[0] + pair[1] not in taken:
                    counts[pair] = counts.get(pair, 0) + 1
        best = max(counts, key=lambda pair: (counts[pair], pair))
        merges.append(best)
        taken.add("".join(best))
        words = [_merge(word, best) for word in words]
    return merges


def config() -> dict[str, Any]:
    """``tokenizer_config.json``, as transformers' `AutoTokenizer` reads it."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "[BOS]",
        "eos_token": END_OF_MESSAGE,
        "pad_token": PAD,
        "model_max_length": 1048576,
        "clean_up_tokenization_spaces": False,
    }


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("tokenizer.json", build()), ("tokenizer_config.json", config())):
        text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
        (folder / name).write_text(text, encoding="utf-8")


def _words() -> list[str]:
    rows = [row for row in WORDS.split("\n") if row]
    return [w for row in rows for w in (row.split("|") if row.startswith(" ") else row.split())]


def _merge(word: list[str], pair: tuple[str, str]) -> list[str]:
    out: list[str] = []
    for piece in word:
        if out and (out[-1], piece) == pair:
            out[-1] += piece
        else:
            out.append(piece)
    return out


def _literal(text: str) -> str:
    return re.sub(r"([\\^$.|?*+()\[\]{}\-#])", r"\\\1", text)


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else NANO_FOLDER)
