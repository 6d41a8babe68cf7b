"""A run's own judges: models on the native engine, each in a Ray actor behind an OpenAI-compatible address, so that
reward processes, on whatever machine, ask them as they ask any endpoint.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from k3rl.chat import load_renderer
from k3rl.config.rewards import JudgeModel, RewardConfig
from k3rl.errors import RunError
from k3rl.recipes.engines import native_engine, tokenizer_of
from rewards.grm.reward import KEY_VARIABLE, URL_VARIABLE

if TYPE_CHECKING:
    from rollout.serving import ChatEngine

START_TIMEOUT_S = 600.0


def chat_engine(judge: JudgeModel, name: str, device: str) -> ChatEngine:
    """A model on an engine, ready to be served. Close it."""
    from rollout.serving import ChatEngine  # and a web server's libraries, for those who have judges

    renderer = load_renderer(tokenizer_of(judge.model))
    engine, context = native_engine(judge.model, judge.engine, renderer, device, judge.max_context)
    return ChatEngine(engine, renderer, name, context, judge.thinking)


class _Judge:
    """The server inside its actor. On one machine it listens on loopback alone, else on its node's address; in either
    case it asks for the token."""

    def __init__(self, judge: JudgeModel, name: str, token: str) -> None:
        import ray
        import torch

        from rollout.serving import Served, make_app

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
