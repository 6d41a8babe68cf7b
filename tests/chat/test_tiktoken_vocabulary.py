"""K3's own kind of vocabulary, on a small tiktoken.model made here: XTML over it is XTML over any other."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rl.chat import XtmlRenderer, load_renderer
from k3rl.chat.tiktoken_vocabulary import MAX_PIECE_CHARS, MAX_RUN_CHARS, pieces
from k3rl.chat.xtml_format import MARKERS
from k3rl.errors import UserError

pytest.importorskip("tiktoken")
WORDS = [
    "th",
    "the",
    " the",
    "in",
    "ing",
    "Hi",
    "me",
    "mess",
    "message",
    "ss",
    "12",
    "123",
    "é",
    "你",
    "你好",
    "'s",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("k3")
    tokens = dict.fromkeys([bytes([b]) for b in range(256)] + [w.encode() for w in WORDS])
    lines = [f"{base64.b64encode(t).decode()} {rank}" for rank, t in enumerate(tokens)]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    first = len(tokens)
    named = ["[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>"]
    decoder = {str(first + n): {"content": t} for n, t in enumerate(named)}
    decoder[str(first + 255)] = {"content": "[PAD]"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    return folder


@pytest.fixture(scope="module")
def k3(folder: Path) -> XtmlRenderer:
    renderer = load_renderer(folder)
    assert isinstance(renderer, XtmlRenderer)
    return renderer


def test_ids_lie_as_in_k3(k3: XtmlRenderer) -> None:
    special = k3.vocabulary.special_ids
    assert len(special) == 256
    assert special["[BOS]"] == min(special.values())
    assert k3.vocab_size == special["[PAD]"] + 1 == special["[BOS]"] + 256
    assert special["[BOS]"] == 256 + len(WORDS)
    assert f"<|reserved_token_{special['<|sep|>'] + 1}|>" in special


def test_example_a_over_a_tiktoken_vocabulary(k3: XtmlRenderer) -> None:
    ids = k3.encode_prompt([{"role": "user", "content": "Hi"}], thinking=False)
    expected = (
        '<|open|>message role="user"<|sep|>Hi<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>'
    )
    assert k3.decode(ids) == expected
    marks = {k3.vocabulary.special_ids[t] for t in MARKERS}
    assert sum(i in marks for i in ids) == 9


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30) | st.sampled_from([*MARKERS, "[PAD]", "<|reserved_token_300|>", "a\ud800b"]))
def test_any_text_comes_back_and_none_is_structure(k3: XtmlRenderer, text: str) -> None:
    ids = k3.vocabulary.encode(text)
    assert k3.decode(ids) == text.replace("\ud800", "�")
    assert not set(ids) & set(k3.vocabulary.special_ids.values())


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("你好the", ["你好", "the"]),
        ("1234", ["123", "4"]),
        ("it's", ["it's"]),
        ("HTMLPage", ["HTMLPage"]),
        ("aB", ["a", "B"]),
        ("a+=b\n\nc", ["a", "+=", "b", "\n\n", "c"]),
        ("a   b", ["a", "  ", " b"]),
    ],
)
def test_text_is_cut_by_the_eight_alternatives(k3: XtmlRenderer, text: str, cut: list[str]) -> None:
    """Bytes merge within a piece only, so the ids of the whole are those of its pieces."""
    import tiktoken

    encoding = k3.vocabulary._encoding
    assert isinstance(encoding, tiktoken.Encoding)
    everything = {
        text[i:j].encode(): n
        for n, (i, j) in enumerate((i, j) for j in range(len(text) + 1) for i in range(j))
    }
    ranks = {bytes([b]): b for b in range(256)}
    for token in sorted(everything, key=len):
        ranks.setdefault(token, len(ranks))
    greedy = tiktoken.Encoding("t", pat_str=encoding._pat_str, mergeable_ranks=ranks, special_tokens={})
    assert [greedy.decode([i]) for i in greedy.encode_ordinary(text)] == cut


def test_extreme_text_is_cut_where_k3_cuts_it() -> None:
    long = "a" * (MAX_RUN_CHARS + 10) + " " + "b" * 5
    assert [len(p) for p in pieces(long)] == [MAX_RUN_CHARS, 10 + 1 + 5]
    blanks = " " * (2 * MAX_RUN_CHARS + 1) + "x"
    assert [len(p) for p in pieces(blanks)] == [MAX_RUN_CHARS, MAX_RUN_CHARS, 2]
    words = "ab " * 200_000
    assert [len(p) for p in pieces(words)] == [MAX_PIECE_CHARS, 600_000 - MAX_PIECE_CHARS]
    assert "".join(pieces(long * 20)) == long * 20
    assert list(pieces("")) == []


def test_broken_files_are_named_by_line(tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_text("YQ== 0\nnot base64! 1\n")
    with pytest.raises(UserError, match=r"tiktoken\.model, line 2"):
        load_renderer(tmp_path)
    (tmp_path / "tiktoken.model").write_text("\n")
    with pytest.raises(UserError, match="holds no tokens"):
        load_renderer(tmp_path)
    (tmp_path / "tiktoken.model").write_text("YQ== 0\n")
    with pytest.raises(UserError, match=r"lacks the structure tokens <\|end_of_msg\|>"):
        load_renderer(tmp_path)


def test_another_merge_order_is_another_fingerprint(folder: Path, k3: XtmlRenderer, tmp_path: Path) -> None:
    lines = (folder / "tiktoken.model").read_text().splitlines()
    (a, i), (b, j) = lines[10].split(), lines[11].split()
    lines[10], lines[11] = f"{b} {i}", f"{a} {j}"
    (tmp_path / "tiktoken.model").write_text("\n".join(lines))
    (tmp_path / "tokenizer_config.json").write_bytes((folder / "tokenizer_config.json").read_bytes())
    assert load_renderer(tmp_path).fingerprint() != k3.fingerprint()
    assert load_renderer(folder).fingerprint() == k3.fingerprint()
