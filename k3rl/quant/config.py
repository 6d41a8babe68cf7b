"""What is quantised while a model is trained."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from k3rl.config.base import Config

EXPERTS = "experts"


class QatConfig(Config):
    """Quantisation-aware training in MXFP4 (spec/04): full-precision weights, of which quantised values are used."""

    targets: tuple[str, ...] = Field((EXPERTS,), min_length=1)
    """``experts``: the routed experts of a mixture, as K3 does. Else patterns of linear modules' names, such as
    ``*.mlp.*_proj`` for a dense model's MLPs."""
    rule: Literal["ceil", "floor", "even"] = "ceil"
    """How a block's scale follows from its largest magnitude."""
    activations: Literal["none", "mxfp8"] = "none"
    """Also quantise what enters these matrices, as hardware with MXFP8 matrix products does. ``none`` is what rollout
    runs on today: the native engine, and vLLM on Hopper."""
