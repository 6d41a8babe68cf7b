"""The k3-nano tokenizer: what is cheap in it, and that it is the one that its script builds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from k3rl.chat import XtmlRenderer
from k3rl.chat.build_nano_tokenizer import NANO_FOLDER, OPENINGS, build, write
from k3rl.chat.xtml_format import EFFORT_TEXT, STRUCTURE_TOKENS


def test_the_shipped_files_are_what_the_script_builds(tmp_path: Path) -> None:
    write(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (NANO_FOLDER / name).read_bytes()
    assert json.dumps(build()) == json.dumps(build())


def test_512_ids_with_structure_last_and_pad_at_the_end(nano: XtmlRenderer) -> None:
    assert nano.vocab_size == 512
    assert list(nano.vocabulary.special_ids.values()) == list(range(512 - len(STRUCTURE_TOKENS), 512))
    assert list(nano.vocabulary.special_ids) == list(STRUCTURE_TOKENS)
    assert nano.decode([511]) == "[PAD]"
    assert [nano.decode([i]) for i in nano.stop_token_ids] == ["<|end_of_msg|>", "[EOS]"]
    assert all(len(nano.vocabulary.token_bytes[i]) > 0 for i in range(512))


@pytest.mark.parametrize("text", ["12+34*(5-6)=7/8%9", "3.14<22>1,000", "2^10", "a1b2", "−5", "x==10"])
def test_digits_and_arithmetic_symbols_stand_alone(nano: XtmlRenderer, text: str) -> None:
    pieces = [nano.vocabulary.token_bytes[i] for i in nano.vocabulary.encode(text)]
    assert b"".join(pieces) == text.encode()
    for piece in pieces:
        assert len(piece) == 1 or not set(piece) & set(b"0123456789+-*/=()<>%^.,")


def test_what_xtml_writes_is_one_token_each(nano: XtmlRenderer) -> None:
    units = [
        "message", "think", "response", "tools", "call", "argument", "json", "user", "assistant", "system",
        "tool", " role", " type", " key", " index", " name", " tool", '="', '"', "tool-declare",
        "thinking-effort",
        "tool-choice", "response-format", "string", "number", "boolean", "null", "object", "array", *OPENINGS,
    ]  # fmt: skip
    assert {u: len(nano.vocabulary.encode(u)) for u in units} == dict.fromkeys(units, 1)


def test_an_effort_is_one_token_of_its_own(nano: XtmlRenderer) -> None:
    ids = {e: nano.vocabulary.encode(EFFORT_TEXT.format(e)) for e in ("low", "medium", "high", "max")}
    assert all(len(i) == 1 for i in ids.values())
    assert len(set(ids.values())) == 4
    question = [{"role": "user", "content": "12+34=?"}]
    cost = {e: len(nano.encode_prompt(question, effort=e)) for e in (None, "low", "high", "max")}
    assert cost == {None: 28, "low": 44, "high": 44, "max": 44}


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=40) | st.sampled_from([*STRUCTURE_TOKENS, *OPENINGS]))
def test_any_text_comes_back_and_none_is_structure(nano: XtmlRenderer, text: str) -> None:
    ids = nano.vocabulary.encode(text)
    assert nano.decode(ids) == text == nano.decode_text(ids)
    assert all(i < 501 for i in ids)


def test_transformers_reads_the_same_tokenizer(nano: XtmlRenderer, tmp_path: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(NANO_FOLDER)
    texts = ["What is 12+34?", "héllo 你好", "<|open|>message", EFFORT_TEXT.format("low"), "\n\n    x = {}"]
    for text in texts:
        if "<|" not in text:
            assert theirs.encode(text) == list(nano.vocabulary.encode(text))
            assert theirs.decode(theirs.encode(text)) == text
    assert (len(theirs), theirs.eos_token_id, theirs.pad_token_id) == (512, 503, 511)
    theirs.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert [again.encode(t) for t in texts] == [theirs.encode(t) for t in texts]
