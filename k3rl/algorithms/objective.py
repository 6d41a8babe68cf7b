"""The frame that every objective shares, the registry, and how a loss is put together.

    loss of a batch = sum_i w_i * (c_i * objective_i + kl_i - b * entropy_i) / denominator

with w the normalisation (`normalisation`), c the off-policy correction (`corrections`), kl the penalty
towards a reference (`kl`). An objective is one function `(TokenBatch, its config) -> TokenLoss`, registered
with ``@objective("name")``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field, model_validator

from k3rl.algorithms.advantages import Baseline
from k3rl.algorithms.batch import LossOutput, Sum, TokenBatch, TokenLoss
from k3rl.algorithms.corrections import Correction, NoCorrection, correction_weights
from k3rl.algorithms.kl import KlPenalty, kl_loss
from k3rl.algorithms.normalisation import Normalisation, denominator, token_weights
from k3rl.algorithms.overlong import Overlong
from k3rl.config.base import Config
from k3rl.errors import UserError, nearest


class ObjectiveConfig(Config):
    """Settings that every objective has; each objective's class sets its vetted defaults."""

    type: str
    baseline: Baseline = "group-mean"
    """How a group's rewards become advantages (`k3rl.algorithms.advantages`)."""
    normalisation: Normalisation = "token"
    """How token losses are averaged (`k3rl.algorithms.normalisation`)."""
    constant_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens per sequence that `normalisation: constant` divides by; usually the largest response."""
    kl: KlPenalty | None = None
    """Penalty towards a frozen reference policy; none by default."""
    entropy_bonus: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the policy's entropy, per token; 0: none."""
    token_advantages: bool = False
    """Train on the trajectory's token-level advantages (distillation) instead of the group's."""
    group_weight: Annotated[float, Field(ge=0)] = 0.0
    """With `token_advantages`: how much of the group's advantage is added to every token."""
    zero_variance_groups: str = Field(default="keep", pattern="^(keep|drop)$")
    """A group whose rewards are all equal: `keep` (it fills the denominator, regularisers apply) or `drop`
    (dynamic sampling).
    """
    overlong: Overlong | None = None
    """What becomes of responses that are too long; nothing by default."""

    @model_validator(mode="after")
    def _consistent(self) -> ObjectiveConfig:
        if self.normalisation == "constant" and self.constant_tokens == 0:
            raise ValueError("normalisation 'constant' needs constant_tokens, the tokens it divides by")
        if self.normalisation != "constant" and self.constant_tokens:
            raise ValueError("constant_tokens has no effect unless normalisation is 'constant'")
        if self.group_weight and not self.token_advantages:
            raise ValueError("group_weight has no effect unless token_advantages is true")
        return self


class CorrectedConfig(ObjectiveConfig):
    """An objective whose ratio is against the trainer's own log-probs, so that the engine's gap is
    corrected apart.
    """

    correction: Correction = NoCorrection()
    """Off-policy correction between engine and trainer (`k3rl.algorithms.corrections`)."""


ObjectiveFunction = Callable[[TokenBatch, Any], TokenLoss]
_REGISTRY: dict[str, ObjectiveFunction] = {}


def objective(name: str) -> Callable[[ObjectiveFunction], ObjectiveFunction]:
    """Register an objective under ``name``; `ValueError` where the name is taken by another function."""

    def register(function: ObjectiveFunction) -> ObjectiveFunction:
        known = _REGISTRY.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (
            function.__module__,
            function.__qualname__,
        ):
            raise ValueError(f"objective '{name}' is registered already, by {known.__module__}")
        _REGISTRY[name] = function
        return function

    return register


def get_objective(name: str) -> ObjectiveFunction:
    """`UserError` with the nearest name where there is none."""
    if name not in _REGISTRY:
        raise UserError(f"no objective '{name}'{nearest(name, _REGISTRY)}")
    return _REGISTRY[name]


def objective_name(config: ObjectiveConfig) -> str:
    """The registered name; a `custom` objective carries its own."""
    return str(getattr(config, "name", config.type))


def compute_loss(batch: TokenBatch, config: ObjectiveConfig) -> LossOutput:
    """Loss of a micro-batch as a sum; see `LossOutput`. A batch without trained tokens gives a zero that
    keeps the graph.
    """
    picked = batch.selected()
    if len(picked) == 0:
        return LossOutput(batch.logprobs_T.new_zeros(()) + 0.0 * batch.logprobs_T[:0].sum(), 0, 0.0, {})
    result = get_objective(objective_name(config))(picked, config)
    loss_T, metrics = result.loss_T, dict(result.metrics)
    if loss_T.shape != picked.logprobs_T.shape:
        raise ValueError(
            f"objective '{objective_name(config)}' gave {tuple(loss_T.shape)} losses for {len(picked)} tokens"
        )
    if isinstance(config, CorrectedConfig):
        weights_T, found = correction_weights(config.correction, picked)
        metrics |= found
        if weights_T is not None:
            loss_T = loss_T * weights_T
    if config.kl is not None:
        penalty_T, found = kl_loss(config.kl, picked)
        loss_T, metrics = loss_T + penalty_T, metrics | found
    if config.entropy_bonus:
        loss_T = loss_T - config.entropy_bonus * picked.require("entropy_T", "an entropy bonus needs it")
    scale_T = token_weights(config.normalisation, picked).to(loss_T.dtype)
    metrics["loss/per_token"] = Sum.over(loss_T)
    share = denominator(config.normalisation, picked, config.constant_tokens)
    return LossOutput((loss_T * scale_T).sum(), len(picked), share, metrics)
