"""A deterministic engine without a model: token i of a response is a function of its key and position."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from k3rl.types import StopReason
from rollout.engine import EngineStats, Generation

Script = Callable[[Generation], list[int] | None]
"""The whole turn that a policy would write, or ``None``: hashed tokens of a hashed length."""

FIRST_ORDINARY, ORDINARY = 100, 64  # ids of the nano tokenizer that are ordinary text


@lru_cache(maxsize=65536)
def _hash(key: int, position: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{key}:{position}".encode(), digest_size=6).digest(), "little")


def token_at(key: int, position: int) -> int:
    return FIRST_ORDINARY + _hash(key, position) % ORDINARY


def logprob_at(key: int, position: int) -> float:
    return -(_hash(key, position) % 1000) / 250.0


def hashed_length(key: int, longest: int) -> int:
    """Between 1 and ``longest``; most are short."""
    share = (_hash(key, -1) % 10_000) / 10_000
    return 1 + int(longest * share**3)


class ScriptedEngine:
    """An `Engine`. ``longest`` bounds turns that no script gives; ``end_id`` ends a turn."""

    def __init__(
        self,
        max_slots: int = 8,
        end_id: int = 1,
        longest: int = 60,
        script: Script | None = None,
        version: int = 0,
        tokens_per_step: int = 1,
        on_step: Callable[[], None] | None = None,
    ) -> None:
        self.max_slots, self.end_id, self.longest, self.script = max_slots, end_id, longest, script
        self.version, self.loaded = version, {}
        self.waiting: deque[Generation] = deque()
        self.running: dict[str, Generation] = {}
        self.generated = 0
        self.asleep = 0
        self.tokens_per_step, self.on_step = tokens_per_step, on_step
        self.turns: dict[str, list[int] | None] = {}

    def submit(self, generations: Iterable[Generation]) -> None:
        if self.asleep:
            raise RuntimeError("the engine sleeps")
        for generation in generations:
            if generation.id in self.running or any(g.id == generation.id for g in self.waiting):
                raise ValueError(f"{generation.id} is here already")
            self.waiting.append(generation)

    def step(self) -> list[Generation]:
        if self.asleep:
            raise RuntimeError("the engine sleeps")
        if self.on_step is not None:
            self.on_step()
        while self.waiting and len(self.running) < self.max_slots:
            generation = self.waiting.popleft()
            self.running[generation.id] = generation
            self.turns[generation.id] = self.script(generation) if self.script else None
        finished = []
        for generation in list(self.running.values()):
            for _ in range(self.tokens_per_step):
                if generation.stop_reason is None:
                    self._sample(generation)
            if generation.stop_reason is not None:
                del self.running[generation.id]
                finished.append(generation)
        return finished

    def _sample(self, generation: Generation) -> None:
        at = len(generation.token_ids)
        position = generation.offset + at
        turn = self.turns[generation.id]
        if turn is not None:
            token = turn[at]
            ends = token == self.end_id and at == len(turn) - 1
        else:
            ends = at + 1 >= hashed_length(generation.key ^ generation.offset, self.longest)
            token = self.end_id if ends else token_at(generation.key, position)
        generation.token_ids.append(token)
        generation.logprobs.append(logprob_at(generation.key, position))
        generation.versions.append(self.version)
        self.generated += 1
        if ends:
            generation.stop_reason = StopReason.END_OF_TURN
        elif len(generation.token_ids) >= generation.sampling.max_tokens:
            generation.stop_reason = StopReason.MAX_TOKENS

    def pending(self) -> int:
        return len(self.waiting) + len(self.running)

    def abort(self, ids: Iterable[str]) -> list[Generation]:
        out = []
        for id_ in ids:
            generation = self.running.pop(id_, None)
            if generation is None:
                generation = next((g for g in self.waiting if g.id == id_), None)
                if generation is None:
                    continue
                self.waiting.remove(generation)
            generation.stop_reason = StopReason.ABORTED
            out.append(generation)
        return out

    def pause(self) -> list[Generation]:
        out = [*self.running.values(), *self.waiting]
        self.running, self.waiting = {}, deque()
        return out

    def score(self, sequences: list[list[int]], starts: list[int]) -> list[list[float]]:
        return [[-float(t % 7) for t in ids[start:]] for ids, start in zip(sequences, starts, strict=True)]

    def load_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        self.loaded = dict(weights)
        self.version = version

    def sleep(self, level: int = 1) -> None:
        if self.pending():
            raise RuntimeError("pause before sleeping")
        self.asleep = level

    def wake(self) -> None:
        self.asleep = 0

    def stats(self) -> EngineStats:
        return EngineStats(len(self.running), len(self.waiting), 0.0, self.generated, 0, self.version)
