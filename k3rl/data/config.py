"""Where problems come from. ``type`` chooses: jsonl, parquet, datasets, reasoning_gym, callable or mix."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from k3rl.config.base import Config
from k3rl.types import Effort


class Columns(Config):
    """Which column of a row holds what. A column named here by hand must exist; the others may be absent."""

    id: str = "id"
    """Unique name of the problem. Without this column: the source's name and the row's number."""
    prompt: str = "prompt"
    """The user's message as text, or a list of messages."""
    messages: str = "messages"
    """The whole conversation, as a list of messages. Takes precedence over ``prompt``."""
    answer: str = "answer"
    """Right answer; becomes the reward's ``answer`` argument."""
    reward: str = "reward"
    """Name of the reward, or a mapping with ``name`` and arguments."""
    domain: str = "domain"
    """Family of tasks; else the source's ``domain``."""
    effort: str = "effort"
    """low, high or max; else the source's ``efforts`` decide at each draw."""
    tools: str = "tools"
    """List of tool declarations."""
    budget_tokens: str = "budget_tokens"
    """b0 of the budget rule, in tokens."""
    reference_length: str = "reference_length"
    """l0 of the verbosity guard, in tokens."""
    metadata: tuple[str, ...] = ()
    """Columns to keep in the problem's metadata."""


class Split(Config):
    """Which part of a source to take. The two parts never share a problem."""

    part: Literal["train", "held_out"]
    """The part to take."""
    held_out: float = Field(0.1, gt=0, lt=1)
    """Share of the held-out part."""
    rule: Literal["content", "id", "last"] = "content"
    """``content``: by a hash of the messages, so that equal problems under two ids stay on one side. ``id``:
    by a hash of the id. ``last``: the last rows."""
    seed: int = 0
    """Another seed, another split (not used by ``last``)."""


class SourceConfig(Config):
    """What all sources share."""

    domain: str = "general"
    """Domain of problems that do not name their own."""
    reward: str | dict[str, Any] | None = None
    """Reward of problems that do not name their own: a name, or a mapping with ``name`` and arguments."""
    environment: str | dict[str, Any] | None = None
    """Environment of problems that do not name their own: a registered name, or a mapping with ``name`` and
    ``arguments``. None: the job's."""
    system: str | None = None
    """System message put before problems that have none."""
    efforts: dict[Effort, float] = Field(default_factory=dict)
    """Shares of efforts among draws, for problems without an effort of their own: ``{low: 1, high: 1, max:
    2}``. One problem may so be drawn at several efforts."""
    limit: int | None = Field(None, gt=0)
    """Take the first so many problems (before the split)."""
    split: Split | None = None
    """Take the train or the held-out part only."""

    @field_validator("efforts")
    @classmethod
    def _positive(cls, efforts: dict[Effort, float]) -> dict[Effort, float]:
        if any(not weight >= 0 for weight in efforts.values()) or (efforts and sum(efforts.values()) <= 0):
            raise ValueError("efforts are shares: none below 0, not all 0")
        return efforts

    @field_validator("reward")
    @classmethod
    def _named(cls, reward: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
        if isinstance(reward, dict) and not isinstance(reward.get("name"), str):
            raise ValueError("a reward given as a mapping needs a 'name'")
        return reward

    @field_validator("environment")
    @classmethod
    def _registered(cls, environment: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
        name = environment.get("name") if isinstance(environment, dict) else environment
        if environment is not None and (not isinstance(name, str) or not name or ":" in name):
            raise ValueError("an environment is a registered name, or a mapping with such a 'name'")
        return environment


class RowsConfig(SourceConfig):
    """Sources made of rows with columns."""

    columns: Columns = Columns()
    """Which column holds what."""


class JsonlData(RowsConfig):
    """One JSON object a line."""

    type: Literal["jsonl"] = "jsonl"
    path: str
    """File, or a glob pattern of files, read in sorted order."""


class ParquetData(RowsConfig):
    """Parquet files."""

    type: Literal["parquet"] = "parquet"
    path: str
    """File, or a glob pattern of files, read in sorted order."""


class DatasetsData(RowsConfig):
    """A data set of the `datasets` library: a hub name, a folder made by ``save_to_disk``, or a local
    folder."""

    type: Literal["datasets"] = "datasets"
    path: str
    """Hub name or local path."""
    name: str | None = None
    """Configuration of the data set (its second name on the hub)."""
    data_split: str = "train"
    """Which of its splits to read."""
    revision: str | None = None
    """Commit or tag on the hub: give one for runs to be repeatable."""


class GymTask(Config):
    """One `reasoning-gym` task."""

    name: str
    """The task's name, such as ``chain_sum``."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the task's configuration, without ``seed`` and ``size``."""
    size: int | None = Field(None, gt=0)
    """Problems of this task; else the source's ``size``."""


class ReasoningGymData(SourceConfig):
    """Procedural problems of `reasoning-gym`, generated when drawn; scored by the task's own scorer."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    tasks: tuple[GymTask, ...] = Field(min_length=1)
    """A task's name, a mapping (`GymTask`), or a list of either."""
    size: int = Field(500, gt=0)
    """Problems per task."""
    seed: int = 0
    """Seed of the generators. Problem i of a task depends on the seed, the config and i alone."""
    instruction: str = ""
    """Added to each question after an empty line, such as ``Reply with the final answer only.``"""
    extract: Literal["whole", "last_number", "first_number", "answer_tag", "last_line"] = "whole"
    """What part of the response the scorer reads."""

    @field_validator("tasks", mode="before")
    @classmethod
    def _as_tasks(cls, value: Any) -> Any:
        listed = value if isinstance(value, list | tuple) else [value]
        return tuple({"name": task} if isinstance(task, str) else task for task in listed)


class CallableData(RowsConfig):
    """A Python function that returns problems or rows: a list, an iterable, or a sequence that makes them
    lazily."""

    type: Literal["callable"] = "callable"
    function: str
    """``package.module:function`` or ``path/to/file.py:function``."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the call."""


class MixData(Config):
    """Several sources, one after the other."""

    type: Literal["mix"] = "mix"
    sources: tuple[DataConfig, ...] = Field(min_length=1)
    """The sources. Problem ids must be unique over all of them."""

    @model_validator(mode="before")
    @classmethod
    def _list(cls, value: Any) -> Any:
        return {"sources": value} if isinstance(value, list) else value


DataConfig = Annotated[
    JsonlData | ParquetData | DatasetsData | ReasoningGymData | CallableData | MixData,
    Field(discriminator="type"),
]
"""Any source of problems or conversations."""

MixData.model_rebuild()
