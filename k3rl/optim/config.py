"""Configs of the optimiser K3 was trained with, and of what keeps its experts' load even."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from k3rl.config.base import Config


class MuonConfig(Config):
    """Muon for matrices, each attention head's block by itself; AdamW for embeddings, the head and vectors.

    Updates are scaled to AdamW's usual size, so that one learning rate and one decay serve both.
    """

    type: Literal["muon"] = "muon"
    lr: Annotated[float, Field(gt=0)] = 1e-5
    """Largest learning rate; the schedule multiplies it."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the matrices' running gradient."""
    nesterov: bool = True
    """Look one gradient ahead of the running one."""
    per_head: bool = True
    """Orthogonalise each head's block of the attention projections, not the whole matrix."""
    iterations: Annotated[int, Field(ge=1, le=20)] = 5
    """Newton-Schulz steps. Five put singular values between 0.68 and 1.14."""
    qk_clip: Annotated[float, Field(ge=0)] = 100.0
    """Largest attention logit of an MLA head: where a step's exceeds it, that head's query and key weights shrink.
    0: no clipping, and nothing is measured."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay of the first and the second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of AdamW's second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled decay of matrices; vectors are never decayed. K3's pre-training had 0.1."""


class FrozenBalancing(Config):
    """The routers' biases stay as they were trained: a bias that moves breaks router replay, and RL is short."""

    type: Literal["frozen"] = "frozen"


class QuantileBalancing(Config):
    """Quantile balancing: one step's scores give the biases under which every expert gets its share (spec/05 §6)."""

    type: Literal["quantile"] = "quantile"
    bins: Annotated[int, Field(ge=0, le=65536)] = 1000
    """Bins of the histograms that ranks add up; 0: exact quantiles, from all scores of all ranks."""
    ema: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Part of the old bias that stays."""


class SignBalancing(Config):
    """The auxiliary-loss-free rule: a fixed step up for experts below the mean load, down for those above it."""

    type: Literal["sign"] = "sign"
    speed: Annotated[float, Field(gt=0)] = 1e-3
    """Size of a step, in units of the router's scores (0 to 1)."""


BalancingChoice = Annotated[FrozenBalancing | QuantileBalancing | SignBalancing, Field(discriminator="type")]
