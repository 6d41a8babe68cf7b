"""LatentMoE: sigmoid router with a selection-only bias, experts in a latent, shared experts. Source: spec/05 §6.

Legend: T tokens, D hidden width, E experts, K experts a token, L latent width, I expert width, A = T*K assignments.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3rl.models.config import K3Config
from k3rl.models.k3.attention import _linear
from k3rl.models.k3.layers import RMSNorm, situ_glu, wide
from k3rl.models.k3.routing import Routing

FEW_TOKENS, FEW_COLUMNS = 128, 4096
Transform = Callable[[Tensor], Tensor]


class MLP(nn.Module):
    """SiTU-GLU: the dense first layer and the fused shared experts."""

    def __init__(self, config: K3Config, inner: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.betas = (config.activation_situ_beta, config.activation_situ_linear_beta)
        self.gate_proj = _linear(config.hidden_size, inner, dtype, device)
        self.up_proj = _linear(config.hidden_size, inner, dtype, device)
        self.down_proj = _linear(inner, config.hidden_size, dtype, device)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(situ_glu(self.gate_proj(x_TD), self.up_proj(x_TD), *self.betas))


class Router(nn.Module):
    """Scores in float32; the bias decides who is chosen and never enters a weight."""

    def __init__(self, config: K3Config, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.top_k, self.renormalise, self.factor = (
            config.num_experts_per_token,
            config.moe_renormalize,
            config.routed_scaling_factor,
        )
        self.weight = nn.Parameter(
            torch.empty(config.num_experts, config.hidden_size, dtype=dtype, device=device)
        )
        # A buffer: no gradient reaches it, and no blanket cast of parameters may touch it (spec/10 row 65).
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts, device=device))
        # A balancer, fed scores [T, E] and ids [T, K] once per token that is trained on.
        self.observe: Callable[[Tensor, Tensor], None] | None = None

    def forward(self, x_TD: Tensor, routing: Routing, index: int) -> tuple[Tensor, Tensor]:
        """Returns (expert ids [T, K], weights [T, K] in float32)."""
        scores_TE = torch.sigmoid(F.linear(wide(x_TD), wide(self.weight)))
        ids_TK = routing.choice(index)
        if ids_TK is None:
            with torch.no_grad():
                ids_TK = (scores_TE + self.e_score_correction_bias).topk(self.top_k, -1, sorted=False).indices
        if routing.first_time(index):
            routing.chosen[index] = ids_TK
            if self.observe is not None and self.training and torch.is_grad_enabled():
                self.observe(scores_TE.detach()[: routing.counted], ids_TK[: routing.counted])
        weights_TK = scores_TE.gather(1, ids_TK)
        if self.renormalise:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        return ids_TK, weights_TK * self.factor


class Experts(nn.Module):
    """All routed experts of a layer, stacked. In a checkpoint they are `experts.{e}.{w1,w2,w3}.weight`.

    w1 is the gate, w3 the linear branch, w2 the way back. ``weight_transform`` and ``activation_transform`` are
    applied to the matrices and to the inputs of both matrix products: quantisation-aware training puts its fake
    quantisers there, and names stay as they are.
    """

    def __init__(self, config: K3Config, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        E, I, L = config.num_experts, config.moe_intermediate_size, config.routed_expert_hidden_size
        self.betas = (config.activation_situ_beta, config.activation_situ_linear_beta)
        self.num_experts, self.columns = E, E * I
        self.w1 = nn.Parameter(torch.empty(E, I, L, dtype=dtype, device=device))
        self.w2 = nn.Parameter(torch.empty(E, L, I, dtype=dtype, device=device))
        self.w3 = nn.Parameter(torch.empty(E, I, L, dtype=dtype, device=device))
        self.weight_transform: Transform | None = None
        self.activation_transform: Transform | None = None

    def forward(self, z_TL: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Sum over a token's experts of weight * w2(SiTU(w1 z, w3 z)), [T, L]."""
        if self.activation_transform is not None:
            z_TL = self.activation_transform(z_TL)
        if not z_TL.is_cuda and z_TL.shape[0] <= FEW_TOKENS and self.columns <= FEW_COLUMNS:
            return self._all_at_once(z_TL, ids_TK, weights_TK)
        T, top_k = ids_TK.shape
        flat_A = ids_TK.reshape(-1)
        order_A = torch.argsort(flat_A, stable=True)
        z_AL = z_TL.index_select(0, order_A // top_k)
        experts_E = torch.arange(self.num_experts, device=z_TL.device)
        ends_E = torch.searchsorted(flat_A[order_A], experts_E, right=True)
        y_AL = self.products(z_AL, ends_E)
        y_AL = wide(y_AL) * weights_TK.reshape(-1).index_select(0, order_A)[:, None]
        back_A = torch.empty_like(order_A).scatter_(
            0, order_A, torch.arange(T * top_k, device=order_A.device)
        )
        return y_AL.index_select(0, back_A).unflatten(0, (T, top_k)).sum(1).to(z_TL.dtype)

    def matrices(self) -> tuple[Tensor, Tensor, Tensor]:
        """w1, w2, w3 as they are multiplied with."""
        if self.weight_transform is None:
            return self.w1, self.w2, self.w3
        return self.weight_transform(self.w1), self.weight_transform(self.w2), self.weight_transform(self.w3)

    def weights_changed(self) -> None:
        """See `LanguageModel.load_named_weights`."""
        self.matrices()

    def products(self, z_AL: Tensor, ends_E: Tensor) -> Tensor:
        """w2(SiTU(w1 z, w3 z)) of rows sorted by expert; ``ends_E``: where each expert's rows end."""
        w1, w2, w3 = self.matrices()
        if _can_group(z_AL, w1):
            return self._grouped(z_AL, ends_E.to(torch.int32), w1, w2, w3)
        return self._one_by_one(z_AL, ends_E.tolist(), w1, w2, w3)

    def _inner(self, gate: Tensor, up: Tensor) -> Tensor:
        inner = situ_glu(gate, up, *self.betas)
        return inner if self.activation_transform is None else self.activation_transform(inner)

    def _all_at_once(self, z_TL: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Every expert on every token, as three matrix products: for a small decode step on the CPU this beats
        visiting experts one by one. Weights of experts that were not chosen are zero."""
        w1, w2, w3 = self.matrices()
        gate, up = F.linear(z_TL, w1.flatten(0, 1)), F.linear(z_TL, w3.flatten(0, 1))
        inner_TEI = self._inner(gate, up).unflatten(-1, w1.shape[:2])
        weights_TE = weights_TK.new_zeros(z_TL.shape[0], w1.shape[0]).scatter(1, ids_TK, weights_TK)
        weighted = (wide(inner_TEI) * weights_TE[..., None]).to(z_TL.dtype)
        return weighted.flatten(1) @ w2.transpose(-1, -2).flatten(0, 1)

    def _grouped(self, z_AL: Tensor, ends_E: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        gate = F.grouped_mm(z_AL, w1.transpose(-1, -2), offs=ends_E)
        up = F.grouped_mm(z_AL, w3.transpose(-1, -2), offs=ends_E)
        return F.grouped_mm(self._inner(gate, up), w2.transpose(-1, -2), offs=ends_E)

    def _one_by_one(self, z_AL: Tensor, ends: list[int], w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        outs, start = [], 0
        # unbind, not w[e]: the gradient of each indexing would be a whole zero-filled stack
        for a, b, c, end in zip(w1.unbind(0), w2.unbind(0), w3.unbind(0), ends, strict=True):
            if end > start:
                z = z_AL[start:end]
                outs.append(F.linear(self._inner(F.linear(z, a), F.linear(z, c)), b))
            start = end
        return torch.cat(outs)


def _can_group(z_TL: Tensor, w1_EIL: Tensor) -> bool:
    """Grouped matrix products: bfloat16 on Ampere and later, rows of 16 bytes, and a torch that has them."""
    if not (z_TL.is_cuda and z_TL.dtype == torch.bfloat16 and hasattr(F, "grouped_mm")):
        return False
    aligned = w1_EIL.shape[1] % 8 == 0 and w1_EIL.shape[2] % 8 == 0
    return aligned and torch.cuda.get_device_capability(z_TL.device) >= (8, 0)


class LatentMoE(nn.Module):
    """The mixture-of-experts block: the router and the shared experts read the full width, routed experts a latent."""

    def __init__(self, config: K3Config, index: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        D, L = config.hidden_size, config.routed_expert_hidden_size
        self.index = index  # among the expert layers
        self.gate = Router(config, dtype, device)
        self.experts = Experts(config, dtype, device)
        self.routed_expert_down_proj = _linear(D, L, dtype, device)
        self.routed_expert_norm = RMSNorm(L, config.rms_norm_eps, dtype, device)
        self.routed_expert_up_proj = _linear(L, D, dtype, device)
        self.shared_experts = MLP(
            config, config.num_shared_experts * config.moe_intermediate_size, dtype, device
        )

    def forward(self, x_TD: Tensor, routing: Routing) -> Tensor:
        ids_TK, weights_TK = self.gate(x_TD, routing, self.index)
        y_TL = self.experts(self.routed_expert_down_proj(x_TD), ids_TK, weights_TK)
        return self.routed_expert_up_proj(self.routed_expert_norm(y_TL)) + self.shared_experts(x_TD)
