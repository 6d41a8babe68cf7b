"""Teachers that score: each a frozen model behind the native engine's `score`, in one Ray actor that takes turns.

Weights of teachers that are not asked rest in host memory; on a GPU the one that is asked moves in, and work is ordered
by teacher, so that a step costs one move a teacher.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from k3rl.errors import RunError
from k3rl.models import LanguageModel, ModelConfig

ATTEMPTS = 3
Request = tuple[int, list[int], int]
"""Number of the weights, token ids, and from where on they are scored."""


class Teachers:
    """The actor's inside. ``score`` answers requests in their order."""

    def __init__(
        self, models: Sequence[ModelConfig], device: str, max_context: int | None, threads: int = 1
    ) -> None:
        import torch

        from k3rl.models import load_model

        torch.set_num_threads(threads)
        self.device, self.max_context = device, max_context
        rest = "cpu" if len(models) > 1 else device
        self.models = [load_model(m, rest).requires_grad_(False) for m in models]
        self.moved_bytes = 0
        self.moved_s = 0.0

    def score(self, requests: Sequence[Request]) -> list[list[float]]:
        from rollout.native import NativeEngine

        out: list[list[float]] = [[] for _ in requests]
        for index in sorted({r[0] for r in requests}):
            mine = [i for i, r in enumerate(requests) if r[0] == index]
            model = self.models[index]
            self._move(model, self.device)
            context = min(self.max_context or model.max_context, model.max_context)
            engine = NativeEngine(model, max_slots=1, max_context=context, eos_token_ids=())
            scored = engine.score([requests[i][1] for i in mine], [requests[i][2] for i in mine])
            if len(self.models) > 1:
                self._move(model, "cpu")
            for i, row in zip(mine, scored, strict=True):
                out[i] = row
        return out

    def _move(self, model: LanguageModel, device: str) -> None:
        if next(model.parameters()).device.type == device:
            return
        began = time.monotonic()
        model.to(device)
        self.moved_s += time.monotonic() - began
        self.moved_bytes += sum(p.numel() * p.element_size() for p in model.parameters())

    def statistics(self) -> dict[str, float]:
        """Since the start."""
        return {"teacher/moved_bytes": float(self.moved_bytes), "teacher/moved_s": self.moved_s}


class TeacherPool:
    """Needs a running Ray. An actor that dies is started again and asked again, up to three times."""

    def __init__(
        self, models: Sequence[ModelConfig], device: str, max_context: int | None, timeout_s: float = 600.0
    ) -> None:
        self._arguments = (list(models), device, max_context)
        self._options = {"num_cpus": 1, "num_gpus": 0.1 if device == "cuda" else 0}
        self.timeout_s = timeout_s
        self.deaths = 0
        self._actor = self._start()

    def _start(self) -> Any:
        import ray

        return ray.remote(Teachers).options(**self._options).remote(*self._arguments)

    def score(self, requests: Sequence[Request]) -> list[list[float]]:
        """Log-probs of ``ids[start:]`` for each request. `RunError` where they are not had, or not as many as asked."""
        import ray

        for attempt in range(1, ATTEMPTS + 1):
            try:
                rows = ray.get(self._actor.score.remote(list(requests)), timeout=self.timeout_s)
                break
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
                self.deaths += 1
                if attempt == ATTEMPTS:
                    raise RunError(f"the teachers died or were silent {ATTEMPTS} times: {error}") from error
                ray.kill(self._actor)
                self._actor = self._start()
        for (_, ids, start), row in zip(requests, rows, strict=True):
            if len(row) != len(ids) - start:
                raise RunError(f"a teacher gave {len(row)} log-probs for {len(ids) - start} tokens")
        return rows

    def statistics(self) -> dict[str, float]:
        import ray

        return {**ray.get(self._actor.statistics.remote(), timeout=60), "teacher/deaths": float(self.deaths)}

    def close(self) -> None:
        import ray

        ray.kill(self._actor)
