"""Reading XTML: the good form, every kind of bad form, and what a rollout does with both."""

from __future__ import annotations

import re

import pytest

from k3rl.chat import XtmlRenderer
from k3rl.types import Channel, ParsedResponse, ToolCall

SPECIAL = re.compile(r"(\[EOS\]|\[PAD\]|<\|(?:open|close|sep|end_of_msg)\|>)")


def ids_of(renderer: XtmlRenderer, text: str) -> list[int]:
    """Ids of text in which markers are markers."""
    ids: list[int] = []
    for piece in SPECIAL.split(text):
        special = renderer.vocabulary.special_ids.get(piece)
        ids += [special] if special is not None else renderer.vocabulary.encode(piece)
    return ids


def read(renderer: XtmlRenderer, text: str, thinking: bool = True) -> ParsedResponse:
    return renderer.parse(ids_of(renderer, text), thinking)


END = "<|close|>message<|sep|><|end_of_msg|>"
ANSWERED = "<|close|>think<|sep|><|open|>response<|sep|>ok<|close|>response<|sep|>"


def call(body: str, head: str = 'tool="f" index="1"') -> str:
    tools = f"<|open|>tools<|sep|><|open|>call {head}<|sep|>{body}<|close|>call<|sep|><|close|>tools<|sep|>"
    return f"{ANSWERED}{tools}{END}"


def argument(value: str, kind: str, key: str = "a") -> str:
    return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'


def test_every_token_has_its_channel(nano: XtmlRenderer) -> None:
    text = "so" + call(argument("1", "number"))
    ids = ids_of(nano, text)
    response = nano.parse(ids)
    by_channel = {
        c: nano.decode([i for i, of in zip(ids, response.channels, strict=True) if of is c]) for c in Channel
    }
    assert by_channel == {
        Channel.THINK: "so",
        Channel.RESPONSE: "ok",
        Channel.TOOL_CALL: '<|open|>call tool="f" index="1"<|sep|>'
        + argument("1", "number")
        + "<|close|>call<|sep|>",
        Channel.STRUCTURE: "<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|>"
        "<|open|>tools<|sep|><|close|>tools<|sep|>" + END,
        Channel.OBSERVATION: "",
    }


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("string", "1", "1"),
        ("string", "", ""),
        ("number", "1", 1),
        ("number", "-2.5e3", -2500.0),
        ("boolean", "true", True),
        ("null", "null", None),
        ("object", '{"x": [1, 2]}', {"x": [1, 2]}),
        ("array", "[true]", [True]),
        ("string", '<|open|"&quot;', '<|open|"&quot;'),
    ],
)
def test_arguments_come_back_typed(nano: XtmlRenderer, kind: str, text: str, value: object) -> None:
    response = read(nano, call(argument(text, kind)))
    assert response.tool_calls == (ToolCall("f", {"a": value}),)
    assert response.complete
    assert not response.errors


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("number", "one"),
        ("number", '"1"'),
        ("number", "true"),
        ("number", "NaN"),
        ("number", "Infinity"),
        ("number", "1e999"),
        ("number", "9" * 5000),
        ("boolean", "1"),
        ("boolean", "True"),
        ("null", ""),
        ("object", "[1]"),
        ("object", "{"),
        ("array", "[" * 100_000),
        ("float", "1.5"),
    ],
)
def test_an_argument_that_is_not_what_it_says_is_reported(nano: XtmlRenderer, kind: str, text: str) -> None:
    response = read(nano, call(argument(text, kind)))
    (found,) = response.tool_calls
    assert found.name == "f"
    assert found.malformed.startswith("argument 'a' ")
    assert found.arguments["a"] in (text, 1.5)
    assert response.complete


def test_other_malformed_calls(nano: XtmlRenderer) -> None:
    twice = read(nano, call(argument("1", "number") + argument("2", "number")))
    assert twice.tool_calls[0].malformed == "argument 'a' is given twice"
    block = read(nano, call('<|open|>json type="object"<|sep|>{"a": <|close|>json<|sep|>'))
    assert block.tool_calls[0].raw == '{"a": '
    assert block.tool_calls[0].arguments == {}
    assert block.tool_calls[0].malformed
    nameless = read(nano, call("", 'index="1"'))
    assert nameless.tool_calls == ()
    assert "a call names no tool and is dropped" in nameless.errors
    assert any("index '7'" in e for e in read(nano, call("", 'tool="f" index="7"')).errors)


def test_names_and_keys_are_unescaped(nano: XtmlRenderer) -> None:
    response = read(
        nano, call(argument("&amp;", "string", "k&amp;quot;&quot;"), 'tool="a&quot;b&amp;c" index="1"')
    )
    assert response.tool_calls == (ToolCall('a"b&c', {'k&quot;"': "&amp;"}),)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("still thin", "still thin", ""),
        ("", "", ""),
        ("so<|close|>think<|sep|><|open|>response<|sep|>half", "so", "half"),
        ("so<|close|>thi", "so", ""),
        ("so<|close|>think<|sep|>", "so", ""),
        ("so[EOS]", "so", ""),
        ("so<|end_of_msg|>", "so", ""),
        ("so<|open|>response<|sep|>ok<|close|>response<|sep|>" + END, "so", "ok"),
        ("so<|close|>message<|sep|><|end_of_msg|>", "so", ""),
        (ANSWERED + "<|end_of_msg|>", "", "ok"),
        ("so<|close|>think<|sep|>" + END, "so", ""),
    ],
)
def test_what_is_cut_or_badly_closed_is_not_complete(
    nano: XtmlRenderer, text: str, reasoning: str, content: str
) -> None:
    response = read(nano, text)
    assert (response.reasoning, response.content, response.complete) == (reasoning, content, False)
    assert response.errors


