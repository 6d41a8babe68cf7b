"""The contract of a generation engine. `native` and `vllm` implement it; one conformance suite tests both.

An engine knows token ids and weights, nothing of problems, turns or rewards. It is driven by calls from one
thread: `submit` work, call `step` until nothing is left. Between two calls its state is at rest, so that
`pause`, `load_weights` or `sleep` can come at any token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from k3rl.types import StopReason

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one response is sampled. Log-probs returned are those of the processed distribution.

    ``max_tokens`` is the trajectory's whole budget: tokens that a `Generation` already holds count.
    ``stop_strings`` are matched on the detokenised text and end the response after the token that completes
    one; the tokens stay.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(slots=True)
class Generation:
    """A request, and what has been generated of it: the same record is submitted, paused, resumed, finished.

    ``context_ids`` is all that the model reads before it samples the first token of this turn. ``key`` seeds
    the request's random stream; position i of ``token_ids`` uses draw ``offset + i`` of the stream, so a
    resumed response goes on exactly where it stopped.
    """

    id: str
    context_ids: list[int]
    sampling: SamplingParams
    key: int
    offset: int = 0
    group: str = ""  # requests of one group share a prefix, and like to share an engine
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # policy version by token
    stop_reason: StopReason | None = None
    error: str = ""
    routing: np.ndarray | None = None
    """Experts that each token took, int16 [context and response, less the newest token; expert layers;
    experts a token], where the engine records them: a trainer that replays them chooses as the engine did. A
    resumed request, or a later turn, brings what it has; a token keeps what was noted when it was first read."""

    @property
    def done(self) -> bool:
        return self.stop_reason is not None


@dataclass(frozen=True, slots=True)
class EngineStats:
    running: int
    queued: int
    kv_used_fraction: float
    generated_tokens: int
    prefilled_tokens: int
    version: int


class Engine(Protocol):
    """See the module's docstring. Errors: `RuntimeError` where a call does not fit the engine's state, like
    generating without weights after a deep sleep; `ValueError` for a request that can never be served."""

    def submit(self, generations: Iterable[Generation]) -> None:
        """Queue new or resumed generations. The engine appends to the records it is given."""

    def step(self) -> list[Generation]:
        """Advance by one token (or one prefill chunk) where possible; return those that finished."""

    def pending(self) -> int:
        """How many generations are queued or running."""

    def abort(self, ids: Iterable[str]) -> list[Generation]:
        """Take these out, with stop reason `ABORTED`."""

    def pause(self) -> list[Generation]:
        """Take everything out, unfinished and resumable; tokens so far are kept in the records."""

    def score(self, sequences: list[list[int]], starts: list[int]) -> list[list[float]]:
        """Log-probs (temperature 1, full vocabulary) of ``sequence[start:]`` given all before each token."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace all weights atomically, drop every cache made with the old ones, then serve `version`.

        Every tensor of the model must come exactly once, with its dtype and shape: otherwise `ValueError`,
        and the engine goes on with the weights it had."""

    def sleep(self, level: int = 1) -> None:
        """Free memory: 1 moves weights to the host and drops caches, 2 drops the weights too."""

    def wake(self) -> None: ...

    def stats(self) -> EngineStats: ...
