"""Jobs: what `k3rl run` can do. A tagged union on ``kind``; each kind has a recipe in `k3rl.recipes`."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from k3rl.config.base import Config
from k3rl.config.distill import (
    MergeFields,
    Normalised,
    RolloutsData,
    TeacherConfig,
    TeacherPoolConfig,
    TokenRewardConfig,
    WholeDistribution,
)
from k3rl.config.rewards import RewardConfig
from k3rl.config.rollout import (
    AgentConfig,
    NativeEngineConfig,
    RolloutConfig,
    SamplingConfig,
    UntrainedEngineConfig,
)
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
    data: Annotated[DataConfig | RolloutsData, Field(discriminator="type")]
    """Conversations, or trajectories of an earlier run."""
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
    colocation: Literal["share", "turns"] = "share"
    """Of trainer and engines on the same GPUs. ``share``: both stay in device memory. ``turns``: whichever waits gives
    its memory to the other, the trainer's state moving to the host and back."""
    checkpoint_every: Annotated[int, Field(gt=0)] = 1
    """Steps between checkpoints; the last step always makes one. What was done since the last is done again
    after a crash."""

    @model_validator(mode="after")
    def _one_thinking(self) -> RlJob:
        if "thinking" in self.rollout.model_fields_set and self.rollout.thinking != self.thinking:
            raise ValueError(
                f"rollout.thinking is {self.rollout.thinking} and the job's thinking {self.thinking}"
            )
        # Set apart from the check, so that a stored config loads to the same job.
        object.__setattr__(self, "rollout", self.rollout.model_copy(update={"thinking": self.thinking}))
        return self


class DistillJob(RlJob):
    """On-policy distillation from one or many teachers (spec/03): RL whose advantage is, token by token, what
    the teacher thinks of the token."""

    kind: Literal["distill"] = "distill"  # type: ignore[assignment]
    teachers: Annotated[tuple[TeacherConfig, ...], Field(min_length=1)]
    """Who teaches which (domain, effort) cell."""
    token_rewards: TokenRewardConfig = TokenRewardConfig()
    """How a teacher's opinion becomes an advantage."""
    divergence: WholeDistribution | None = None
    """Compare whole distributions instead of sampled tokens. None: token rewards, as K3."""
    teacher_pool: TeacherPoolConfig = TeacherPoolConfig()
    """How teachers share devices."""


class EvaluateJob(JobBase):
    """Compare models on held-out problems."""

    kind: Literal["evaluate"] = "evaluate"
    models: Annotated[dict[str, ModelConfig], Field(min_length=1)]
    """The models by the name they have in the report, in its order; the first is the baseline."""
    ensembles: dict[str, tuple[TeacherConfig, ...]] = Field(default_factory=dict)
    """Further names in the report, each answered by several models: every (domain, effort) cell by its own."""
    normalise: Normalised | None = None
    """Report each cell's score between those of two stages."""
    thinking: bool = True
    """Sample a think channel before the response."""
    evaluation: EvaluationConfig
    """Problems and sampling."""
    engine: UntrainedEngineConfig = NativeEngineConfig()
    """What generates."""
    workers: Annotated[int, Field(gt=0)] = 1
    """Rollout workers."""
    rewards: RewardConfig = RewardConfig()
    """How responses are scored."""

    @model_validator(mode="after")
    def _stages(self) -> EvaluateJob:
        if both := self.models.keys() & self.ensembles.keys():
            raise ValueError(f"'{min(both)}' is a model and an ensemble: give one of them another name")
        for name in (self.normalise.zero, self.normalise.one) if self.normalise else ():
            if name not in self.models and name not in self.ensembles:
                raise ValueError(f"normalise: no stage '{name}'{nearest(name, self.models)}")
        return self


