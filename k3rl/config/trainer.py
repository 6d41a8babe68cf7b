"""How a policy is trained."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from k3rl.algorithms.config import ObjectiveChoice
from k3rl.algorithms.k25 import K25Config
from k3rl.config.base import Config
from k3rl.optim.config import BalancingChoice, FrozenBalancing, MuonConfig


class AdamWConfig(Config):
    """AdamW: the default, and what Muon leaves embeddings, heads and vectors to."""

    type: Literal["adamw"] = "adamw"
    lr: Annotated[float, Field(gt=0)] = 1e-5
    """Largest learning rate; the schedule multiplies it."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and the second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled decay of matrices; vectors are never decayed."""


class ScheduleConfig(Config):
    """Learning rate by optimiser step: linear warm-up, then a shape down to `final_fraction`."""

    shape: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """After warm-up. `wsd` (warm-up, stable, decay) stays at the full rate for `stable_steps`, then falls linearly."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimiser steps until the full rate; the first step already has 1 / warmup_steps of it."""
    decay_steps: Annotated[int, Field(ge=0)] = 0
    """Optimiser steps of the way down to `final_fraction`; needed by all shapes but `constant`."""
    stable_steps: Annotated[int, Field(ge=0)] = 0
    """Optimiser steps at the full rate between warm-up and the way down; `wsd` only."""
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """What is left of the rate at the end, as a fraction."""

    @model_validator(mode="after")
    def _length(self) -> ScheduleConfig:
        if self.shape != "constant" and self.decay_steps == 0:
            raise ValueError(f"schedule '{self.shape}' needs decay_steps")
        if self.shape == "constant" and self.decay_steps:
            raise ValueError("decay_steps has no effect with a constant schedule")
        if self.stable_steps and self.shape != "wsd":
            raise ValueError(f"stable_steps has no effect with schedule '{self.shape}'")
        return self


class LoraConfig(Config):
    """Low-rank adapters instead of all weights; Hugging Face models only, through peft."""

    rank: Annotated[int, Field(gt=0)] = 16
    """Width of the adapters."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Adapters are scaled with alpha / rank."""
    target_modules: tuple[str, ...] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Last part of the names of the linear modules that get an adapter; whole parts are compared."""


class ParallelConfig(Config):
    """Over how many workers one policy is trained."""

    ranks: Annotated[int, Field(gt=0)] = 1
    """Trainer workers; parameters, gradients and optimiser state are sharded over them (FSDP2)."""
    context: Annotated[int, Field(gt=0)] = 1
    """Workers that share each sequence, cut along its length (K3 models only); `ranks / context` groups of them
    share the batch. Each sequence is then a pass of its own.
    """
    reshard_after_forward: bool = True
    """Gather parameters again in the backward pass instead of keeping them: less memory, more traffic."""

    @model_validator(mode="after")
    def _groups(self) -> ParallelConfig:
        if self.ranks % self.context:
            raise ValueError(
                f"context: {self.ranks} ranks cannot be divided into groups of {self.context}; ranks must be a "
                "multiple of context"
            )
        return self


class CheckpointConfig(Config):
    """When the trainer's state is kept."""

    keep_last: Annotated[int, Field(gt=0)] = 2
    """Latest checkpoints that stay."""
    keep_every: Annotated[int, Field(ge=0)] = 0
    """Steps whose number is a multiple of this stay for ever; 0: none."""
    asynchronous: bool = False
    """Write in the background from a copy in host memory; the run goes on meanwhile."""


OptimizerChoice = Annotated[AdamWConfig | MuonConfig, Field(discriminator="type")]


class TrainerConfig(Config):
    """The policy's update."""

    objective: ObjectiveChoice = K25Config()
    """What is minimised in RL (`k3rl.algorithms`)."""
    optimizer: OptimizerChoice = AdamWConfig()
    """How gradients become steps."""
    balancing: BalancingChoice = FrozenBalancing()
    """What moves the biases of the experts' routers; they stay frozen unless asked otherwise."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate by optimiser step."""
    grad_clip: Annotated[float, Field(ge=0)] = 1.0
    """Largest global gradient norm; 0: no clipping."""
    micro_batch_tokens: Annotated[int, Field(gt=0)] = 16384
    """Tokens packed into one forward and backward pass; a longer sequence gets a pass of its own."""
    minibatches: Annotated[int, Field(gt=0)] = 1
    """Optimiser steps that a batch of trajectories is split into; groups stay whole."""
    epochs: Annotated[int, Field(gt=0)] = 1
    """Passes over each batch of trajectories."""
    master_weights: bool = True
    """Keep float32 copies of bfloat16 weights for the optimiser: without them most small updates round to
    nothing.
    """
    replay_routing: bool = True
    """Where the engine recorded which experts each token took, take the same ones; weights stay the live router's."""
    lora: LoraConfig | None = None
    """Train low-rank adapters only."""
    parallel: ParallelConfig = ParallelConfig()
    """Over how many workers."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Which checkpoints stay, and how they are written."""
    threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads of each worker; 0: torch's default."""
    deterministic: bool = False
    """Only algorithms whose results are the same bits every time, at some cost in speed."""
    logprob_chunk_mb: Annotated[int, Field(ge=0)] = 0
    """Bound of one chunk of float32 logits, in MiB; 0: a default by device."""

    @field_validator("optimizer", "balancing", mode="before")
    @classmethod
    def _default_type(cls, value: Any, info: ValidationInfo) -> Any:
        """`optimizer: {lr: 1e-4}` changes a field of the default."""
        if isinstance(value, dict) and "type" not in value:
            return {"type": "adamw" if info.field_name == "optimizer" else "frozen", **value}
        return value
