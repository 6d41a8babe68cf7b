"""Jobs: what `k3rl run` can do. A tagged union on ``kind``; each kind has a recipe in `k3rl.recipes`."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from k3rl.config.base import Config
from k3rl.config.distill import TeacherConfig, TokenRewardConfig
from k3rl.config.rewards import RewardConfig
from k3rl.config.rollout import AgentConfig, EngineConfig, NativeEngineConfig, RolloutConfig, SamplingConfig
from k3rl.config.trainer import TrainerConfig
from k3rl.data.config import DataConfig
from k3rl.errors import nearest
from k3rl.models.config import ModelConfig
from k3rl.types import Effort


class RayConfig(Config):
    """The Ray cluster a job runs on."""

    address: str | None = None
    """Address of a running cluster, or ``auto``. None: a cluster of this process alone, ended with it."""
    num_cpus: Annotated[int, Field(ge=0)] = 0
    """CPUs a cluster of this process offers; 0: those of the machine, at least 2."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """How long to wait for actors to start."""


class TrackingConfig(Config):
    """Where metrics go besides the run's own JSONL and TensorBoard files. None of them can stop a run."""

    wandb: str | None = None
    """Weights & Biases project."""
    mlflow: str | None = None
    """MLflow tracking address or folder."""
    trackio: str | None = None
    """trackio project."""


class JobBase(Config):
    """What every job has."""

    name: str
    """Folder of the run under `runs`; the config file's name by default."""
    runs: str = "runs"
    """Folder that holds runs."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of initial weights, data order and every trajectory's random stream."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto``: CUDA where there is one."""
    ray: RayConfig = RayConfig()
    """The Ray cluster."""
    tracking: TrackingConfig = TrackingConfig()
    """Other trackers."""

    @field_validator("name")
    @classmethod
    def _a_folder(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*", name):
            raise ValueError(
                "a run's name is made of letters, digits, '.', '_' and '-', with '/' between folders"
            )
        return name


class EvaluationConfig(Config):
    """Held-out problems, sampled and scored."""

    data: DataConfig
    """The problems."""
    efforts: tuple[Effort, ...] = ()
    """Each problem is posed once at each of these; empty: as the problem says."""
    samples: Annotated[int, Field(gt=0)] = 1
    """Trajectories per problem and effort."""
    sampling: SamplingConfig = SamplingConfig()
    """How responses are sampled."""
    max_tokens: Annotated[int, Field(gt=0)] = 1024
    """Tokens that may be sampled for one trajectory."""
    max_context: Annotated[int, Field(gt=1)] | None = None
    """Tokens of prompt and response together. None: the model's own limit."""
    agent: AgentConfig = AgentConfig()
    """Tools and environments."""


class SftJob(JobBase):
    """Supervised training on conversations."""

    kind: Literal["sft"] = "sft"
    model: ModelConfig = ModelConfig()
    """Where training starts."""
    data: DataConfig
    """Conversations."""
    thinking: bool = True
    """Render the think channel; without it, thoughts in the data are dropped."""
    steps: Annotated[int, Field(gt=0)]
    """Optimiser steps."""
    batch_size: Annotated[int, Field(gt=0)] = 32
    """Conversations per step."""
    trainer: TrainerConfig = TrainerConfig()
    """The update."""
    checkpoint_every: Annotated[int, Field(gt=0)] = 100
    """Steps between checkpoints; the last step always makes one."""


class RlJob(JobBase):
    """Reinforcement learning with partial rollouts."""

    kind: Literal["rl"] = "rl"
    model: ModelConfig = ModelConfig()
    """Where training starts."""
    data: DataConfig
    """Problems."""
    thinking: bool = True
    """Sample a think channel before the response."""
    steps: Annotated[int, Field(gt=0)]
    """Iterations of rollout, reward and update."""
    rollout: RolloutConfig
    """How trajectories are made."""
    rewards: RewardConfig = RewardConfig()
    """How they are scored."""
    trainer: TrainerConfig = TrainerConfig()
    """The update."""
    checkpoint_every: Annotated[int, Field(gt=0)] = 1
    """Steps between checkpoints; the last step always makes one. What was done since the last is done again
    after a crash."""


class DistillJob(RlJob):
    """On-policy distillation from one or many teachers (spec/03): RL whose advantage is, token by token, what
    the teacher thinks of the token."""

    kind: Literal["distill"] = "distill"  # type: ignore[assignment]
    teachers: Annotated[tuple[TeacherConfig, ...], Field(min_length=1)]
    """Who teaches which (domain, effort) cell."""
    token_rewards: TokenRewardConfig = TokenRewardConfig()
    """How a teacher's opinion becomes an advantage."""


class EvaluateJob(JobBase):
    """Compare models on held-out problems."""

    kind: Literal["evaluate"] = "evaluate"
    models: Annotated[dict[str, ModelConfig], Field(min_length=1)]
    """The models by the name they have in the report, in its order; the first is the baseline."""
    thinking: bool = True
    """Sample a think channel before the response."""
    evaluation: EvaluationConfig
    """Problems and sampling."""
    engine: EngineConfig = NativeEngineConfig()
    """What generates."""
    workers: Annotated[int, Field(gt=0)] = 1
    """Rollout workers."""
    rewards: RewardConfig = RewardConfig()
    """How responses are scored."""


SingleJob = Annotated[SftJob | RlJob | DistillJob | EvaluateJob, Field(discriminator="kind")]


class PipelineJob(JobBase):
    """Jobs in the order given; ``@name`` as a model's path is the checkpoint of an earlier job.

    Jobs that are finished and unchanged are skipped. `seed`, `device`, `runs`, `ray` and `tracking` of the pipeline
    hold for jobs that do not set them.
    """

    kind: Literal["pipeline"] = "pipeline"
    jobs: Annotated[dict[str, SingleJob], Field(min_length=1)]
    """The jobs by name."""

    @model_validator(mode="before")
    @classmethod
    def _inherit(cls, values: object) -> object:
        if not isinstance(values, dict) or not isinstance(values.get("jobs"), dict):
            return values
        shared = {k: values[k] for k in ("seed", "device", "runs", "ray", "tracking") if k in values}
        jobs = {
            name: {**shared, "name": f"{values.get('name', 'pipeline')}/{name}", **job}
            if isinstance(job, dict)
            else job
            for name, job in values["jobs"].items()
        }
        return {**values, "jobs": jobs}

    @model_validator(mode="after")
    def _references(self) -> PipelineJob:
        earlier: list[str] = []
        for name, job in self.jobs.items():
            for model in models_of(job):
                if model.path.startswith("@") and model.path[1:] not in earlier:
                    known = nearest(model.path[1:], earlier) or "; it is the first job"
                    raise ValueError(f"job '{name}' uses '{model.path}', which is not an earlier job{known}")
            earlier.append(name)
        return self


Job = Annotated[SftJob | RlJob | DistillJob | EvaluateJob | PipelineJob, Field(discriminator="kind")]


def models_of(job: JobBase) -> list[ModelConfig]:
    """Every model a job reads."""
    match job:
        case EvaluateJob():
            return list(job.models.values())
        case DistillJob():
            return [job.model, *(t.model for t in job.teachers)]
        case SftJob() | RlJob():
            return [job.model]
    return []
