"""The fixed strings of XTML: markers, option texts, attribute escaping (spec/01-xtml.md §1-3).

These are a wire format: a byte changed here is another prompt to a model trained on it.
"""

from __future__ import annotations

from k3rl.errors import UserError, nearest
from k3rl.types import Effort

BOS = "[BOS]"
EOS = "[EOS]"
END_OF_MESSAGE = "<|end_of_msg|>"
OPEN = "<|open|>"
CLOSE = "<|close|>"
SEP = "<|sep|>"
MEDIA_BEGIN = "<|media_begin|>"
MEDIA_CONTENT = "<|media_content|>"
MEDIA_END = "<|media_end|>"
MEDIA_PAD = "<|media_pad|>"
PAD = "[PAD]"

MARKERS = (END_OF_MESSAGE, OPEN, CLOSE, SEP)
"""What a tokenizer must have as single special tokens to speak XTML."""

STRUCTURE_TOKENS = (
    BOS,
    EOS,
    END_OF_MESSAGE,
    OPEN,
    CLOSE,
    SEP,
    MEDIA_BEGIN,
    MEDIA_CONTENT,
    MEDIA_END,
    MEDIA_PAD,
    PAD,
)
"""All special tokens of K3's chat format, in the order of their ids."""

OPTION_TYPES = ("tool-declare", "thinking-effort", "tool-choice", "response-format")

EFFORT_TEXT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response "
    "channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
TOOLS_TEXT = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
MORE_TOOLS_TEXT = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n"
    "```json\n{}\n```"
)
CHOICE_REQUIRED_TEXT = (
    "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message."
)
CHOICE_NONE_TEXT = (
    "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message."
)
CHOICE_NAMED_TEXT = (
    "The system is invoked with `tool_choice=specified`.\nYou MUST call the tool `{}` in the next message."
)
_JSON_RULE = (
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
JSON_OBJECT_TEXT = f"The system is invoked with `response_format=json_object`.\n{_JSON_RULE}"
JSON_SCHEMA_TEXT = (
    f"The system is invoked with `response_format=json_schema`.\n{_JSON_RULE}\n"
    "The JSON data must match the following schema:\n```json\n{}\n```"
)


def escape(value: str) -> str:
    """An attribute's value as it is written. Nothing but attribute values is ever escaped."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def unescape(value: str) -> str:
    """The inverse of `escape`."""
    return value.replace("&quot;", '"').replace("&amp;", "&")


def check_effort(effort: Effort | str | None) -> str | None:
    """Effort as a word, or ``None``. Raises `UserError` for a word that the format does not know."""
    if effort is None:
        return None
    known = [e.value for e in Effort]
    if str(effort) not in known:
        raise UserError(f"effort '{effort}' does not exist{nearest(str(effort), known)}")
    return str(effort)
