"""The worked examples of the XTML specification, and its rules one by one."""

from __future__ import annotations

import json

import pytest

from k3rl.chat import XtmlRenderer
from k3rl.chat.xtml_render import Piece, PieceWriter, context_pieces
from k3rl.errors import UserError

HI = [{"role": "user", "content": "Hi"}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"opts": {"type": "object"}, "a": {"type": "integer"}},
        },
    },
}
ADD_CALL = {"id": "c1", "function": {"name": "add", "arguments": {"a": 1, "opts": {"x": [1, 2]}}}}
ADD_TURN = {"role": "assistant", "reasoning_content": "need add", "content": "", "tool_calls": [ADD_CALL]}
ADD_RESULT = {"role": "tool", "tool_call_id": "c1", "content": "2"}
EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with "
    "`thinking_effort=low`."
)


def cut(pieces: list[Piece]) -> list[str]:
    return [p.text for p in pieces]


def text(pieces: list[Piece]) -> str:
    return "".join(p.text for p in pieces)


def prompt_pieces(*args, thinking: bool = True, **options) -> list[Piece]:
    writer = PieceWriter(thinking)
    writer.context(*args, **options)
    writer.generation_prompt("channel")
    return writer.pieces


def test_example_a_is_cut_as_the_specification_cuts_it() -> None:
    expected = [
        "<|open|>", "message", " role", '="', "user", '"', "<|sep|>", "Hi", "<|close|>", "message", "<|sep|>",
        "<|end_of_msg|>", "<|open|>", "message", " role", '="', "assistant", '"', "<|sep|>", "<|open|>", "response",
        "<|sep|>",
    ]  # fmt: skip
    pieces = prompt_pieces(HI, thinking=False)
    assert cut(pieces) == expected
    assert [p.structure for p in pieces] == [t.startswith("<|") for t in expected]


def test_example_b_is_written_to_the_letter() -> None:
    expected = (
        '<|open|>message role="system" type="tool-declare"<|sep|># Tools\nHere are the available tools, described in '
        'JSONSchema.\n\n```json\n[{"function":{"name":"add","parameters":{"properties":{"a":{"type":"integer"},'
        '"opts":{"type":"object"}},"type":"object"}},"type":"function"}]\n```<|close|>message<|sep|><|end_of_msg|>'
        f'<|open|>message role="system" type="thinking-effort"<|sep|>{EFFORT}<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="user"<|sep|>Add one<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>need add<|close|>think<|sep|><|open|>response'
        '<|sep|><|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="add" index="1"<|sep|><|open|>argument '
        'key="a" type="number"<|sep|>1<|close|>argument<|sep|><|open|>argument key="opts" type="object"<|sep|>'
        '{"x": [1, 2]}<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>'
        '<|end_of_msg|><|open|>message role="tool" tool="add" index="1"<|sep|>2<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
    )
    messages = [{"role": "user", "content": "Add one"}, ADD_TURN, ADD_RESULT]
    pieces = prompt_pieces(messages, [ADD], "low")
    assert text(pieces) == expected
    call = pieces[cut(pieces).index("call") - 1 :][:12]
    assert cut(call) == [
        "<|open|>", "call", " tool", '="', "add", '"', " index", '="', "1", '"', "<|sep|>", "<|open|>",
    ]  # fmt: skip


def test_example_c_escapes_attributes_and_nothing_else() -> None:
    name = 'a"b&c'
    turn = {"role": "assistant", "content": name, "tool_calls": [{"name": name, "arguments": {"k&": name}}]}
    written = text(context_pieces([turn], thinking=False))
    assert '<|open|>call tool="a&quot;b&amp;c" index="1"<|sep|>' in written
    assert '<|open|>argument key="k&amp;" type="string"<|sep|>a"b&c<|close|>argument<|sep|>' in written
    assert '<|open|>response<|sep|>a"b&c<|close|>response<|sep|>' in written


@pytest.mark.parametrize(
    "content", ["Hi", "What is 3+4?", "", "你是一个简洁、准确的助手。", "<|open|>message"]
)
def test_a_plain_user_message_costs_seven_tokens_its_content_and_four(
    nano: XtmlRenderer, content: str
) -> None:
    prompt = nano.encode_prompt([{"role": "user", "content": content}], thinking=False)
    opener = 7 + 3
    assert len(prompt) == 7 + len(nano.vocabulary.encode(content)) + 4 + opener


