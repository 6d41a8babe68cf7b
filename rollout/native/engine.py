"""`NativeEngine`: continuous batching over slots, for any `LanguageModel`, on CPU and GPU.

A step is: admit, decode one token for every running sequence, spend what is left of the token budget on
prefill chunks, draw the next token of all rows that are up to date on the device, bring tokens and log-probs
to the host in one copy, apply the stop rules. Between steps everything is at rest, so pause, weight updates
and sleep fit anywhere.

Which sequences share a batch never changes what a sequence samples beyond floating-point noise of the matrix
products; in deterministic mode (`rollout.native.fixed`) not even that.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from k3rl.models.base import LanguageModel
from k3rl.types import StopReason
from rollout.engine import EngineStats, Generation
from rollout.native.fixed import FixedForward
from rollout.native.graphs import draw
from rollout.native.prefix_cache import PrefixCache
from rollout.native.runner import ModelRunner
from rollout.native.sequence import Sequence
from rollout.native.slots import SlotPool
from rollout.native.stops import Decode, StopRules, check_request


class NativeEngine:
    """Implements `rollout.engine.Engine`.

    model             any `LanguageModel`; the engine takes it over (evaluation mode, no gradients).
    max_slots         most sequences at once.
    max_context       most tokens of context and response together; at most the model's own.
    eos_token_ids     end a response, unless a request ignores them.
    decode            token ids to text; needed for stop strings only.
    max_batch_tokens  tokens computed in one step, decode and prefill together.
    kv_budget_tokens  tokens that all slots together can hold; at least ``max_context``.
    keep_cache        keep paused sequences' caches on the host, and go on from them (else recompute).
    reuse_stale       such caches, and running sequences', survive a weight update: later tokens then attend
                      to keys and states made by older weights.
    deterministic     results independent of batching to the last bit, slowly: see `rollout.native.fixed`.
    prefix_bytes      size of the prefix cache (0: none), in blocks of ``prefix_block`` tokens, with running
                      states kept every ``prefix_interval`` tokens of a prefill and at the ends of turns.
    cuda_graphs       replay decode steps as CUDA graphs, on a GPU.
    record_routing    note the experts of every token in its `Generation`, for models that have some. A prefix
                      from the cache would have none, so the two exclude each other.
    """

    def __init__(
        self,
        model: LanguageModel,
        max_slots: int = 64,
        max_context: int | None = None,
        eos_token_ids: Iterable[int] = (),
        *,
        decode: Decode | None = None,
        max_batch_tokens: int = 2048,
        kv_budget_tokens: int | None = None,
        keep_cache: bool = False,
        reuse_stale: bool = False,
        deterministic: bool = False,
        prefix_bytes: int = 0,
        prefix_block: int = 64,
        prefix_interval: int = 512,
        cuda_graphs: bool = True,
        record_routing: bool = False,
        version: int = 0,
    ) -> None:
        self.max_context = min(max_context or model.max_context, model.max_context)
        budget = kv_budget_tokens or max_slots * self.max_context
        if budget < self.max_context:
            raise ValueError(
                f"a KV budget of {budget} tokens cannot hold one sequence of max_context {self.max_context}"
            )
        if record_routing and (prefix_bytes or deterministic or not _has_experts(model)):
            raise ValueError(
                "record_routing needs a model with experts, and neither prefixes nor determinism"
            )
        self.max_batch_tokens = max(max_batch_tokens, max_slots)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.version = version
        self._decode_text = decode
        self._keep_cache, self._reuse_stale = keep_cache, reuse_stale
        self._runner = ModelRunner(
            model,
            max_slots,
            self.max_context,
            budget,
            narrow=not deterministic,
            record_routing=record_routing,
            graphs=cuda_graphs and not deterministic,
        )
        self._fixed = FixedForward(model) if deterministic else None
        self._prefixes = PrefixCache(prefix_bytes, prefix_block) if prefix_bytes else None
        self._interval = -(-prefix_interval // prefix_block) * prefix_block
        self._pool = SlotPool(self._runner, self._prefixes)
        self._by_id: dict[str, Sequence] = {}
        self._finished: list[Generation] = []  # found finished when submitted
        self._batch: _Batch | None = None
        self._order = 0
        self._generated = self._prefilled = 0

    # -- requests ------------------------------------------------------------------------------------------

    def submit(self, generations: Iterable[Generation]) -> None:
        """Queue them, in order. All are checked before any is queued (`ValueError`)."""
        self._require_weights()
        generations = list(generations)
        seen = set(self._by_id)
        for generation in generations:
            vocab_size = self._runner.model.vocab_size
            check_request(generation, seen, vocab_size, self.max_context, self._decode_text)
            seen.add(generation.id)
        for generation in generations:
            stop = StopRules(generation, self.eos_token_ids, self.max_context, self._decode_text)
            reason = stop.reason(generation)
            if reason is not None:  # what it brought has spent its budget
                self._pool.kept.pop(generation.id, None)
                generation.stop_reason = reason
                self._finished.append(generation)
                continue
            self._order += 1
            ids = generation.context_ids + generation.token_ids
            self._by_id[generation.id] = sequence = Sequence(generation, ids, self._order, stop)
            self._pool.waiting.append(sequence)

    def pending(self) -> int:
        return len(self._by_id) + len(self._finished)

    def abort(self, ids: Iterable[str]) -> list[Generation]:
        """Take these out, with stop reason `ABORTED`; ids that are not here are ignored."""
        aborted = []
        for id_ in ids:
            self._pool.kept.pop(id_, None)
            sequence = self._by_id.get(id_)
            if sequence is None:
                continue
            self._leave(sequence)
            sequence.generation.stop_reason = StopReason.ABORTED
            aborted.append(sequence.generation)
        return aborted

    def pause(self) -> list[Generation]:
        """Take everything out, oldest first. With ``keep_cache`` the caches wait on the host for
        resumption."""
        out = [s.generation for s in sorted(self._by_id.values(), key=lambda s: s.order)]
        self._pool.clear(self._keep_cache)
        self._by_id.clear()
        return out

    # -- one step ------------------------------------------------------------------------------------------

    def step(self) -> list[Generation]:
        """Advance every running sequence by a token, and prefills by a chunk; return what finished."""
        self._require_weights()
        done, self._finished = self._finished, []
        self._pool.make_room()
        self._pool.admit(self.version)
        if not self._pool.running:
            return done
        if self._fixed is not None:
            return done + self._step_fixed()
        batch = self._decode_batch()
        rows, parts = batch.sequences, []
        if rows:
            parts.append(self._runner.step(batch))
            for row, sequence in enumerate(rows):
                sequence.filled += 1
                if self._runner.record_routing:
                    sequence.record(self._runner.routing[row : row + 1])
        self._batch = batch
        joined, hidden_ND = self._prefill(self.max_batch_tokens - len(rows))
        if joined:
            fresh = _Batch(joined, self._pool, self._runner.device)
            parts.append(self._draw(fresh, self._runner.logits(hidden_ND)))
        if not parts:
            return done
        return done + self._apply(rows + joined, parts[0] if len(parts) == 1 else torch.cat(parts, 1))

    def _step_fixed(self) -> list[Generation]:
        """Deterministic mode: everyone is fed one token, prompts too."""
        fed = [s for s in self._pool.running if s.leader is None]
        tokens = [s.ids[s.filled] for s in fed]
        logits_LV = self._fixed(tokens, [s.slot for s in fed], self._runner.cache)
        rows, take = [], []
        for row, sequence in enumerate(fed):
            self._prefilled += sequence.missing > 1
            sequence.filled += 1
            self._checkpoint(sequence)
            if sequence.missing == 0:
                family = [sequence, *self._pool.spread(sequence)]
                rows += family
                take += [row] * len(family)
        if not rows:
            return []
        batch = _Batch(rows, self._pool, self._runner.device)
        return self._apply(rows, self._draw(batch, logits_LV[torch.tensor(take, device=logits_LV.device)]))

    def _decode_batch(self) -> _Batch:
        """The rows that lack one token: those of the last step where nothing changed since."""
        if self._batch is not None and self._batch.epoch == self._pool.epoch:
            return self._batch
        rows = [s for s in self._pool.running if s.missing == 1 and s.leader is None]
        return _Batch(rows, self._pool, self._runner.device)

    def _prefill(self, budget: int) -> tuple[list[Sequence], torch.Tensor | None]:
        """Spend the budget on those that lack several tokens, oldest first; returns who is up to date now, and their
        hidden states [N, D]."""
        chosen, chunks, rows = [], [], []
        for sequence in self._pool.running:
            if sequence.missing > 1 and sequence.leader is None and budget > 0:
                end = min(sequence.filled + budget, self._next_boundary(sequence))
                chunk = sequence.ids[sequence.filled : end]
                budget -= len(chunk)
                chosen.append(sequence)
                chunks.append(chunk)
        if not chosen:
            return [], None
        self._batch = None  # from now on others lack exactly one token
        hidden_ND = self._runner.prefill(chunks, [s.slot for s in chosen])
        take: list[int] = []
        at = 0
        for row, (sequence, chunk) in enumerate(zip(chosen, chunks, strict=True)):
            sequence.filled += len(chunk)
            if self._runner.record_routing:
                sequence.record(self._runner.routing[at : at + len(chunk)])
            at += len(chunk)
            self._prefilled += len(chunk)
            self._checkpoint(sequence)
            if sequence.missing == 0:
                family = [sequence, *self._pool.spread(sequence)]
                rows += family
                take += [row] * len(family)
        return rows, hidden_ND[torch.tensor(take, device=hidden_ND.device)] if take else None

    def _next_boundary(self, sequence: Sequence) -> int:
        """Where a prefill chunk must end at the latest: prompts are cut where a checkpoint is due."""
        end = len(sequence.ids)
        if self._prefixes is None:
            return end
        due = (sequence.filled // self._interval + 1) * self._interval
        last_block = self._last_block(sequence)
        return min(b for b in (due, last_block, end) if b > sequence.filled)

    def _last_block(self, sequence: Sequence) -> int:
        """The last block border before the token that must be computed anyway."""
        size = self._prefixes.block_tokens
        return (len(sequence.ids) - 1) // size * size

    def _checkpoint(self, sequence: Sequence) -> None:
        """Save a prefill's state where it is due."""
        if self._prefixes is None or sequence.generation.token_ids:
            return
        if sequence.filled % self._interval == 0 or sequence.filled == self._last_block(sequence):
            self._save_prefix(sequence, turn_end=False)

    def _save_prefix(self, sequence: Sequence, turn_end: bool) -> None:
        if self._prefixes is not None and sequence.filled:
            ids = sequence.ids[: sequence.filled]
            self._prefixes.save(self._runner.cache, sequence.slot, ids, self.version, turn_end)

    @staticmethod
    @torch.inference_mode()
    def _draw(batch: _Batch, logits_NV: torch.Tensor) -> torch.Tensor:
        return draw(logits_NV, batch.keys_N, batch.positions_N, batch.settings)[1]

    def _apply(self, sequences: list[Sequence], drawn_2N: torch.Tensor) -> list[Generation]:
        """Tokens and log-probs to the host, in one copy, and into the records; returns what finished."""
        tokens, logprobs = drawn_2N.cpu().numpy()
        self._generated += len(sequences)
        finished, version = [], self.version
        for sequence, token, logprob in zip(
            sequences, tokens.astype(int).tolist(), logprobs.tolist(), strict=True
        ):
            generation, stop = sequence.generation, sequence.stop
            if logprob != logprob:
                generation.stop_reason = StopReason.ERROR
                generation.error = "the model produced a log-prob that is not a number"
                finished.append(sequence)
                continue
            generation.token_ids.append(token)
            generation.logprobs.append(logprob)
            generation.versions.append(version)
            sequence.ids.append(token)
            if stop.may_end(token, len(generation.token_ids)):
                generation.stop_reason = stop.reason(generation)
                if generation.stop_reason is not None:
                    finished.append(sequence)
        for sequence in finished:
            if sequence.generation.stop_reason is not StopReason.ERROR:
                self._save_prefix(sequence, turn_end=True)
            self._leave(sequence)
        return [s.generation for s in finished]

    def _leave(self, sequence: Sequence) -> None:
        del self._by_id[sequence.generation.id]
        self._pool.remove(sequence)

    # -- weights, memory, scoring --------------------------------------------------------------------------

    def score(self, sequences: list[list[int]], starts: list[int]) -> list[list[float]]:
        """See the protocol. A start of 0 has nothing before it and is refused (`ValueError`)."""
        self._require_weights()
        for ids, start in zip(sequences, starts, strict=True):
            if not 1 <= start <= len(ids):
                raise ValueError(f"a sequence of {len(ids)} tokens cannot be scored from {start}")
            if len(ids) > self.max_context:
                raise ValueError(f"a sequence of {len(ids)} tokens exceeds the context of {self.max_context}")
        if self._fixed is not None:
            return self._fixed.score(sequences, starts, self._runner.new_cache())
        return self._runner.score(sequences, starts, self.max_batch_tokens)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """See the protocol. Running sequences are recomputed under the new weights unless ``reuse_stale``."""
        if self._runner.memory.level:
            raise RuntimeError("the engine sleeps: wake it before loading weights")
        self._runner.model.load_named_weights(weights)
        self._runner.memory.has_weights = True
        self.version = version
        if not self._reuse_stale:
            self._pool.kept.clear()
            self._pool.preempt_down_to(0)
        if self._prefixes is not None:
            self._prefixes.clear()

    def sleep(self, level: int = 1) -> None:
        """See the protocol. Raises `RuntimeError` while anything is queued or running: pause first."""
        if level not in (1, 2):
            raise ValueError(f"sleep level must be 1 or 2, got {level}")
        if self._by_id:
            raise RuntimeError(f"{len(self._by_id)} generations are queued or running: pause before sleeping")
        if self._runner.memory.level:
            raise RuntimeError("the engine already sleeps")
        if self._prefixes is not None:
            self._prefixes.clear()
        self._runner.sleep(level)

    def wake(self) -> None:
        if not self._runner.memory.level:
            raise RuntimeError("the engine is awake")
        self._runner.memory.wake()

    def _require_weights(self) -> None:
        if self._runner.memory.level:
            raise RuntimeError("the engine sleeps: wake it first")
        if not self._runner.memory.has_weights:
            raise RuntimeError("no weights: they were dropped by a level 2 sleep and not loaded since")

    @property
    def prefix_hit_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache instead of being computed."""
        return self._prefixes.hit_tokens if self._prefixes is not None else 0

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._pool.running),
            queued=len(self._pool.waiting),
            kv_used_fraction=sum(s.filled for s in self._pool.running) / self._runner.kv_budget_tokens,
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            version=self.version,
        )


def _has_experts(model: LanguageModel) -> bool:
    return hasattr(model, "record_routing") and bool(model.config.moe_layers)


class _Batch:
    """The rows that sample together, as device tensors; good until the pool's epoch changes."""

    def __init__(self, sequences: list[Sequence], pool: SlotPool, device: torch.device) -> None:
        self.sequences, self.epoch = sequences, pool.epoch
        slots = np.array([s.slot for s in sequences], np.int64)
        counts = np.array([len(s.generation.token_ids) for s in sequences], np.int64)
        self.slots_N = torch.from_numpy(slots).to(device)
        self.tokens_N = torch.tensor([s.ids[-1] for s in sequences], dtype=torch.int64, device=device)
        self.keys_N, self.positions_N = pool.table.streams(slots, counts, device)
        self.settings = pool.table.rows(slots, device)

    def advance(self, tokens_N: torch.Tensor) -> None:
        """The same rows, one token later: nothing crosses to the device."""
        self.tokens_N = tokens_N
        self.positions_N = self.positions_N + 1
