"""Who teaches, what a teacher's opinion is worth, and the jobs around it: collecting, merging. Source: spec/03."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from k3rl.config.base import Config
from k3rl.models.config import ModelConfig
from k3rl.types import Effort


class RemoteTeacher(Config):
    """A teacher behind an HTTP server that gives log-probs of a prompt's tokens: vLLM's OpenAI-compatible one."""

    url: str
    """Address of the API, such as ``http://127.0.0.1:8000/v1``."""
    model: str = ""
    """The model's name there; empty: the first that ``/models`` lists."""
    api_key_env: str = ""
    """Environment variable that holds the server's key; empty: none."""
    concurrency: Annotated[int, Field(gt=0)] = 16
    """Requests under way at once."""
    timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Time limit of one request."""
    attempts: Annotated[int, Field(gt=0)] = 6
    """Tries of one request before the run stops."""
    backoff_s: Annotated[float, Field(gt=0)] = 1.0
    """Pause after the first failed try; it doubles each time."""

    @model_validator(mode="after")
    def _http(self) -> RemoteTeacher:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"a remote teacher's url begins with http:// or https://, not '{self.url}'")
        return self


class TeacherConfig(Config):
    """One teacher and the cells it teaches."""

    name: str = ""
    """What reports call it, and what a problem's ``metadata.teacher`` may ask for; its path by default."""
    model: ModelConfig
    """The teacher. It must have the student's vocabulary and template. Of a ``remote`` one, the tokenizer alone is
    read from here."""
    remote: RemoteTeacher | None = None
    """Ask a server instead of loading the model."""
    domains: tuple[str, ...] = ()
    """Domains it teaches; empty: all."""
    efforts: tuple[Effort, ...] = ()
    """Efforts it teaches; empty: all."""
    prompt_effort: Literal["student", "none"] | Effort = "student"
    """The effort message in the teacher's prompt: the student's own, none, or a fixed level."""

    def reads(self, effort: Effort | None) -> Effort | None:
        """The effort in this teacher's prompt where the student's has ``effort``."""
        match self.prompt_effort:
            case "student":
                return effort
            case "none":
                return None
            case fixed:
                return Effort(fixed)


class TeacherPoolConfig(Config):
    """How teachers that are loaded here share devices."""

    actors: Annotated[int, Field(gt=0)] = 1
    """Ray actors; a teacher lives in one of them, in turns."""
    storage: Literal["as_loaded", "mxfp4"] = "as_loaded"
    """Where several teachers of one architecture share a device, all but the one that is asked rest in host memory:
    as loaded, or with routed experts packed as MXFP4 (a quarter of bfloat16's bytes; exact for teachers that were
    trained with `qat`)."""
    overlap: bool = True
    """Score groups while others are still generated. False: after the rollout."""
    cache_entries: Annotated[int, Field(ge=0)] = 4096
    """Scored sequences that are kept by content."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Time limit of one call; an actor that is silent for longer is started again."""


class TokenRewardConfig(Config):
    """``clip(log teacher - log student, ±r_max)``, the advantage of that token."""

    r_max: Annotated[float, Field(gt=0)] = 5.0
    """Largest advantage, natural-log units."""
    outcome_weight: Annotated[float, Field(ge=0)] = 0.0
    """Adds this times the group's outcome advantage."""
    weighting: Literal["cell", "sequence", "token"] = "cell"
    """Whose gradient counts how much: every (domain, effort) cell the same, every trajectory, or every token."""
    cell_weights: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """With ``weighting: cell``: a cell's share relative to the others, by ``domain.effort``, ``domain`` or ``effort``;
    1 where nothing is said."""
    warn_kl: Annotated[float, Field(gt=0)] = 0.15
    """Warn when the first step's mean reverse KL to a teacher, per token, is above this (spec/03 §3)."""
    stop_kl: Annotated[float, Field(gt=0)] | None = None
    """Stop the run then instead. None: only warn."""
    largest_gaps: Annotated[int, Field(ge=0)] = 20
    """Tokens of each step at which student and teacher differ most, kept in ``gaps.jsonl``."""
    compare_every: Annotated[int, Field(ge=0)] = 10
    """Every so many steps, a few trajectories are shown to all other teachers too, to see how far these disagree. 0:
    never."""
    compare: Annotated[int, Field(gt=0)] = 9
    """How many trajectories then."""

    @model_validator(mode="after")
    def _cells(self) -> TokenRewardConfig:
        if self.cell_weights and self.weighting != "cell":
            raise ValueError("cell_weights has no effect unless weighting is 'cell'")
        return self


class WholeDistribution(Config):
    """Instead of rewards on sampled tokens: a divergence between the student's and the teacher's next-token
    distributions, at every token that the student sampled (`k3rl.algorithms.divergence`)."""

    type: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    """What is minimised."""
    top_k: Annotated[int, Field(ge=0)] = 64
    """Over the teacher's so many likeliest tokens; 0: the whole vocabulary."""
    beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """jsd: the teacher's share of the mixture."""


class RolloutsData(Config):
    """Trajectories of an earlier run, token by token as they were sampled: off-policy SFT on what a teacher wrote."""

    type: Literal["rollouts"] = "rollouts"
    path: str
    """The run's folder, or ``@job``."""
    min_reward: float | None = None
    """Keep trajectories with at least this reward. None: all that ended by themselves."""
    efforts: tuple[Effort, ...] = ()
    """Keep these efforts; empty: all."""


class MergeFields(Config):
    """What a merge does."""

    models: Annotated[tuple[ModelConfig, ...], Field(min_length=1)]
    """The models to merge, of one architecture."""
    method: Literal["average", "task_arithmetic"] = "average"
    """``average``: the mean of all weights. ``task_arithmetic``: base + scale * sum of (model - base), Ilharco et al.
    2023."""
    weights: tuple[float, ...] = ()
    """A factor per model instead of equal ones; of an average, they are divided by their sum."""
    base: ModelConfig | None = None
    """What the models were trained from; for task arithmetic."""
    scale: float = 1.0
    """Factor on the task vectors' sum; for task arithmetic."""

    @model_validator(mode="after")
    def _consistent(self) -> MergeFields:
        if (self.base is None) != (self.method == "average"):
            raise ValueError("task_arithmetic needs 'base', an average has none")
        if self.weights and len(self.weights) != len(self.models):
            raise ValueError(f"{len(self.weights)} weights for {len(self.models)} models")
        if self.method == "average" and self.weights and sum(self.weights) <= 0:
            raise ValueError("an average's weights must add up to more than 0")
        return self


class Normalised(Config):
    """The normalised score of a stage: 0 where it is no better than one stage, 1 where it equals another."""

    zero: str
    """The stage at 0: the student after SFT."""
    one: str
    """The stage at 1: the teachers, each in its own cells."""
    min_headroom: Annotated[float, Field(gt=0)] = 0.05
    """A cell in which the two differ by less has no score."""
