"""A run's own judges: models on the native engine, each in a Ray actor behind an OpenAI-compatible address, so that
reward processes, on whatever machine, ask them as they ask any endpoint.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from k3rl.chat import load_renderer
from k3rl.config.rewards import JudgeModel, RewardConfig
from k3rl.errors import RunError
from k3rl.models import load_model
from k3rl.models.config import PRESETS
from k3rl.models.loading import model_folder
from rewards.grm.reward import KEY_VARIABLE, URL_VARIABLE
from rollout.native import NativeEngine
from rollout.serving import ChatEngine, Served, make_app

START_TIMEOUT_S = 600.0


def chat_engine(judge: JudgeModel, name: str, device: str) -> ChatEngine:
    """A model on an engine, ready to be served. Close it."""
    path = judge.model.path
    renderer = load_renderer(path if path in PRESETS else str(model_folder(path)))
    model = load_model(judge.model, device).eval().requires_grad_(False)
    context = min(judge.max_context or model.max_context, model.max_context)
    engine = NativeEngine(
        model,
        max_slots=judge.engine.max_slots,
        max_context=context,
        eos_token_ids=renderer.stop_token_ids,
        decode=renderer.decode,
        max_batch_tokens=judge.engine.max_batch_tokens,
        kv_budget_tokens=judge.engine.kv_budget_tokens,
        deterministic=judge.engine.deterministic,
        prefix_bytes=judge.engine.prefix_cache_bytes,
    )
    return ChatEngine(engine, renderer, name, context, judge.thinking)


class _Judge:
    """The server inside its actor. On one machine it listens on loopback alone, else on its node's address; in either
    case it asks for the token."""

    def __init__(self, judge: JudgeModel, name: str, token: str) -> None:
        import ray
        import torch

        torch.set_num_threads(1)
        device = "cuda" if judge.device != "cpu" and torch.cuda.is_available() else "cpu"
        host = "127.0.0.1" if len(ray.nodes()) == 1 else ray.util.get_node_ip_address()
        self.chat = chat_engine(judge, name, device)
        self.served = Served(make_app(self.chat, token), host)

    def url(self) -> str:
        return self.served.url


@contextmanager
def judges_running(config: RewardConfig) -> Iterator[dict[str, str]]:
    """Start the judges of ``config.judges``; gives the environment by which `rewards.grm` finds them."""
    import ray
    import torch

    actors: list[Any] = []
    environment: dict[str, str] = {}
    try:
        for name, judge in config.judges.items():
            token = secrets.token_urlsafe(32)
            share = 0.1 if judge.device != "cpu" and torch.cuda.is_available() else 0.0
            actor = ray.remote(num_cpus=0, num_gpus=share)(_Judge).remote(judge, name, token)
            actors.append(actor)
            environment |= {f"{KEY_VARIABLE}{name}": token}
            try:
                environment[f"{URL_VARIABLE}{name}"] = ray.get(actor.url.remote(), timeout=START_TIMEOUT_S)
            except ray.exceptions.RayError as error:
                raise RunError(f"the judge '{name}' ({judge.model.path}) did not start: {error}") from None
        yield environment
    finally:
        for actor in actors:
            ray.kill(actor)
