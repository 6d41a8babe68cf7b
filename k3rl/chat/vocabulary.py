"""Text to token ids and back, with one promise: ordinary text never becomes a special token.

Two vocabularies: `FastVocabulary` over a ``tokenizer.json`` of Hugging Face's `tokenizers`, and
`TiktokenVocabulary` (k3rl.chat.tiktoken_vocabulary) over K3's own ``tiktoken.model``.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

from tokenizers import Tokenizer

CACHED_TEXTS, SHORT_CHARS = 8192, 1_000  # names, tags, short questions
CACHED_LONG_TEXTS, LONG_CHARS = 256, 100_000  # system prompts, tool declarations
UNKNOWN = "\ufffd".encode()  # an id outside the vocabulary, which a padded head can sample


class Vocabulary(Protocol):
    """What a renderer needs of a tokenizer. Ids are dense in ``range(size)`` except for unused holes."""

    @property
    def size(self) -> int: ...

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Structure tokens by their strings: what text never becomes."""

    @property
    def token_bytes(self) -> Sequence[bytes] | None:
        """Bytes by id, specials as their strings; ``None`` where tokens are not byte strings."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of `text` as ordinary text: special tokens' strings in it are spelled out in pieces."""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, special tokens shown as their strings; invalid UTF-8 becomes U+FFFD."""

    def content_hash(self) -> str:
        """Hash of all (id, token) pairs and the rules by which text is cut."""


class FastVocabulary:
    """A `tokenizers` tokenizer. ``token_bytes`` is ``None`` where its tokens are not byte strings."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        spec = json.loads(tokenizer.to_str())
        self._spec = spec
        self.size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
        structure = [t for t in spec["added_tokens"] if t["special"] or t["content"].strip()]
        self.added_tokens: dict[str, dict[str, Any]] = {t["content"]: t for t in structure}
        self.special_ids: dict[str, int] = {t["content"]: t["id"] for t in structure}
        self._structure = frozenset(self.special_ids.values())
        plain = _without_added_tokens(spec)
        self._plain = Tokenizer.from_str(json.dumps(plain))
        self.token_bytes = self._byte_table() if _is_byte_level(spec) else None
        self.encode = cached_encode(self._encode)
        self.encode_inner = self._inner_encode(plain)

    def text_stream(self) -> TextStream:
        return TextStream(self)

    def reference_encode(self, text: str) -> list[int]:
        """Ids as the tokenizer itself gives them, special tokens recognised: never for foreign text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _inner_encode(self, plain: dict[str, Any]) -> Callable[[str], tuple[int, ...]]:
        """`encode` for text after a special token, where some tokenizers add no blank before a word."""
        if '"prepend_scheme": "first"' not in json.dumps(plain["pre_tokenizer"]):
            return self.encode
        rules = json.dumps(plain["pre_tokenizer"]).replace(
            '"prepend_scheme": "first"', '"prepend_scheme": "never"'
        )
        inner = Tokenizer.from_str(json.dumps(plain | {"pre_tokenizer": json.loads(rules)}))
        return cached_encode(lambda text: self._encode(text, inner))

    def _encode(self, text: str, plain: Tokenizer | None = None) -> tuple[int, ...]:
        if not text.isascii():
            text = without_surrogates(text)
        ids: list[int] = (plain or self._plain).encode(text, add_special_tokens=False).ids
        if self.token_bytes is None and not self._structure.isdisjoint(ids):
            raise ValueError(f"ordinary text was read as a special token: {text[:80]!r}")
        return tuple(ids)

    def decode(self, ids: Iterable[int]) -> str:
        if self.token_bytes is None:
            return self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return join_bytes(self.token_bytes, list(ids)).decode("utf-8", "replace")

    def content_hash(self) -> str:
        digest = hashlib.sha256()
        for token, i in sorted(
            self._tokenizer.get_vocab(with_added_tokens=True).items(), key=lambda kv: kv[1]
        ):
            digest.update(f"{i}\x1f{token}\x1e".encode())
        rules = {k: self._spec[k] for k in ("normalizer", "pre_tokenizer", "decoder")}
        rules["merges"] = self._spec["model"].get("merges")
        rules["special"] = sorted(self.special_ids)
        digest.update(json.dumps(rules, sort_keys=True).encode())
        return digest.hexdigest()

    def _byte_table(self) -> list[bytes]:
        table = [UNKNOWN] * self.size
        for token, i in self._tokenizer.get_vocab(with_added_tokens=False).items():
            table[i] = bytes_of_token(token)
        for t in self._spec["added_tokens"]:
            table[t["id"]] = t["content"].encode()
        return table


class TextStream:
    """Text of ordinary tokens as they come; bytes of an unfinished character are kept back."""

    def __init__(self, vocabulary: FastVocabulary) -> None:
        self._vocabulary = vocabulary
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._ids: list[int] = []  # not byte-level: tokens since the last flush
        self._said = ""

    def feed(self, token: int) -> str:
        table = self._vocabulary.token_bytes
        if table is not None:
            return self._bytes.decode(table[token] if token < len(table) else UNKNOWN)
        self._ids.append(token)
        text = self._vocabulary.decode(self._ids)
        if text.endswith("\ufffd") or not text.startswith(self._said):
            return ""
        new, self._said = text[len(self._said) :], text
        return new

    def pending(self) -> str:
        """What a `flush` would give now."""
        if self._vocabulary.token_bytes is not None:
            return self._bytes.getstate()[0].decode("utf-8", "replace")
        return self._vocabulary.decode(self._ids)[len(self._said) :] if self._ids else ""

    def flush(self) -> str:
        """The rest, unfinished characters as U+FFFD; the next token begins anew."""
        rest = self.pending()
        self._bytes.reset()
        self._ids, self._said = [], ""
        return rest


def cached_encode(encode: Callable[[str], tuple[int, ...]]) -> Callable[[str], tuple[int, ...]]:
    """`encode` behind two bounded caches, one for many short texts and one for a few long ones."""
    short = lru_cache(CACHED_TEXTS)(encode)
    long = lru_cache(CACHED_LONG_TEXTS)(encode)

    def cached(text: str) -> tuple[int, ...]:
        size = len(text)
        return short(text) if size <= SHORT_CHARS else long(text) if size <= LONG_CHARS else encode(text)

    return cached


def join_bytes(table: Sequence[bytes], ids: Sequence[int]) -> bytes:
    try:
        return b"".join([table[i] for i in ids])
    except IndexError:
        return b"".join([table[i] if i < len(table) else UNKNOWN for i in ids])


def without_surrogates(text: str) -> str:
    """JSON may carry half of a surrogate pair, which no UTF-8 can: it becomes U+FFFD, as decoders do."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def byte_level_text(data: bytes) -> str:
    """Bytes as the printable characters by which byte-level BPE vocabularies write them."""
    return "".join([_CHARACTERS[b] for b in data])


