"""The model's side of the native engine: the slot cache, forwards of two shapes, scoring, and memory.

The cache is dense: every slot is as wide as the longest running sequence needs, in powers of two, and the
KV budget divided by that width is how many slots there are. So memory follows the longest context, and a
budget is a bound on bytes that are really allocated.

Legend: N rows of a step, S slots, T tokens packed, D hidden width, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from k3rl.models.base import LanguageModel
from k3rl.models.cache import Cache
from rollout.native.fused import FusedDecode, why_not
from rollout.native.graphs import DecodeGraphs, Rows, plain_step
from rollout.native.memory import ModelMemory
from rollout.sampling import token_logprobs

_FIRST_WIDTH = 256
_MAX_LOGIT_BYTES = 64 << 20  # float32 logits of one piece of a prompt that is scored


class ModelRunner:
    """Owns a model and the cache of its running sequences. Runs without gradients, on the model's device.

    ``narrow`` caches start at 256 tokens a slot and widen; others have their full width from the start. On a GPU,
    decode steps are CUDA graphs with ``graphs``, over a cache with one spare slot.
    """

    def __init__(
        self,
        model: LanguageModel,
        max_slots: int,
        max_context: int,
        kv_budget_tokens: int,
        narrow: bool,
        record_routing: bool = False,
        graphs: bool = True,
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.max_slots, self.max_context, self.kv_budget_tokens = max_slots, max_context, kv_budget_tokens
        self._first_width = min(_FIRST_WIDTH, max_context) if narrow else max_context
        self.memory = ModelMemory(model)
        self.cache: Cache | None = None
        self.record_routing = record_routing
        on_gpu = self.memory.device.type == "cuda" and not record_routing
        self._spare = int(on_gpu and graphs)
        self._fusable = on_gpu and narrow and not why_not(model)
        self._fused: FusedDecode | None = None
        self._graphs: DecodeGraphs | None = None
        self.routing: np.ndarray | None = None  # newest forward's, int16 [T, expert layers, experts a token]

    @property
    def device(self) -> torch.device:
        return self.memory.device

    # -- cache ---------------------------------------------------------------------------------------------

    def slots_at(self, width: int) -> int:
        """How many slots of this width the KV budget allows."""
        return max(1, min(self.max_slots, self.kv_budget_tokens // width))

    def width_for(self, longest: int) -> int:
        width = self._first_width
        while width < longest:
            width *= 2
        return min(width, self.max_context)

    @property
    def width(self) -> int:
        return self.cache.max_tokens if self.cache is not None else 0

    @property
    def num_slots(self) -> int:
        if self.cache is not None:
            return self.cache.num_slots - self._spare
        return self.slots_at(self.width_for(1))

    def open_cache(self, longest: int) -> None:
        """A fresh cache wide enough, where none is open."""
        if self.cache is None:
            self.cache = self.new_cache(longest)

    def new_cache(self, longest: int = 1) -> Cache:
        width = self.width_for(longest)
        return self.model.make_cache(self.slots_at(width) + self._spare, width, self.device)

    def widen(self, longest: int, occupied: list[int]) -> dict[int, int]:
        """Move to a cache wide enough, keeping the ``occupied`` slots; returns old slot -> new slot.

        The caller has seen to it that they fit in `slots_at` of the new width. Tensor by tensor, so that only one
        exists twice at a time.
        """
        old, self.cache, self._graphs = self.cache, None, None
        width = self.width_for(longest)
        new = self.model.make_cache(self.slots_at(width) + self._spare, width, "meta")
        index = torch.tensor(occupied, dtype=torch.int64, device=self.device)
        new.lengths = torch.zeros(new.num_slots, dtype=torch.int64, device=self.device)
        new.lengths[: len(occupied)] = old.lengths[index]
        for name in list(new.tokens):
            held, wide = old.tokens.pop(name), torch.zeros_like(new.tokens[name], device=self.device)
            wide[: len(occupied), : held.shape[1]] = held[index]
            new.tokens[name] = wide
            del held
        for name in list(new.states):
            new.states[name] = torch.zeros_like(new.states[name], device=self.device)
            new.states[name][: len(occupied)] = old.states.pop(name)[index]
        self.cache = new
        return {slot: place for place, slot in enumerate(occupied)}

    def drop_cache(self) -> None:
        self.cache = self._graphs = None

    def rest_cache(self) -> bool:
        """Nothing runs any more. The cache goes, lest the next one start as wide as the last ended; a narrow one stays
        on a GPU, with the graphs over it. Says whether it stayed."""
        if self._spare and self.cache is not None and self.width == self._first_width:
            return True
        self.drop_cache()
        return False

    def sleep(self, level: int) -> None:
        self.drop_cache()
        self._fused = None  # it holds the weights' storage
        self.memory.sleep(level)

    # -- forwards ------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self, rows: Rows) -> torch.Tensor:
        """One more token for each of N different slots: float64 [2, N], tokens and log-probs."""
        if not self._spare:
            return plain_step(rows, self._decode_logits)
        if self._graphs is None:
            spare_slot = self.cache.num_slots - 1
            self._graphs = DecodeGraphs(self._decode_logits, self.cache.lengths, spare_slot)
        return self._graphs(rows)

    def _decode_logits(self, tokens_N: torch.Tensor, slots_N: torch.Tensor) -> torch.Tensor:
        if self._fusable:
            if self._fused is None:
                self._fused = FusedDecode(self.model)
            return self.model.logits(self._fused(tokens_N, slots_N, self.cache))
        cu = torch.arange(tokens_N.shape[0] + 1, device=self.device)
        return self.model.logits(self._forward(tokens_N, cu, slots_N))

    def _forward(self, ids_T: torch.Tensor, cu: torch.Tensor, slots_N: torch.Tensor) -> torch.Tensor:
        if not self.record_routing:
            return self.model(ids_T, cu, self.cache, slots_N)
        with self.model.record_routing() as record:
            hidden_TD = self.model(ids_T, cu, self.cache, slots_N)
        self.routing = record.ids_TLK().cpu().numpy()
        return hidden_TD

    @torch.inference_mode()
    def prefill(self, chunks: list[list[int]], slots: list[int]) -> torch.Tensor:
        """Several tokens for each slot: hidden states [N, D] of each chunk's last token."""
        cu = np.concatenate([[0], np.cumsum([len(c) for c in chunks])])
        ids_T = torch.from_numpy(np.concatenate([np.asarray(c, np.int64) for c in chunks])).to(self.device)
        slots_N = torch.tensor(slots, device=self.device)
        hidden_TD = self._forward(ids_T, torch.from_numpy(cu).to(self.device), slots_N)
        return hidden_TD[torch.from_numpy(cu[1:] - 1).to(self.device)]

    @torch.inference_mode()
    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        return self.model.logits(hidden_ND)

    @torch.inference_mode()
    def score(
        self, sequences: list[list[int]], starts: list[int], max_batch_tokens: int
    ) -> list[list[float]]:
        """Log-probs of each sequence's tokens from its start on, by packed forwards without a cache."""
        out: list[list[float]] = [[] for _ in sequences]
        batch: list[int] = []
        for i, ids in enumerate(sequences):
            if batch and sum(len(sequences[j]) for j in batch) + len(ids) > max_batch_tokens:
                self._score_batch(batch, sequences, starts, out)
                batch = []
            batch.append(i)
        if batch:
            self._score_batch(batch, sequences, starts, out)
        return out

    def _score_batch(
        self, batch: list[int], sequences: list[list[int]], starts: list[int], out: list[list[float]]
    ) -> None:
        lengths = np.array([len(sequences[i]) for i in batch])
        cu = np.concatenate([[0], np.cumsum(lengths)])
        ids_T = torch.from_numpy(np.concatenate([np.asarray(sequences[i], np.int64) for i in batch]))
        ids_T = ids_T.to(self.device)
        hidden_TD = self.model(ids_T, torch.from_numpy(cu).to(self.device))
        targets = np.concatenate([np.arange(cu[r] + starts[i], cu[r + 1]) for r, i in enumerate(batch)])
        piece = max(1, _MAX_LOGIT_BYTES // (4 * self.model.vocab_size))
        values: list[float] = []
        for at in range(0, len(targets), piece):
            target_T = torch.from_numpy(targets[at : at + piece]).to(self.device)
            logits = self.model.logits(hidden_TD[target_T - 1])
            values += token_logprobs(logits, ids_T[target_T]).tolist()
        at = 0
        for i in batch:
            count = len(sequences[i]) - starts[i]
            out[i] = values[at : at + count]
            at += count
