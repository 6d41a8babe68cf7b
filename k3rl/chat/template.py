"""`TemplateRenderer`: any Hugging Face tokenizer with its own chat template."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from k3rl.chat import xtml_format as fmt
from k3rl.chat.messages import Call, calls_of, check_messages, reasoning_of, runs, tool_results
from k3rl.chat.renderer import Encoded
from k3rl.chat.template_parse import (
    CALL_CLOSE,
    CALL_OPEN,
    THINK_CLOSE,
    THINK_OPEN,
    TemplateState,
    TemplateStream,
)
from k3rl.chat.template_probe import TemplateFacts, probe
from k3rl.chat.template_text import MARK, ChatTemplate
from k3rl.chat.vocabulary import FastVocabulary
from k3rl.errors import UserError
from k3rl.types import Effort, Message, ParsedResponse

EFFORT_TEXT = "Thinking effort: {}."
TOOLS_TEXT = (
    "You can call these tools, described in JSON:\n<tools>\n{}\n</tools>\n"
    'To call one, write <tool_call>{{"name": "...", "arguments": {{...}}}}</tool_call>.'
)
RESULT_TEXT = "<tool_response>\n{}\n</tool_response>"
logger = logging.getLogger(__name__)


class TemplateRenderer:
    """A `Renderer` over a chat template.

    A conversation is composed turn by turn, each assistant turn as it would be sampled: earlier turns are
    never rendered or tokenised again, and their thinking stays, even where the template drops it from history
    (``prefix_preserving`` is then false, and ``notes`` says so). Effort goes into the system text. Where the
    template has no Hermes-style tools of its own, tools, calls and results are written as text.
    Raises `UserError` where the tokenizer cannot be reproduced exactly or the template fits no conversation.
    """

    def __init__(
        self,
        vocabulary: FastVocabulary,
        template: str,
        name: str = "template",
        variables: Mapping[str, str] | None = None,
        stop_token_ids: Iterable[int] = (),
    ) -> None:
        self.name = name
        self.vocabulary = vocabulary
        self.vocab_size = vocabulary.size
        self.template = ChatTemplate(template, vocabulary, variables or {}, name)
        stops = dict.fromkeys(stop_token_ids)
        by_id = {i: t for t, i in vocabulary.special_ids.items()}
        self.facts: TemplateFacts = probe(self.template, [by_id[i] for i in stops if i in by_id])
        if self.facts.end:
            stops = dict.fromkeys([vocabulary.special_ids[self.facts.end], *stops])
        if not stops:
            raise UserError(
                f"tokenizer '{name}' has no end-of-turn token: neither its template nor its config names one"
            )
        self.stop_token_ids = tuple(stops)
        self.notes = self.facts.notes
        self.prefix_preserving = self.facts.prefix_preserving
        for note in self.notes:
            logger.info("%s: %s", name, note)
        self._special = frozenset(vocabulary.special_ids.values())

    def encode_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        effort: Effort | str | None = None,
        thinking: bool = True,
    ) -> list[int]:
        """See `Renderer`. A last assistant message with ``partial: true`` is left open."""
        return self._compose(messages, tools, effort, thinking, generation=True).ids

    def encode_conversation(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        effort: Effort | str | None = None,
        thinking: bool = True,
    ) -> Encoded:
        """See `Renderer`. Loss is on what follows each generation prompt, up to and with the end of turn."""
        return self._compose(messages, tools, effort, thinking, generation=False)

    def extend(
        self, sampled_ids: Sequence[int], new_messages: Sequence[Message], thinking: bool = True
    ) -> list[int]:
        check_messages(new_messages)
        stream = self.stream(thinking)
        stream.feed(sampled_ids)
        ids: list[int] = []
        if stream.state is TemplateState.THINK:
            ids += self.template.encode(f"\n{THINK_CLOSE}\n\n")
        elif stream.state is TemplateState.CALL:
            ids += self.template.encode(f"\n{CALL_CLOSE}")
        if stream.state is not TemplateState.DONE:
            ids += self._end_ids()
        calls = [Call(call.name, "", call.arguments) for call in stream.calls]
        return ids + self._between(new_messages, calls, thinking, generation=True)

    def parse(self, response_ids: Sequence[int], thinking: bool = True) -> ParsedResponse:
        stream = self.stream(thinking)
        stream.feed(response_ids)
        return stream.result()

    def stream(self, thinking: bool = True) -> TemplateStream:
        opened = self.facts.opens_thinking[thinking]
        return TemplateStream(self.vocabulary, self.stop_token_ids, opened)

    def decode(self, ids: Iterable[int]) -> str:
        return self.vocabulary.decode(ids)

    def decode_text(self, ids: Iterable[int]) -> str:
        return self.vocabulary.decode([i for i in ids if i not in self._special])

    def fingerprint(self) -> str:
        parts = (
            self.template.source,
            json.dumps(self.template.variables, sort_keys=True),
            self.stop_token_ids,
        )
        text = "\x1f".join(["template", *map(str, parts), self.vocabulary.content_hash()])
        return hashlib.sha256(text.encode()).hexdigest()

    def _compose(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        effort: Effort | str | None,
        thinking: bool,
        generation: bool,
    ) -> Encoded:
        check_messages(messages)
        turns = [n for n, m in enumerate(messages) if m["role"] == "assistant"]
        first = turns[0] if turns else len(messages)
        opening = self._with_options(self._prepared(messages[:first], []), tools, effort, thinking)
        shown = [self.template.mask(t) for t in tools] if self.facts.hermes_tools else []
        text = self.template.render(opening, shown, generation or bool(turns), thinking)
        ids = self.template.encode(text, begins=True)
        mask = [False] * len(ids)
        for position, turn in enumerate(turns):
            following = turns[position + 1] if position + 1 < len(turns) else len(messages)
            sampled = self._turn(messages[turn], thinking)
            if messages[turn].get("partial") and turn == len(messages) - 1:
                return Encoded(ids + sampled, mask + [True] * len(sampled))
            sampled += self._end_ids()
            ids += sampled
            mask += [True] * len(sampled)
            new, more = messages[turn + 1 : following], following < len(messages)
            if new or more or generation:
                added = self._between(new, calls_of(messages[turn]), thinking, generation or more)
                ids += added
                mask += [False] * len(added)
        return Encoded(ids, mask)

    def _between(
        self, new: Sequence[Message], calls: Sequence[Call], thinking: bool, generation: bool
    ) -> list[int]:
        """Ids from behind a turn's end token to where the next turn begins: a function of `new` alone.

        The template renders a stand-in turn that consists of a mark, then `new`; what follows the mark's end
        of turn is what follows any turn."""
        user = {"role": "user", "content": "x"}
        messages = self._prepared(new, calls)
        turn: dict[str, Any] = {"role": "assistant", "content": MARK}
        try:
            text = self.template.render([user, turn, *messages], (), generation, thinking)
        except UserError:
            if not any(m["role"] == "tool" for m in messages):
                raise
            turn["tool_calls"] = [
                _template_call(Call(m["name"], "", {})) for m in messages if m["role"] == "tool"
            ]
            text = self.template.render([user, turn, *messages], (), generation, thinking)
        at = text.rfind(MARK)
        if at < 0:
            raise UserError(
                f"the chat template of '{self.name}' drops what the assistant said before these messages"
            )
        text = text[at + len(MARK) :]
        end = self.template.first_token(text, [self.facts.end]) if self.facts.end else None
        return self.template.encode(text[end.end() :] if end else text)

    def _turn(self, message: Message, thinking: bool) -> list[int]:
        """Ids that a model would sample to say `message`, without the end of turn."""
        reasoning = reasoning_of(message) if thinking else ""
        calls = calls_of(message)
        content = self.template.mask(_plain_text(message.get("content")))
        user = {"role": "user", "content": "x"}
        turn: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning:
            turn["reasoning_content"] = self.template.mask(reasoning)
        if calls:
            turn["tool_calls"] = self.template.mask([_template_call(c) for c in calls])
        native = (self.facts.hermes_tools or not calls) and (self.facts.thinks or not reasoning)
        if native and not message.get("partial"):
            prompt = self.template.render([user], (), True, thinking)
            whole = self.template.render([user, turn], (), False, thinking)
            end = (
                self.template.first_token(whole[len(prompt) :], [self.facts.end]) if self.facts.end else None
            )
            if whole.startswith(prompt) and end:
                return self.template.encode(whole[len(prompt) : len(prompt) + end.start()])
        return self.template.encode(self._spelled_turn(turn, thinking))

    def _spelled_turn(self, turn: dict[str, Any], thinking: bool) -> str:
        """A turn in the Hermes convention, for templates that cannot write it themselves."""
        text = ""
        opened = self.facts.opens_thinking[thinking]
        if turn.get("reasoning_content") or opened or (thinking and self.facts.thinks):
            text = "" if opened else f"{THINK_OPEN}\n"
            text += f"{turn.get('reasoning_content', '')}\n{THINK_CLOSE}\n\n"
        text += turn["content"]
        for call in turn.get("tool_calls", ()):
            text += "\n" if text and not text.endswith("\n") else ""
            body = json.dumps(call["function"], ensure_ascii=False)
            text += f"{CALL_OPEN}\n{body}\n{CALL_CLOSE}"
        return text

    def _end_ids(self) -> list[int]:
        return [self.vocabulary.special_ids[self.facts.end]] if self.facts.end else [self.stop_token_ids[0]]

    def _prepared(self, messages: Sequence[Message], calls: Sequence[Call]) -> list[dict[str, Any]]:
        """Messages without assistant turns in the shape that templates read, masked."""
        out: list[dict[str, Any]] = []
        position = 1
        for run in runs(messages):
            try:
                if run[0]["role"] == "tool":
                    out += self._results(tool_results(run, calls))
                else:
                    out.append(self._prepared_message(run[0]))
            except UserError as error:
                raise UserError(f"message {position}: {error}") from error
            position += len(run)
        return out

    def _prepared_message(self, message: Message) -> dict[str, Any]:
        role = "system" if message["role"] == "developer" else message["role"]
        content = _plain_text(message.get("content"))
        if role == "system" and message.get("tools"):
            content = _declaration(message["tools"])
        out = {"role": role, "content": self.template.mask(content)}
        if message.get("name"):
            out["name"] = self.template.mask(str(message["name"]))
        if role == "system" and not self.facts.has_system:
            out["role"] = "user"
        return out

    def _results(self, results: Sequence[tuple[str, Message]]) -> list[dict[str, Any]]:
        mask = self.template.mask
        bodies = [(mask(name), mask(_plain_text(m.get("content")))) for name, m in results]
        if self.facts.hermes_tools:
            return [{"role": "tool", "name": name, "content": body} for name, body in bodies]
        return [{"role": "user", "content": "\n".join(RESULT_TEXT.format(body) for _, body in bodies)}]

    def _with_options(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[dict[str, Any]],
        effort: Effort | str | None,
        thinking: bool,
    ) -> list[dict[str, Any]]:
        """Tools (where the template knows none) and effort, joined to the system text."""
        effort = fmt.check_effort(effort)
        extra = [self.template.mask(_declaration(tools))] if tools and not self.facts.hermes_tools else []
        if thinking and effort is not None:
            extra.append(EFFORT_TEXT.format(effort))
        if not extra:
            return messages
        role = "system" if self.facts.has_system else "user"
        if messages and messages[0]["role"] == role:
            head, rest = messages[0], messages[1:]
            texts = [head["content"], *extra] if role == "system" else [*extra, head["content"]]
            return [{**head, "content": "\n\n".join(t for t in texts if t)}, *rest]
        texts = [self.facts.default_system, *extra]
        return [{"role": role, "content": "\n\n".join(t for t in texts if t)}, *messages]


def _template_call(call: Call) -> dict[str, Any]:
    return {"type": "function", "function": {"name": call.name, "arguments": call.raw or call.arguments}}


def _declaration(tools: Sequence[dict[str, Any]]) -> str:
    try:
        lines = [json.dumps(tool, ensure_ascii=False, allow_nan=False) for tool in tools]
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"a tool declaration is not JSON: {error}") from error
    return TOOLS_TEXT.format("\n".join(lines))


def _plain_text(content: Any) -> str:
    """Content as one string. Raises `UserError` for pictures, which text models cannot see."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise UserError(f"a message's content is a {type(content).__name__}, not a string or a list of parts")
    texts: list[str] = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise UserError(f"a content part is no text, and this model reads text alone: {part!r:.80}")
        texts.append(text)
    return "".join(texts)