def bytes_of_token(token: str) -> bytes:
    """The inverse of `byte_level_text`; a token with other characters stands for its own UTF-8."""
    try:
        return bytes([_BYTES[c] for c in token])
    except KeyError:
        return token.encode()


def _byte_characters() -> list[str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


_CHARACTERS = _byte_characters()
_BYTES = {c: b for b, c in enumerate(_CHARACTERS)}


def _is_byte_level(spec: dict[str, Any]) -> bool:
    return '"type": "ByteLevel"' in json.dumps(spec["decoder"])


def _without_added_tokens(spec: dict[str, Any]) -> dict[str, Any]:
    """The same tokenizer, unable to make its added tokens. Added runs of blanks are no structure: kept."""
    kept = [t for t in spec["added_tokens"] if not t["special"] and not t["content"].strip()]
    gone = {t["content"] for t in spec["added_tokens"]} - {t["content"] for t in kept}
    model = dict(spec["model"])
    # A special token can be an entry of the model itself. Its id stays taken, under a name that byte-level
    # text cannot spell (a raw NUL is not one of its characters).
    if isinstance(model["vocab"], dict):
        model["vocab"] = {(f"\0{i}" if t in gone else t): i for t, i in model["vocab"].items()}
    else:
        model["vocab"] = [
            [f"\0{n}" if row[0] in gone else row[0], row[1]] for n, row in enumerate(model["vocab"])
        ]
    if model.get("merges"):
        model["merges"] = [m for m in model["merges"] if _joined(m) not in gone]
    return spec | {
        "added_tokens": kept,
        "post_processor": None,
        "truncation": None,
        "padding": None,
        "model": model,
    }


def _joined(merge: list[str] | str) -> str:
    return "".join(merge) if isinstance(merge, list) else merge.replace(" ", "", 1)
