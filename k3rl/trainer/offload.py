"""Giving the device to the rollout engine and taking it back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from k3rl.trainer.optimizer import Masters


def move(
    policy: nn.Module | None, masters: Masters, optimizer: torch.optim.Optimizer, device: torch.device
) -> None:
    """Weights, masters and optimiser state to another device; identities of parameters stay. No policy: the rest."""
    if policy is not None and any(p.device != device for p in policy.parameters()):
        policy.to(device)
    with torch.no_grad():
        for copy in masters.copies.values():
            copy.data = copy.data.to(device, non_blocking=True)
        for state in optimizer.state.values():
            for key, value in state.items():
                # step counts stay where the optimiser put them
                if isinstance(value, Tensor) and value.ndim > 0:
                    state[key] = value.to(device, non_blocking=True)
    if device.type == "cpu" and torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    elif device.type == "cuda":
        torch.cuda.synchronize()
