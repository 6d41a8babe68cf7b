"""What a chat template can do, found out by running it on small conversations once, when it is loaded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from k3rl.chat.template_parse import THINK_OPEN
from k3rl.chat.template_text import MARK, ChatTemplate
from k3rl.errors import UserError

_SYSTEM, _TOOL, _RESULT, _THOUGHT = "Qsystem", "qtool", "Qresult", "Qthought"
_USER = {"role": "user", "content": "Hello, world! Zażółć 你好\n\n  12 + 34 = 46?"}
_ANSWER = {"role": "assistant", "content": "Good day."}
_DECLARED = {
    "type": "function",
    "function": {"name": _TOOL, "description": "d", "parameters": {"type": "object", "properties": {}}},
}
_CALL = {"type": "function", "function": {"name": _TOOL, "arguments": {"k": "v"}}}
_HERMES = re.compile(
    rf'<tool_call>\s*\{{"name": "{_TOOL}", "arguments": \{{"k": "v"\}}\}}\s*</tool_call>', re.DOTALL
)


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """``end``: the special token behind an assistant's turn, or empty. ``default_system``: what the template
    says as system where no message does. ``hermes_tools``: it declares tools and writes calls as
    ``<tool_call>`` JSON. ``thinks``: it writes reasoning between ``<think>`` tags. ``opens_thinking``: does
    its prompt end with ``<think>``, with thinking off and on?"""

    end: str
    has_system: bool
    default_system: str
    hermes_tools: bool
    thinks: bool
    opens_thinking: tuple[bool, bool]
    prefix_preserving: bool
    notes: tuple[str, ...]


def probe(template: ChatTemplate, stop_tokens: Sequence[str]) -> TemplateFacts:
    """Raises `UserError` where the template cannot render one question, or the tokenizer's ids differ."""
    prompt = template.render([_USER], (), True, True)
    _check_ids(template, prompt)
    notes: list[str] = []
    thinks = (
        re.search(rf"{THINK_OPEN}\s*{_THOUGHT}\s*</think>", _try(template, [_USER, _thought(_ANSWER)]))
        is not None
    )
    hermes = _has_hermes_tools(template)
    if not hermes:
        notes.append("the template has no Hermes-style tools: tools are written into the system text")
    preserving = _is_prefix_preserving(template, thinks)
    if not preserving:
        notes.append("the template rewrites earlier turns: they are kept as they were sampled instead")
    return TemplateFacts(
        end=_end_token(template, stop_tokens),
        has_system=_SYSTEM in _try(template, [{"role": "system", "content": _SYSTEM}, _USER]),
        default_system=_default_system(template),
        hermes_tools=hermes,
        thinks=thinks,
        opens_thinking=(_opens(template.render([_USER], (), True, False)), _opens(prompt)),
        prefix_preserving=preserving,
        notes=tuple(notes),
    )


def _opens(prompt: str) -> bool:
    return prompt.rstrip().endswith(THINK_OPEN)


def _check_ids(template: ChatTemplate, text: str) -> None:
    """The same ids as the tokenizer itself gives for text that holds nothing foreign."""
    expected = template.vocabulary.reference_encode(text)
    if template.encode(text, begins=True) != expected:
        raise UserError(
            f"tokenizer '{template.name}' cannot be used: text in pieces gets other ids than the whole text"
        )


def _end_token(template: ChatTemplate, stop_tokens: Sequence[str]) -> str:
    """The first special token behind an assistant's content: a known stop token, else any special one."""
    text = template.render([_USER, {"role": "assistant", "content": MARK}])
    if MARK not in text:
        raise UserError(f"the chat template of '{template.name}' drops what the assistant says")
    after = text[text.rfind(MARK) :]
    special = [t for t, facts in template.vocabulary.added_tokens.items() if facts["special"]]
    match = template.first_token(after, stop_tokens) or template.first_token(after, special)
    return match[0] if match else ""


def _default_system(template: ChatTemplate) -> str:
    """What the template puts where a system message's content would stand; empty if nothing."""
    before, mark, after = _try(template, [{"role": "system", "content": MARK}, _USER]).partition(MARK)
    without = _try(template, [_USER])
    if not (mark and before and without.startswith(before) and without.endswith(after)):
        return ""
    text = without[len(before) : len(without) - len(after)]
    return "" if template.first_token(text, list(template.vocabulary.special_ids)) else text.strip()


def _has_hermes_tools(template: ChatTemplate) -> bool:
    declared = _TOOL in _try(template, [_USER], [_DECLARED])
    turn: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    text = _try(template, [_USER, turn, {"role": "tool", "name": _TOOL, "content": _RESULT}])
    return declared and _HERMES.search(text) is not None and _RESULT in text


def _is_prefix_preserving(template: ChatTemplate, thinks: bool) -> bool:
    turn = _thought(_ANSWER) if thinks else _ANSWER
    return _try(template, [_USER, turn, _USER]).startswith(_try(template, [_USER, turn]) or "\0")


def _thought(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "reasoning_content": _THOUGHT}


def _try(template: ChatTemplate, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> str:
    """What the template writes, or nothing where it refuses: then it cannot do what is asked."""
    try:
        return template.render(messages, tools)
    except UserError:
        return ""
