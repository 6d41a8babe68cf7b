"""Optimiser, learning-rate schedule, gradient norm, and float32 master copies of bfloat16 weights."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from k3rl.config.trainer import AdamWConfig, MuonConfig, ScheduleConfig
from k3rl.optim import Muon, QKClip, muon_groups, plan_blocks


def rate(config: ScheduleConfig, step: int) -> float:
    """Factor on the learning rate at an optimiser step, counted from 0."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.shape == "constant":
        return 1.0
    done = min(1.0, max(0.0, (step - config.warmup_steps - config.stable_steps) / config.decay_steps))
    left = 0.5 * (1.0 + math.cos(math.pi * done)) if config.shape == "cosine" else 1.0 - done
    return config.final_fraction + (1.0 - config.final_fraction) * left


class Masters:
    """What the optimiser updates: the parameters themselves, or float32 copies of those in lower precision.

    With copies, gradients add up in float32 too (``bfloat16`` sums of many micro-batches lose the small
    ones): a hook moves each parameter's gradient over as soon as it is complete.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], enabled: bool) -> None:
        self.parameters = parameters
        self.copies: dict[str, Tensor] = {}
        for name, p in parameters.items():
            if enabled and p.dtype in (torch.bfloat16, torch.float16):
                self.copies[name] = p.detach().float().requires_grad_()
                p.register_post_accumulate_grad_hook(self._mover(self.copies[name]))
        self.targets: dict[str, Tensor] = {n: self.copies.get(n, p) for n, p in parameters.items()}

    @staticmethod
    def _mover(copy: Tensor):
        def move(parameter: Tensor) -> None:
            assert parameter.grad is not None
            if copy.grad is None:
                copy.grad = parameter.grad.float()
            else:
                copy.grad.add_(parameter.grad)
            parameter.grad = None

        return move

    @torch.no_grad()
    def publish(self) -> None:
        """Round the copies into the parameters."""
        for name, copy in self.copies.items():
            self.parameters[name].copy_(copy)

    @torch.no_grad()
    def adopt(self) -> None:
        """Take the parameters as they are, after a load."""
        for name, copy in self.copies.items():
            copy.copy_(self.parameters[name])


def build_optimizer(
    config: AdamWConfig | MuonConfig, targets: dict[str, Tensor], module: nn.Module
) -> torch.optim.Optimizer:
    """Matrices decay, vectors don't. Fused kernels on the CPU and on CUDA.

    ``targets`` are ``module``'s parameters, or their masters, under the same names. With Muon and a bound on
    attention logits, QK-Clip follows every step.
    """
    if isinstance(config, MuonConfig):
        groups = muon_groups(config, targets, plan_blocks(module, config.per_head))
        muon = Muon(groups, config.lr, config.momentum, config.nesterov, config.iterations)
        if config.qk_clip:
            clip = QKClip(module, targets, config.qk_clip)
            muon.register_step_post_hook(lambda *_: clip())
        return muon
    matrices = [p for p in targets.values() if p.ndim >= 2]
    vectors = [p for p in targets.values() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )


def set_rate(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """Scale every group's learning rate; returns the first group's."""
    for group in optimizer.param_groups:
        group.setdefault("base_lr", group["lr"])
        group["lr"] = group["base_lr"] * factor
    return float(optimizer.param_groups[0]["lr"])


@torch.no_grad()
def clip_gradients(targets: Iterable[Tensor], largest: float) -> float:
    """Global L2 norm before clipping, over all shards of all ranks; gradients are scaled where it exceeds
    ``largest`` > 0.
    """
    gradients = [p.grad for p in targets if p.grad is not None]
    if not gradients:
        return 0.0
    norms = [g.full_tensor() if isinstance(g, DTensor) else g for g in torch._foreach_norm(gradients)]
    total = torch.linalg.vector_norm(torch.stack([n.float() for n in norms]))
    norm = float(total)
    if math.isfinite(norm) and 0 < largest < norm:
        torch._foreach_mul_(gradients, largest / (norm + 1e-6))
    return norm