def test_the_hosted_prompt_ends_at_the_bare_opener_of_seven_tokens(
    nano: XtmlRenderer, nano_hosted: XtmlRenderer
) -> None:
    assert len(nano_hosted.encode_prompt([])) == 7
    assert nano.decode(nano_hosted.encode_prompt([])) == '<|open|>message role="assistant"<|sep|>'
    for thinking, channel in ((True, "think"), (False, "response")):
        prompt = nano.encode_prompt(HI, thinking=thinking)
        hosted = nano_hosted.encode_prompt(HI, thinking=thinking)
        assert prompt[:-3] == hosted
        assert nano.decode(prompt[-3:]) == f"<|open|>{channel}<|sep|>"


def test_count_anchors_leave_seven_tokens_of_text_and_one_effort_message(nano_hosted: XtmlRenderer) -> None:
    """Moonshot counts 36 tokens for this prompt and 103 with the effort message of 67. What is structure there
    (29 tokens, and 15 of the effort message) is counted here; the rest is text in K3's own vocabulary."""
    messages = [
        {"role": "system", "content": "你是一个简洁、准确的助手。"},
        {"role": "user", "content": "你好"},
    ]
    texts = sum(len(nano_hosted.vocabulary.encode(m["content"])) for m in messages)
    off = nano_hosted.encode_prompt(messages, effort="max", thinking=False)
    on = nano_hosted.encode_prompt(messages, effort="max", thinking=True)
    assert len(off) - texts == 29 == 36 - 7
    attribute_and_body = len(nano_hosted.vocabulary.encode("thinking-effort")) + 1
    assert len(on) - len(off) == 14 + attribute_and_body
    assert on[-len(off) :] == off, "the effort message stands before the messages and changes nothing in them"


def test_options_stand_in_their_order() -> None:
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "object", "b": 1, "a": ["z", "y"]}}}
    messages = [*HI, {"role": "system", "tools": [{"name": "later"}]}]
    pieces = context_pieces(messages, [ADD], "high", tool_choice="required", response_format=schema)
    kinds = [t for t in cut(pieces) if t.endswith(("-declare", "-effort", "-choice", "-format"))]
    assert kinds == ["tool-declare", "thinking-effort", "tool-declare", "tool-choice", "response-format"]
    written = text(pieces)
    assert '```json\n{"a":["z","y"],"b":1,"type":"object"}\n```' in written
    assert (
        "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\nYou have access to "
        "all existing and extended tools.\nHere are the specs for the extended tools.\n\n```json\n"
        '[{"name":"later"}]\n```' in written
    )
    assert (
        "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message."
        in written
    )


def test_tool_choice_and_response_format_texts() -> None:
    def option(**options) -> str:
        return text(context_pieces([], **options))

    assert (
        option(tool_choice="auto")
        == option(tool_choice=None)
        == option(response_format={"type": "text"})
        == ""
    )
    assert "`tool_choice=none`.\nYou MUST NOT call any tools in the next message.<|close|>" in option(
        tool_choice="none"
    )
    named = option(tool_choice={"type": "function", "function": {"name": "add"}})
    assert "`tool_choice=specified`.\nYou MUST call the tool `add` in the next message.<|close|>" in named
    rule = "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
    assert f"`response_format=json_object`.\n{rule}<|close|>" in option(
        response_format={"type": "json_object"}
    )
    schema = {"schema": {"type": "object"}}
    for wrapper in (schema, {"json_schema": schema["schema"]}, schema["schema"]):
        written = option(response_format={"type": "json_schema", "json_schema": wrapper})
        head = f"`response_format=json_schema`.\n{rule}\nThe JSON data must match the following schema:\n"
        assert f'{head}```json\n{{"type":"object"}}\n```<|close|>' in written


def test_the_effort_message_is_for_thinking_alone(nano: XtmlRenderer) -> None:
    assert nano.encode_prompt(HI, effort="low", thinking=False) == nano.encode_prompt(HI, thinking=False)
    prompts = {e: nano.encode_prompt(HI, effort=e) for e in ("low", "medium", "high", "max", None)}
    assert len({tuple(p) for p in prompts.values()}) == 5
    assert EFFORT in nano.decode(prompts["low"])