class BudgetsJob(EvaluateJob):
    """Answer problems with the cold-start model and write them, with budgets b0 and l0 from the answers, to
    ``problems.jsonl`` (spec/02 §3). Later jobs read them as ``data: {type: jsonl, path: "@name"}``."""

    kind: Literal["budgets"] = "budgets"  # type: ignore[assignment]
    models: Annotated[dict[str, ModelConfig], Field(min_length=1, max_length=1)]
    """The cold-start model, under any name."""
    estimator: Literal["percentile", "mean", "longest", "shortest"] = "percentile"
    """What of the correct answers' lengths is the budget."""
    rho: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Which percentile, as a share."""
    correct_at: float = 0.5
    """A task reward of at least this is a correct answer."""


class CollectJob(JobBase):
    """Teachers answer problems of their cells. Off-policy SFT then reads ``data: {type: rollouts, path: "@name"}``."""

    kind: Literal["collect"] = "collect"
    teachers: Annotated[tuple[TeacherConfig, ...], Field(min_length=1)]
    """Who answers which (domain, effort) cell."""
    thinking: bool = True
    """Sample a think channel before the response."""
    problems: Annotated[int, Field(gt=0)]
    """How many problems are drawn from the data, each at the effort of its draw."""
    evaluation: EvaluationConfig
    """Problems and sampling; ``efforts`` poses each drawn problem at all of these instead."""
    engine: UntrainedEngineConfig = NativeEngineConfig()
    """What generates."""
    workers: Annotated[int, Field(gt=0)] = 1
    """Rollout workers."""
    rewards: RewardConfig = RewardConfig()
    """How responses are scored."""


class MergeJob(JobBase, MergeFields):
    """Merge models of one architecture by their weights: the baselines of distillation."""

    kind: Literal["merge"] = "merge"


class ExportJob(JobBase):
    """Write a model in the format that is served; see `k3rl export`."""

    kind: Literal["export"] = "export"
    model: ModelConfig
    """``@job`` or a run's folder."""
    format: Literal["same", "bf16", "mxfp4"] = "mxfp4"
    """``mxfp4``: packed experts, the rest bfloat16."""
    rule: Literal["ceil", "floor", "even"] | None = None
    """MXFP4: how a block's scale is chosen. None: as the model was trained, else ``ceil``."""
    targets: tuple[str, ...] = ()
    """MXFP4: patterns of linear modules to pack. Empty: what the model's `qat` rounds, else routed experts."""


SingleJob = Annotated[
    SftJob | RlJob | DistillJob | EvaluateJob | BudgetsJob | CollectJob | MergeJob | ExportJob,
    Field(discriminator="kind"),
]


class PipelineJob(JobBase):
    """Jobs in the order given; ``@name`` as a model's path is the checkpoint of an earlier job.

    Jobs that are finished and unchanged are skipped. `seed`, `device`, `runs`, `ray` and `tracking` of the pipeline
    hold for jobs that do not set them.
    """

    kind: Literal["pipeline"] = "pipeline"
    jobs: Annotated[dict[str, SingleJob], Field(min_length=1)]
    """The jobs by name."""
    parallel: Annotated[int, Field(gt=0)] = 1
    """Jobs that may run at once, where none waits for another."""

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
            for used in references(job):
                if used not in earlier:
                    known = nearest(used, earlier) or "; it is the first job"
                    raise ValueError(f"job '{name}' uses '@{used}', which is not an earlier job{known}")
            earlier.append(name)
        return self


Job = Annotated[SingleJob | PipelineJob, Field(discriminator="kind")]


def references(part: object) -> list[str]:
    """The jobs that a job, or a part of one, refers to by ``path: "@job"``, each once."""
    match part:
        case Config():
            path = getattr(part, "path", None)
            own = [path[1:]] if isinstance(path, str) and path.startswith("@") else []
            below = [references(getattr(part, name)) for name in type(part).model_fields]
        case dict():
            own, below = [], [references(v) for v in part.values()]
        case tuple() | list():
            own, below = [], [references(v) for v in part]
        case _:
            return []
    return list(dict.fromkeys([*own, *(name for names in below for name in names)]))
