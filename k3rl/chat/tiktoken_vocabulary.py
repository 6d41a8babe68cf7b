"""K3's own vocabulary: ``tiktoken.model`` and the special tokens named in ``tokenizer_config.json``."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from k3rl.chat.vocabulary import UNKNOWN, cached_encode, join_bytes, without_surrogates
from k3rl.errors import UserError

TIKTOKEN_FILE = "tiktoken.model"
RESERVED_SPECIALS = 256
MAX_PIECE_CHARS = 400_000
MAX_RUN_CHARS = 25_000

_CASED = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_CASED}*[\p{{Ll}}{_CASED}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_CASED}+[\p{{Ll}}{_CASED}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
"""The pre-tokeniser of spec/01-xtml.md §1, in Rust's regex syntax (``&&`` intersects sets)."""

_RUN = re.compile(rf"\s{{1,{MAX_RUN_CHARS}}}|\S{{1,{MAX_RUN_CHARS}}}")


class TiktokenVocabulary:
    """A `Vocabulary` (see k3rl.chat.vocabulary) over tiktoken's byte-pair encoder."""

    def __init__(self, ranks: dict[bytes, int], special_ids: dict[str, int]) -> None:
        try:
            import tiktoken
        except ImportError as error:
            raise UserError("K3's own vocabulary needs tiktoken: pip install tiktoken") from error
        self.special_ids = special_ids
        self.size = 1 + max([*ranks.values(), *special_ids.values()])
        self._encoding = tiktoken.Encoding(
            "k3", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=special_ids
        )
        table = [UNKNOWN] * self.size
        for token, i in ranks.items():
            table[i] = token
        for text, i in special_ids.items():
            table[i] = text.encode()
        self.token_bytes = table
        self.encode = cached_encode(self._encode)

    def _encode(self, text: str) -> tuple[int, ...]:
        text = without_surrogates(text)
        return tuple(i for piece in pieces(text) for i in self._encoding.encode_ordinary(piece))

    def decode(self, ids: Iterable[int]) -> str:
        return join_bytes(self.token_bytes, list(ids)).decode("utf-8", "replace")

    def content_hash(self) -> str:
        digest = hashlib.sha256(SPLIT_PATTERN.encode())
        for i, token in enumerate(self.token_bytes):
            digest.update(f"{i}\x1f{len(token)}\x1e".encode() + token)
        digest.update(repr(sorted(self.special_ids.items())).encode())
        return digest.hexdigest()


def pieces(text: str) -> Iterator[str]:
    """Cut extreme text as K3's tokenizer does: every 400,000 characters, and within these wherever a run of
    only blanks or only non-blanks exceeds 25,000."""
    for start in range(0, len(text), MAX_PIECE_CHARS):
        piece = text[start : start + MAX_PIECE_CHARS]
        if len(piece) <= MAX_RUN_CHARS:
            yield piece
            continue
        begin, last = 0, None
        for run in _RUN.finditer(piece):
            blank = run[0][0].isspace()
            if last == blank:  # the run before was cut at its limit
                yield piece[begin : run.start()]
                begin = run.start()
            last = blank
        yield piece[begin:]


def load_tiktoken(file: Path, config: dict[str, Any]) -> TiktokenVocabulary:
    """Raises `UserError` for a file that is not lines of base64 and rank."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise UserError(f"{file}, line {number}: not a base64 token and its rank") from error
    if not ranks:
        raise UserError(f"{file} holds no tokens")
    first = 1 + max(ranks.values())
    named = {int(i): t["content"] for i, t in (config.get("added_tokens_decoder") or {}).items()}
    ids = range(first, first + RESERVED_SPECIALS)
    special = {named.get(i, f"<|reserved_token_{i}|>"): i for i in ids} | {t: i for i, t in named.items()}
    return TiktokenVocabulary(ranks, special)
