"""Teachers that score: frozen models behind the native engine's `score`, many of them in turns on one device.

Models of one architecture share one set of weights on the device; those that are not asked rest in host memory, and
requests are served teacher by teacher, so that a batch costs one swap a teacher. On a CPU without packing all stay
loaded: there is nothing to swap.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from distill.weights import HostWeights, architecture
from k3rl.models import LanguageModel, ModelConfig

Request = tuple[int, list[int], int]
"""Number of the teacher's weights, token ids, and from where on they are scored."""


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

    def score(self, requests: Sequence[Request]) -> list[list[float]]:
        """Natural log-probs of ``ids[start:]`` of each request, in their order."""
        from rollout.native import NativeEngine

        out: list[list[float]] = [[] for _ in requests]
        began = time.monotonic()
        for index in self._order({r[0] for r in requests}):
            mine = [i for i, r in enumerate(requests) if r[0] == index]
            model = self._ready(index)
            context = min(self.max_context or model.max_context, model.max_context)
            engine = NativeEngine(model, max_slots=1, max_context=context, eos_token_ids=())
            scored = engine.score([requests[i][1] for i in mine], [requests[i][2] for i in mine])
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