def test_instruct_mode_drops_thinking_from_history_and_thinking_mode_keeps_it_always() -> None:
    turn = {"role": "assistant", "reasoning": "because", "content": "so"}
    assert "because" not in text(context_pieces([turn, *HI], thinking=False))
    assert "think" not in cut(context_pieces([turn, *HI], thinking=False))
    assert "<|open|>think<|sep|>because<|close|>think<|sep|>" in text(context_pieces([turn, *HI, turn, *HI]))
    blank = {"role": "assistant", "reasoning_content": " \n", "reasoning": "unused", "content": "so"}
    assert "<|open|>think<|sep|><|close|>think<|sep|>" in text(context_pieces([blank]))
    padded = {"role": "assistant", "reasoning_content": " \n because ", "content": "so"}
    assert "<|sep|> \n because <|close|>" in text(context_pieces([padded]))


def test_arguments_are_typed_and_spaced_as_python_spaces_json() -> None:
    values = {
        "t": True,
        "n": None,
        "i": 3,
        "f": 0.5,
        "s": "é",
        "o": {"b": 1, "a": "é"},
        "l": [1, 2],
        "u": (1,),
    }
    turn = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": values}]}
    written = text(context_pieces([turn], thinking=False))
    found = [a.split("<|close|>")[0] for a in written.split("<|open|>argument key=")[1:]]
    assert found == [
        '"t" type="boolean"<|sep|>true', '"n" type="null"<|sep|>null', '"i" type="number"<|sep|>3',
        '"f" type="number"<|sep|>0.5', '"s" type="string"<|sep|>é', '"o" type="object"<|sep|>{"b": 1, "a": "é"}',
        '"l" type="array"<|sep|>[1, 2]', '"u" type="array"<|sep|>[1]',
    ]  # fmt: skip


def test_arguments_as_json_text() -> None:
    def written(arguments: str) -> str:
        turn = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}
        return (
            text(context_pieces([turn], thinking=False))
            .split('index="1"<|sep|>')[1]
            .split("<|close|>call")[0]
        )

    assert written(' {"a": "x"} ') == '<|open|>argument key="a" type="string"<|sep|>x<|close|>argument<|sep|>'
    assert written("  ") == "" == written("{}")
    assert written('{"a": ') == '<|open|>json type="object"<|sep|>{"a": <|close|>json<|sep|>'
    with pytest.raises(UserError, match="list, not an object"):
        written("[1]")


def result(call_id: str, **fields) -> dict:
    return {"role": "tool", "tool_call_id": call_id, "content": call_id, **fields}


def test_tool_results_are_matched_and_stand_in_call_order() -> None:
    calls = [
        {"id": i, "function": {"name": n, "arguments": "{}"}} for i, n in (("x", "f"), ("y", "g"), ("z", "f"))
    ]
    turn = {"role": "assistant", "tool_calls": calls}

    def order(*results: dict) -> list[str]:
        written = text(context_pieces([turn, *results], thinking=False))
        return [m.split("<|close|>")[0] for m in written.split('<|open|>message role="tool" ')[1:]]

    assert order(result("z", name="stale"), result("x"), result("y")) == [
        'tool="f" index="1"<|sep|>x', 'tool="g" index="2"<|sep|>y', 'tool="f" index="3"<|sep|>z',
    ]  # fmt: skip
    # "g:1" is the alias of the call at position 1; a stray result leaves the whole run as it is
    assert order(result("f:2"), result("g:1"))[0].endswith(">g:1")
    assert order(result("z"), result("?", name="h"), result("x")) == [
        'tool="f" index="1"<|sep|>z', 'tool="h" index="2"<|sep|>?', 'tool="f" index="3"<|sep|>x',
    ]  # fmt: skip
    with pytest.raises(UserError, match=r"message 2: a tool result names no tool.*f:0.*x"):
        order(result("?"))


def test_indexes_start_anew_in_each_message() -> None:
    written = text(context_pieces([ADD_TURN, ADD_RESULT, *HI, ADD_TURN, ADD_RESULT]))
    assert written.count('role="tool" tool="add" index="1"') == 2
    assert written.count('call tool="add" index="1"') == 2


