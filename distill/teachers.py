"""Teachers that score: frozen models behind the native engine's `score`, many of them in turns on one device.

Models of one architecture share one set of weights on the device; those that are not asked rest in host memory, and
requests are served teacher by teacher, so that a batch costs one swap a teacher. On a CPU without packing all stay
loaded: there is nothing to swap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from distill.weights import HostWeights, architecture
from k3rl.models import LanguageModel, ModelConfig

Request = tuple[int, list[int], int]
"""Number of the teacher's weights, token ids, and from where on they are scored."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Natural log-probs of one question's tokens, and of each position's ``ids`` where they were asked for."""

    logprobs: list[float]
    ids: Any = None  # int32 [n, K], likeliest first; of a whole vocabulary in its order
    top: Any = None  # float32 [n, K]


class Teachers:
    """A plain class; `distill.pool` puts it into a Ray actor. Raises `UserError` for models that cannot be loaded, or
    not be packed."""

    def __init__(
        self,
        models: Sequence[ModelConfig],
        device: str,
        max_context: int | None,
        threads: int = 1,
        storage: str = "as_loaded",
    ) -> None:
        import torch

        from k3rl.models import load_model

        torch.set_num_threads(threads)
        self.device, self.max_context = device, max_context
        self.swaps, self.moved_bytes, self.moved_s, self.score_s = 0, 0, 0.0, 0.0
        self._stage: list[LanguageModel] = []  # by teacher: the model that it runs in
        self._resting: list[HostWeights | None] = []
        self._on_stage: dict[int, int] = {}  # by id of a model: the teacher whose weights it holds
        known: dict[tuple[object, ...], LanguageModel] = {}
        swaps = storage == "mxfp4" or (device != "cpu" and len(models) > 1)
        for config in models:
            model = load_model(config, "cpu" if swaps else device).requires_grad_(False).eval()
            if not swaps:
                self._stage.append(model)
                self._resting.append(None)
                self._on_stage[id(model)] = len(self._stage) - 1
                continue
            rest = HostWeights(model, config.path, packed=storage == "mxfp4", pinned=device == "cuda")
            kind = architecture(model)
            if kind not in known:
                known[kind] = model.to(device)
            self._stage.append(known[kind])
            self._resting.append(rest)

    def score(self, requests: Sequence[Request]) -> list[Scores]:
        """Natural log-probs of ``ids[start:]`` of each request, in their order."""
        from rollout.native import NativeEngine

        def by_engine(model: LanguageModel, mine: Sequence[Request]) -> list[Scores]:
            context = min(self.max_context or model.max_context, model.max_context)
            engine = NativeEngine(model, max_slots=1, max_context=context, eos_token_ids=())
            rows = engine.score([ids for _, ids, _ in mine], [start for _, _, start in mine])
            return [Scores(row) for row in rows]

        return self._each(requests, by_engine)

    def distributions(self, requests: Sequence[Request], k: int) -> list[Scores]:
        """The same with the ``k`` likeliest ids of each position; 0: all."""
        return self._each(requests, lambda model, mine: [_distribution(model, r[1], r[2], k) for r in mine])

    def _each(
        self,
        requests: Sequence[Request],
        answer: Callable[[LanguageModel, Sequence[Request]], list[Scores]],
    ) -> list[Scores]:
        out: list[Scores] = [Scores([])] * len(requests)
        began = time.monotonic()
        for index in self._order({r[0] for r in requests}):
            mine = [i for i, r in enumerate(requests) if r[0] == index]
            scored = answer(self._ready(index), [requests[i] for i in mine])
            for i, row in zip(mine, scored, strict=True):
                out[i] = row
        self.score_s += time.monotonic() - began
        return out

    def _order(self, wanted: set[int]) -> list[int]:
        """Those whose weights are in place first."""
        return sorted(wanted, key=lambda i: (self._on_stage.get(id(self._stage[i])) != i, i))

    def _ready(self, index: int) -> LanguageModel:
        model, rest = self._stage[index], self._resting[index]
        if rest is None or self._on_stage.get(id(model)) == index:
            return model
        began = time.monotonic()
        rest.load_into(model)
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()
        self._on_stage[id(model)] = index
        self.swaps += 1
        self.moved_s += time.monotonic() - began
        self.moved_bytes += rest.nbytes
        return model

    def statistics(self) -> dict[str, float]:
        """Since the start; ``resting_bytes``: what host memory holds."""
        return {
            "teacher/swaps": float(self.swaps),
            "teacher/moved_bytes": float(self.moved_bytes),
            "teacher/moved_s": self.moved_s,
            "teacher/score_s": self.score_s,
            "teacher/resting_bytes": float(sum(rest.nbytes for rest in self._resting if rest)),
        }


def _distribution(model: LanguageModel, ids: list[int], start: int, k: int) -> Scores:
    import torch

    with torch.inference_mode():
        device = next(model.parameters()).device
        ids_T = torch.tensor(ids, device=device)
        hidden_TD = model(ids_T, torch.tensor([0, len(ids)], device=device))
        logprobs_TV = model.logits(hidden_TD[start - 1 : -1]).log_softmax(-1)
        own_T = logprobs_TV.gather(1, ids_T[start:, None]).squeeze(1)
        if k and k < logprobs_TV.shape[1]:
            top_TK, ids_TK = logprobs_TV.topk(k, dim=1)
        else:
            top_TK, ids_TK = logprobs_TV, torch.arange(logprobs_TV.shape[1]).expand(len(own_T), -1)
        return Scores(own_T.tolist(), ids_TK.int().cpu().numpy(), top_TK.float().cpu().numpy())
