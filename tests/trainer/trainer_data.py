"""Trajectories and conversations of random ids for the trainer's tests."""

from __future__ import annotations

import random

import torch

from k3rl.config.trainer import AdamWConfig, TrainerConfig
from k3rl.models import ModelConfig, build_model
from k3rl.trainer import TrainerWorker
from k3rl.types import Author, Channel, Effort, Reward, Segment, Status, Trajectory

NANO = ModelConfig(path="k3-nano", overrides={"num_hidden_layers": 2, "linear_attn_config": {
    "num_heads": 2, "head_dim": 16, "full_attn_layers": [2], "kda_layers": [1]}})  # fmt: skip


def nano(seed: int = 1, dtype: torch.dtype | None = None):
    """Two layers: one KDA and dense, one MLA with experts."""
    return build_model(NANO, seed, dtype=dtype)


class Recording(TrainerWorker):
    """Keeps the gradients that each update starts from."""

    gradients: dict[str, torch.Tensor]

    def _apply(self, output):
        whole = lambda g: g.full_tensor() if hasattr(g, "full_tensor") else g.clone()  # noqa: E731
        self.gradients = {n: whole(t.grad) for n, t in self.masters.targets.items() if t.grad is not None}
        super()._apply(output)


def close(a: TrainerWorker, b: TrainerWorker, atol: float = 1e-6) -> bool:
    """Do the last updates of both start from the same gradient?"""
    assert a.gradients.keys() == b.gradients.keys()
    return all(torch.allclose(a.gradients[n], b.gradients[n], atol=atol, rtol=0) for n in a.gradients)


def worker(
    seed: int = 1, lr: float = 1e-2, model=None, world=None, optimizer_eps: float = 1e-8, **config
) -> Recording:
    settings = TrainerConfig(optimizer=AdamWConfig(lr=lr, eps=optimizer_eps), **config)
    return Recording(
        model if model is not None else nano(seed), settings, seed=seed, world=world, device="cpu"
    )


def make_trajectories(seed: int, groups: int = 3, samples: int = 3, lengths=(1, 40)) -> list[Trajectory]:
    """Two model turns with a tool result between them; behaviour log-probs are not the policy's."""
    rng = random.Random(seed)
    out = []
    for draw in range(groups):
        prompt = [rng.randrange(512) for _ in range(rng.randint(1, 20))]
        for sample in range(samples):
            segments = []
            for turn in range(rng.randint(1, 2)):
                if turn:
                    segments.append(
                        Segment(Author.ENVIRONMENT, Channel.OBSERVATION, [rng.randrange(512)] * 3)
                    )
                n = rng.randint(*lengths)
                ids = [rng.randrange(512) for _ in range(n)]
                logprobs = [-6.2 + rng.uniform(-0.3, 0.3) for _ in range(n)]
                segments.append(Segment(Author.MODEL, Channel.RESPONSE, ids, logprobs, 0))
            t = Trajectory(
                f"p{draw}",
                draw,
                sample,
                "general",
                Effort.LOW,
                list(prompt),
                segments,
                status=Status.COMPLETE,
            )
            t.reward = Reward(float(rng.random() < 0.5))
            t.advantage = rng.uniform(-1, 1)
            out.append(t)
    return out


def make_conversations(seed: int, count: int = 6):
    rng = random.Random(seed)
    out = []
    for _ in range(count):
        n = rng.randint(4, 50)
        ids = [rng.randrange(512) for _ in range(n)]
        out.append((ids, [i >= n // 3 for i in range(n)], rng.choice([0.5, 1.0])))
    return out


def state_of(w: TrainerWorker) -> dict[str, torch.Tensor]:
    from k3rl.trainer.checkpoint import optimizer_tensors

    return {n: t.clone() for n, t in optimizer_tensors(w).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
