"""QK-Clip: keeps the attention logits of every MLA head below a bound by shrinking its weights. Source: Kimi K2.

Where a head's largest logit of the last step was S > tau, gamma = tau / S: its own query and key parts take
sqrt(gamma) each; the query part that meets the key shared by all heads takes gamma, and the shared key is left alone.
KDA normalises its queries and keys and has no logits. Legend: H heads, R rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from k3rl.models.k3.attention import MLAttention


class QKClip:
    """Measures in the forwards of ``module``, clips ``targets`` (its parameters, or their float32 masters, by name)
    when called, after an optimiser step."""

    def __init__(self, module: nn.Module, targets: Mapping[str, Tensor], threshold: float) -> None:
        self.threshold = threshold
        self.layers = {n: m for n, m in module.named_modules() if isinstance(m, MLAttention)}
        self.targets = targets
        self.largest = 0.0
        """Largest logit of the last step, before clipping."""
        for layer in self.layers.values():
            layer.track_max_logit = True

    @torch.no_grad()
    def __call__(self) -> None:
        peaks = [layer.max_logit_H for layer in self.layers.values()]
        for layer in self.layers.values():
            layer.max_logit_H = None
        if not peaks or any(p is None for p in peaks):
            return
        peaks_LH = torch.stack([p for p in peaks if p is not None])
        first = next(iter(self.targets.values()))
        if isinstance(first, DTensor):
            for axis in range(first.device_mesh.ndim):
                dist.all_reduce(peaks_LH, dist.ReduceOp.MAX, group=first.device_mesh.get_group(axis))
        self.largest = float(peaks_LH.max())
        if self.largest <= self.threshold:
            return
        for (name, layer), peak_H in zip(self.layers.items(), peaks_LH, strict=True):
            gamma_H = (self.threshold / peak_H.clamp_min(self.threshold)).float()
            self._shrink(f"{name}.q_b_proj.weight", gamma_H, layer.nope, layer.shared, True)
            self._shrink(f"{name}.kv_b_proj.weight", gamma_H, layer.nope, layer.value, False)

    def _shrink(self, name: str, gamma_H: Tensor, own: int, other: int, query: bool) -> None:
        target = self.targets.get(name)
        if target is None:
            return  # frozen
        second_H = gamma_H if query else torch.ones_like(gamma_H)
        factor_HR = torch.cat(
            [gamma_H.sqrt()[:, None].expand(-1, own), second_H[:, None].expand(-1, other)], 1
        )
        factor_R1 = factor_HR.reshape(-1, 1).to(target.dtype)
        if isinstance(target, DTensor):
            # Every rank has the same factors: nothing is sent.
            factor_R1 = distribute_tensor(
                factor_R1, target.device_mesh, target.placements, src_data_rank=None
            )
        target.mul_(factor_R1)