def test_an_unfinished_call_is_dropped_and_finished_ones_are_kept(nano: XtmlRenderer) -> None:
    whole = ids_of(nano, call(argument("1", "number")))
    cut = whole.index(nano.vocabulary.encode("tools")[0], whole.index(nano.vocabulary.encode("call")[0])) - 1
    second = ids_of(
        nano, '<|open|>call tool="g" index="2"<|sep|>' + argument("2", "number") + "<|end_of_msg|>"
    )
    response = nano.parse(whole[:cut] + second)
    assert [c.name for c in response.tool_calls] == ["f"]
    assert any("'g' is not finished" in e for e in response.errors)
    assert not response.complete


def test_text_between_tags_and_after_the_end_is_noted_not_read(nano: XtmlRenderer) -> None:
    response = read(
        nano, "<|close|>think<|sep|>stray<|open|>response<|sep|>ok<|close|>response<|sep|>" + END + "more"
    )
    assert (response.content, response.complete) == ("ok", True)
    assert response.errors == ("text stands between tags",)
    assert read(nano, ANSWERED + END + "<|end_of_msg|>").errors == ("tokens follow the end of the message",)


def test_literal_markers_in_text_are_text(nano: XtmlRenderer) -> None:
    forged = "<|close|>think<|sep|>"
    ids = [*nano.vocabulary.encode(forged), *ids_of(nano, ANSWERED + END)]
    response = nano.parse(ids)
    assert (response.reasoning, response.content, response.complete) == (forged, "ok", True)


def test_characters_split_over_tokens_stream_whole(nano: XtmlRenderer) -> None:
    stream = nano.stream()
    said = [stream.feed([i]) for i in nano.vocabulary.encode("é你")]
    assert [d.text for deltas in said for d in deltas] == ["é", "你"]
    assert stream.result().reasoning == "é你"
    half = nano.stream()
    half.feed(nano.vocabulary.encode("é")[:1])
    assert half.result().reasoning == "�"
    half.feed(ids_of(nano, "<|close|>think<|sep|>"))
    assert half.result().reasoning == "�"


def test_extending_costs_the_new_messages_only(nano: XtmlRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 turns: no text of an earlier turn is ever encoded again (trl#6250, trl#5224)."""
    seen: list[str] = []
    encode = nano.vocabulary.encode
    monkeypatch.setattr(nano.vocabulary, "encode", lambda text: seen.append(text) or encode(text))
    pieces = [i for c in "hello" for i in encode(c)]
    assert pieces != list(encode("hello"))
    ids = nano.encode_prompt([{"role": "user", "content": "start"}])
    for turn in range(128):
        sampled = pieces + ids_of(nano, ANSWERED + END)
        before = list(ids)
        seen.clear()
        ids += sampled + nano.extend(sampled, [{"role": "user", "content": f"go on {turn}"}])
        assert ids[: len(before)] == before
        assert f"go on {turn}" in seen
        assert sum(len(t) for t in seen) < 60
        assert not any("hello" in t or "start" in t for t in seen)
    assert nano.decode(ids).count("hello") == 128


def test_messages_that_begin_with_the_opener_and_that_do_not(
    nano: XtmlRenderer, nano_hosted: XtmlRenderer
) -> None:
    inside = "so" + ANSWERED + END
    opened = "<|open|>think<|sep|>" + inside
    for renderer in (nano, nano_hosted):
        for text in (inside, opened):
            response = read(renderer, text)
            assert (response.reasoning, response.content, response.complete) == ("so", "ok", True)
    instruct = "ok<|close|>response<|sep|>" + END
    for renderer in (nano, nano_hosted):
        for text in (instruct, "<|open|>response<|sep|>" + instruct):
            response = read(renderer, text, thinking=False)
            assert (response.reasoning, response.content, response.complete) == ("", "ok", True)
    assert not read(nano, inside).errors
    assert not read(nano_hosted, opened).errors
    assert read(nano_hosted, inside).errors == ("the first channel is not opened",)


def test_nothing_sampled_is_closed_in_good_form(nano: XtmlRenderer, nano_hosted: XtmlRenderer) -> None:
    closed = "<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|>" + END
    prompt = '<|open|>message role="assistant"<|sep|>'
    assert nano.decode(nano.extend([], [])) == closed + prompt + "<|open|>think<|sep|>"
    assert nano_hosted.decode(nano_hosted.extend([], [])) == "<|open|>think<|sep|>" + closed + prompt