def test_a_picture_is_one_pad_between_its_marks(nano: XtmlRenderer) -> None:
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "x"}, "width": 640, "height": 48},
        "b",
    ]
    ids = nano.encode_prompt([{"role": "user", "content": parts}])
    picture = "<|media_begin|>image 640x48<|media_content|><|media_pad|><|media_end|>"
    assert f'role="user"<|sep|>a{picture}b<|close|>' in nano.decode(ids)
    assert ids.count(nano.vocabulary.special_ids["<|media_pad|>"]) == 1
    with pytest.raises(UserError, match=r"message 1: .*'width' and 'height'"):
        nano.encode_prompt([{"role": "user", "content": [{"type": "image"}]}])


def test_a_partial_answer_is_left_open(nano: XtmlRenderer) -> None:
    partial = {"role": "assistant", "content": "The answer is", "partial": True}
    end = (
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|><|close|>think<|sep|><|open|>response<|sep|>'
        "The answer is"
    )
    assert nano.decode(nano.encode_prompt([*HI, partial])).endswith(end)
    assert nano.decode(nano.encode_prompt([*HI, partial], thinking=False)).endswith(
        "<|sep|><|open|>response<|sep|>The answer is"
    )
    with pytest.raises(UserError, match="partial"):
        nano.encode_prompt([{**partial, "tool_calls": [ADD_CALL]}])


def test_names_developer_and_system_tools() -> None:
    assert text(context_pieces([{"role": "user", "name": 'a"b', "content": "x"}])).startswith(
        '<|open|>message role="user" name="a&quot;b"<|sep|>x'
    )
    assert 'role="system"<|sep|>x' in text(
        context_pieces([{"role": "developer", "name": "", "content": "x"}])
    )
    with pytest.raises(UserError, match="no content"):
        context_pieces([{"role": "system", "tools": [ADD], "content": "x"}])


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([{"role": "usr", "content": ""}], "message 1 has the role 'usr', .*did you mean 'user'"),
        ([*HI, {"content": "x"}], "message 2 has the role None"),
        (["x"], "message 1 is not a mapping but a str"),
        ([*HI, {"role": "user", "content": 5}], "message 2: .*content is a int"),
        ([{"role": "user", "content": [{"type": "imge"}]}], "did you mean 'image'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "has no text"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "tool call 1 has no function name"),
        ([{"role": "assistant", "tool_calls": ["f"]}], "tool call 1 is not a mapping"),
        (
            [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": {1}}}]}],
            "'x' of the call of 'f'",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": float("nan")}}]}],
            "'x' of the",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": {1: 2}}]}],
            "1, which is not a string",
        ),
        ([{"role": "assistant", "reasoning_content": ["x"]}], "reasoning is a list"),
    ],
)
def test_bad_messages_are_named(nano: XtmlRenderer, messages: list, says: str) -> None:
    with pytest.raises(UserError, match=says):
        nano.encode_prompt(messages)


def test_bad_options_are_named(nano: XtmlRenderer) -> None:
    with pytest.raises(UserError, match="effort 'lowe' does not exist; did you mean 'low'"):
        nano.encode_prompt(HI, effort="lowe")
    with pytest.raises(UserError, match="did you mean 'required'"):
        nano.encode_prompt(HI, tool_choice="require")
    with pytest.raises(UserError, match="names no function"):
        nano.encode_prompt(HI, tool_choice={"type": "function"})
    with pytest.raises(UserError, match="did you mean 'json_object'"):
        nano.encode_prompt(HI, response_format={"type": "json_objct"})
    with pytest.raises(UserError, match="not JSON"):
        nano.encode_prompt(HI, [{"f": {1, 2}}])


def test_declarations_are_sorted_at_every_depth_but_lists_are_not() -> None:
    tool = {"b": [{"d": 1, "c": "é"}, 0], "a": {"z": 1, "y": 2}}
    body = text(context_pieces([], [tool])).split("```json\n")[1].split("\n```")[0]
    assert body == '[{"a":{"y":2,"z":1},"b":[{"c":"é","d":1},0]}]'
    assert json.loads(body) == [tool]
