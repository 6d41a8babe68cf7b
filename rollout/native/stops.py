"""What a request must satisfy to be served, and when a response ends. Shared by all engines."""

from __future__ import annotations

from collections.abc import Callable, Collection

from k3rl.types import StopReason
from rollout.engine import Generation
from rollout.sampling import check_params

Decode = Callable[[list[int]], str]

_CHARACTER_BYTES = (
    4  # of UTF-8, at most; so an unfinished character is finished, or broken, after as many tokens
)


def check_request(
    generation: Generation, taken: Collection[str], vocab_size: int, max_context: int, decode: Decode | None
) -> None:
    """Raise `ValueError` for a generation that can never be served. ``taken`` are the ids in the engine."""
    name = f"generation '{generation.id}'"
    params = generation.sampling
    if generation.done:
        raise ValueError(f"{name} is already finished: {generation.stop_reason}")
    if generation.id in taken:
        raise ValueError(f"{name} is already queued or running")
    if not generation.context_ids:
        raise ValueError(f"{name} has an empty context")
    if len(generation.context_ids) >= max_context:
        count = len(generation.context_ids)
        raise ValueError(f"{name}: a context of {count} tokens leaves no room in {max_context}")
    if not len(generation.token_ids) == len(generation.logprobs) == len(generation.versions):
        raise ValueError(f"{name}: tokens, log-probs and versions differ in number")
    for ids in filter(None, (generation.context_ids, generation.token_ids)):
        if min(ids) < 0 or max(ids) >= vocab_size:
            raise ValueError(f"{name}: token ids must lie in [0, {vocab_size})")
    check_params(params)
    if params.stop_strings and decode is None:
        raise ValueError(f"{name} has stop strings, but the engine was made without `decode`")
    if not all(params.stop_strings):
        raise ValueError(f"{name} has an empty stop string")


class StopStrings:
    """Finds stop strings in a response as it grows, across the borders of tokens.

    Text is decoded in pieces: a piece ends where decoding shows no unfinished character (U+FFFD), so a
    character spread over several tokens is read whole. ``decode`` turns token ids into text.
    """

    def __init__(self, strings: tuple[str, ...], decode: Decode) -> None:
        self._strings, self._decode = strings, decode
        self._keep = max(map(len, strings)) - 1
        self._anchor = self._read = 0  # tokens before `_read` are in `_tail`; decoding starts at `_anchor`
        self._tail = ""

    def hit(self, token_ids: list[int]) -> bool:
        """Whether the response so far holds one; call it after every token."""
        before = self._decode(token_ids[self._anchor : self._read])
        text = self._decode(token_ids[self._anchor :])
        seen = self._tail + text[len(before) :]
        whole = not text.endswith("\ufffd") or len(token_ids) - self._read >= _CHARACTER_BYTES
        if len(text) > len(before) and whole:
            self._anchor, self._read = self._read, len(token_ids)
            self._tail = seen[-self._keep :] if self._keep else ""
        return any(s in seen for s in self._strings)


class StopRules:
    """When one response ends. The budget is the trajectory's: tokens that exist already count (spec/10 row
    80).

    ``limit`` is the number of response tokens at which it ends at the latest; ``ids`` end it when sampled.
    """

    def __init__(
        self, generation: Generation, eos_token_ids: frozenset[int], max_context: int, decode: Decode | None
    ) -> None:
        params = generation.sampling
        self.ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
        self.limit = min(params.max_tokens, max_context - len(generation.context_ids))
        self._strings = StopStrings(params.stop_strings, decode) if params.stop_strings else None
        if self._strings is not None:
            for end in range(1, len(generation.token_ids)):  # a resumed response is read as it grew
                self._strings.hit(generation.token_ids[:end])

    def may_end(self, token: int, count: int) -> bool:
        """A cheap look at the newest token, the ``count``-th: is `reason` worth asking?"""
        return token in self.ids or count >= self.limit or self._strings is not None

    def reason(self, generation: Generation) -> StopReason | None:
        """Why the response ends with its newest token, if it does; call it once for every token."""
        tokens = generation.token_ids
        if not tokens:
            return None
        if tokens[-1] in self.ids:
            return StopReason.END_OF_TURN
        if self._strings is not None and self._strings.hit(tokens):
            return StopReason.STOP_STRING
        if len(tokens) >= self.limit:
            budget_spent = len(tokens) >= generation.sampling.max_tokens
            return StopReason.MAX_TOKENS if budget_spent else StopReason.MAX_CONTEXT
        return None
