"""The multi-token-prediction layer: one decoder layer that predicts the token after the next. Source: spec/05 §7.

From the main model's hidden state at t and the embedding of token t+1 it predicts token t+2, through the shared head.
The release has no such layer; `num_nextn_predict_layers: 1` adds one, under the name `mtp`.
Legend: T tokens packed, P positions with a target, D hidden width, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from k3rl.models.config import K3Config
from k3rl.models.k3.layers import AttnRes, RMSNorm, Values
from k3rl.models.k3.routing import Routing
from k3rl.models.packing import Layout

if TYPE_CHECKING:
    from k3rl.models.k3.model import K3Model

LOGIT_ROWS = 1024
"""Rows whose logits exist at one time."""


class MTPLayer(nn.Module):
    """``layer`` is a decoder layer like the main model's last ones: gated MLA and experts, with a residual block of
    its own."""

    def __init__(self, config: K3Config, layer: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        D, eps = config.hidden_size, config.rms_norm_eps
        self.eps = eps
        self.hnorm, self.enorm, self.norm = (RMSNorm(D, eps, dtype, device) for _ in range(3))
        self.eh_proj = nn.Linear(2 * D, D, bias=False, dtype=dtype, device=device)
        self.layer = layer
        self.output_attn_res = AttnRes(D, eps, dtype, device)

    def forward(self, hidden_TD: Tensor, next_TD: Tensor, layout: Layout) -> Tensor:
        """Normed hidden states [T, D] for the head, from hidden states and the embeddings of the tokens after them."""
        x_TD = self.eh_proj(torch.cat([self.enorm(next_TD), self.hnorm(hidden_TD)], -1))
        values = Values(self.eps)
        running_TD = self.layer(values, x_TD, layout, Routing())
        return self.norm(self.output_attn_res(values, running_TD))


def mtp_hidden(
    model: K3Model, hidden_TD: Tensor, input_ids_T: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """(hidden states [P, D], targets [P]) of all positions that have a token two places on in their own sequence.

    ``hidden_TD`` is what the model's forward gave for these tokens. Raises ValueError for a model without the layer.
    """
    if model.mtp is None:
        raise ValueError("this model has no multi-token-prediction layer (num_nextn_predict_layers is 0)")
    cu = cu_seqlens.detach().cpu().numpy()
    lengths = np.diff(cu)
    # The layer sees every position but the last of each sequence: that one has no next token.
    within = np.arange(cu[-1]) - np.repeat(cu[:-1], lengths)
    left = np.repeat(lengths, lengths) - within
    seen = np.flatnonzero(left >= 2)
    device = input_ids_T.device
    if not len(seen):
        return hidden_TD[:0], input_ids_T[:0]
    seen_S = torch.from_numpy(seen).to(device)
    shorter = lengths[lengths >= 2] - 1
    layout = Layout(len(seen), torch.from_numpy(np.concatenate([[0], np.cumsum(shorter)])), device)
    next_SD = model.model.embed_tokens(input_ids_T[seen_S + 1])
    out_SD = model.mtp(hidden_TD.index_select(0, seen_S), next_SD, layout)
    has_target = torch.from_numpy(np.flatnonzero(left[seen] >= 3)).to(device)
    return out_SD.index_select(0, has_target), input_ids_T[seen_S[has_target] + 2]


def mtp_loss(
    model: K3Model,
    hidden_TD: Tensor,
    input_ids_T: Tensor,
    cu_seqlens: Tensor,
) -> tuple[Tensor, int]:
    """(sum of cross-entropies of tokens t+2, their number). Logits exist for `LOGIT_ROWS` positions at a time."""
    hidden_PD, targets_P = mtp_hidden(model, hidden_TD, input_ids_T, cu_seqlens)

    def part(hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model.logits(hidden), targets, reduction="sum")

    total = hidden_PD.new_zeros((), dtype=torch.float32)
    for hidden, targets in zip(hidden_PD.split(LOGIT_ROWS), targets_P.split(LOGIT_ROWS), strict=True):
        if len(targets):
            total = total + checkpoint(part, hidden, targets, use_reentrant=False)
    return total, len(targets_P)
