"""A Hugging Face chat template run so that text which people bring can never become structure.

A template returns one string, in which a user's literal ``<|im_end|>`` looks like the template's own. So such
strings are masked before the template sees them: each is replaced by an escape character (private use) and a
code. What the template itself wrote is then all that can match a special token; the rest is unmasked, and
tokenised by a tokenizer that has no special tokens. Text without such strings passes through untouched, and
gets the ids that transformers' own ``apply_chat_template`` gives.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from k3rl.chat.vocabulary import FastVocabulary
from k3rl.errors import UserError

_ESCAPE = "\U0010fffd"
_FIRST_CODE = 0x100000
_PART_CODE, _ESCAPE_CODE, _MARK_CODE, _TOKEN_CODE = range(4)
_MASKED = re.compile(f"{_ESCAPE}(.)", re.DOTALL)

TEXT_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tags by which templates take text apart, masked whether they are tokens or not."""

MARK = _ESCAPE + chr(_FIRST_CODE + _MARK_CODE)
"""A text that no user can write, to find a place in what a template has written."""


class ChatTemplate:
    """`render` a conversation to masked text, `encode` masked text to ids."""

    def __init__(
        self, source: str, vocabulary: FastVocabulary, variables: Mapping[str, str], name: str
    ) -> None:
        self.source = source
        self.name = name
        self.vocabulary = vocabulary
        self.variables = dict(variables)
        self._tokens = sorted(vocabulary.special_ids, key=len, reverse=True)
        masked = dict.fromkeys([*self._tokens, *TEXT_TAGS])
        self._codes = {t: _ESCAPE + chr(_FIRST_CODE + _TOKEN_CODE + n) for n, t in enumerate(masked)}
        self._codes[_ESCAPE] = _ESCAPE + chr(_FIRST_CODE + _ESCAPE_CODE)
        self._texts = {code[1]: token for token, code in self._codes.items()} | {
            chr(_FIRST_CODE + _PART_CODE): ""
        }
        self._token = re.compile("|".join(re.escape(t) for t in self._tokens) or r"(?!)")
        self._maskable = re.compile(
            "|".join(re.escape(t) for t in sorted(self._codes, key=len, reverse=True))
        )
        self._heads = {t[:k] for t in self._tokens for k in range(1, len(t))}
        self._tails = {t[-k:] for t in self._tokens for k in range(1, len(t))}
        self._longest = max((len(t) for t in self._tokens), default=0)

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        generation: bool = False,
        thinking: bool = True,
    ) -> str:
        """Masked text. Strings in `messages` and `tools` must be masked already. Raises `UserError` where the
        template refuses the conversation."""
        from transformers.utils.chat_template_utils import render_jinja_template  # seconds to import

        options: dict[str, Any] = {**self.variables, "enable_thinking": thinking, "thinking": thinking}
        try:
            rendered: Any = render_jinja_template(
                conversations=[list(messages)],
                tools=list(tools) or None,
                chat_template=self.source,
                add_generation_prompt=generation,
                **options,
            )
        except Exception as error:  # foreign code: whatever it raises, this conversation does not fit it
            raise UserError(
                f"the chat template of '{self.name}' refuses the conversation: {error}"
            ) from error
        return str(rendered[0][0])

    def mask(self, value: Any) -> Any:
        """`value` with every string in it masked, keys too."""
        if isinstance(value, str):
            return self._mask_text(value)
        if isinstance(value, Mapping):
            return {self.mask(k): self.mask(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.mask(v) for v in value]
        return value

    def _mask_text(self, text: str) -> str:
        text = self._maskable.sub(lambda match: self._codes[match[0]], text)
        # Half a special token at an edge could be made whole by what the template writes beside it.
        sizes = range(1, min(self._longest, len(text) + 1))
        if any(text[-k:] in self._heads for k in sizes):
            text = text + _ESCAPE + chr(_FIRST_CODE + _PART_CODE)
        if any(text[:k] in self._tails for k in sizes):
            text = _ESCAPE + chr(_FIRST_CODE + _PART_CODE) + text
        return text

    def unmask(self, text: str) -> str:
        return _MASKED.sub(lambda match: self._texts.get(match[1], ""), text)

    def encode(self, masked: str, begins: bool = False) -> list[int]:
        """Ids of masked text. ``begins``: it is the very beginning of what the model reads."""
        ids: list[int] = []
        added = self.vocabulary.added_tokens
        start, swallow = 0, False
        for match in [*self._token.finditer(masked), None]:
            text = masked[start : match.start() if match else len(masked)]
            if swallow:
                text = text.lstrip()
            if match and added[match[0]]["lstrip"]:
                text = text.rstrip()
            if text:
                encode = self.vocabulary.encode if begins and start == 0 else self.vocabulary.encode_inner
                ids += encode(self.unmask(text))
            if match:
                ids.append(added[match[0]]["id"])
                start, swallow = match.end(), added[match[0]]["rstrip"]
        return ids

    def first_token(self, masked: str, among: Sequence[str]) -> re.Match[str] | None:
        """The first of the special tokens `among` in masked text."""
        return next((m for m in self._token.finditer(masked) if m[0] in among), None)
