"""Deterministic mode: every token of every sequence passes through forwards of one shape.

A matrix product's last bits depend on its shape, and shapes depend on who shares a batch, on chunking, on
whether a token was prefilled or decoded. Here prompts, recomputed responses and scored sequences are fed
one token at a time, exactly as decoding would, and shapes never vary:

- on the CPU a forward is one row and its own cached tokens: independent of the batch by construction;
- on a GPU a forward is all slots, at the cache's full width, so that every kernel sees the same shape each
  time.

So a response does not depend on its neighbours, a pause at any token is invisible (spec/10 row 82), and
`score` returns the very bits that sampling recorded. The price is prefill at the speed of decoding.

Legend: S slots, L live rows, V vocabulary.
"""

from __future__ import annotations

import torch

from k3rl.models.base import LanguageModel
from k3rl.models.cache import Cache
from rollout.sampling import token_logprobs


class FixedForward:
    """One token for some slots of a cache, in forwards of a shape that never varies."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model

    @torch.inference_mode()
    def __call__(self, tokens: list[int], slots: list[int], cache: Cache) -> torch.Tensor:
        """Feed ``tokens[i]`` to ``slots[i]``; float32 logits [L, V] after each, in this order."""
        if cache.lengths.device.type == "cpu":
            return torch.cat([self._row(t, s, cache) for t, s in zip(tokens, slots, strict=True)])
        return self._all_rows(tokens, slots, cache)

    def _row(self, token: int, slot: int, cache: Cache) -> torch.Tensor:
        hidden = self._model(torch.tensor([token]), torch.tensor([0, 1]), cache, torch.tensor([slot]))
        return self._model.logits(hidden)

    def _all_rows(self, tokens: list[int], slots: list[int], cache: Cache) -> torch.Tensor:
        device = cache.lengths.device
        slots_L = torch.tensor(slots, device=device)
        tokens_S = torch.zeros(cache.num_slots, dtype=torch.int64, device=device)
        tokens_S[slots_L] = torch.tensor(tokens, device=device)
        idle_S = torch.ones(cache.num_slots, dtype=torch.bool, device=device)
        idle_S[slots_L] = False
        cache.lengths[idle_S] = (
            0  # idle slots compute a token that nobody reads; they must not outgrow the cache
        )
        cu = torch.arange(cache.num_slots + 1, device=device)
        return self._model.logits(self._model(tokens_S, cu, cache))[slots_L]

    def score(self, sequences: list[list[int]], starts: list[int], cache: Cache) -> list[list[float]]:
        """Log-probs of each sequence's tokens from its start on. ``cache`` is scratch, with enough width."""
        out: list[list[float]] = [[] for _ in sequences]
        for first in range(0, len(sequences), cache.num_slots):
            wave = range(first, min(first + cache.num_slots, len(sequences)))
            cache.reset()
            for at in range(max(len(sequences[i]) for i in wave) - 1):
                live = [i for i in wave if at + 1 < len(sequences[i])]
                logits_LV = self([sequences[i][at] for i in live], [i - first for i in live], cache)
                targets = torch.tensor([sequences[i][at + 1] for i in live], device=logits_LV.device)
                values = token_logprobs(logits_LV, targets).tolist()
                for i, value in zip(live, values, strict=True):
                    if at + 1 >= starts[i]:
                        out[i].append(value)
        return out
