"""How trajectories are rewarded: which rewards, how they combine, what happens when one fails."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from k3rl.config.base import Config
from k3rl.config.rollout import NativeEngineConfig, without_routing
from k3rl.models.config import ModelConfig
from k3rl.types import Effort

PROBLEM = "problem"
"""The name that stands for a problem's own reward."""


class RewardPart(Config):
    """One reward in the sum."""

    reward: str = PROBLEM
    """``problem`` for the problem's own; or a name, ``package.module:function``, ``file.py:function`` or an
    ``http://`` address of `k3rl rewards serve`."""
    label: str | None = None
    """Name in the breakdown; else the reward's name, of a path or an address its last part. Must be unique."""
    weight: float = 1.0
    """Factor in the sum. 0: measured and stored, not counted."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the reward, over those of the problem."""
    clip: tuple[float, float] | None = None
    """Bounds of the value before its weight."""
    requires: dict[str, float] = Field(default_factory=dict)
    """Gates: label of another part, and the least value at which this part counts: ``{format: 1}``."""

    @property
    def key(self) -> str:
        if self.label:
            return self.label
        _, colon, function = self.reward.rpartition(":")
        if colon and not self.reward.startswith(("http://", "https://")):
            return function
        return self.reward.rstrip("/").rpartition("/")[2] if "/" in self.reward else self.reward


class Replacement(Config):
    """A total put in the place of the sum."""

    when: str
    """Label of the part that decides."""
    below: float
    """It replaces where the part's value is below this."""
    total: float
    """The total then."""


class TauCurriculum(Config):
    """How tau narrows while the run goes on: wide for the max expert, then less for high, then for low (spec/02 §3).

    The published recipe has a person decide each step. The audit trail is ``curriculum.jsonl`` in the run's folder.
    """

    stages: dict[str, tuple[dict[Effort, float], ...]]
    """By domain (``default``: those not named in ``tau`` or here): the steps, each the new tau of some efforts."""
    approval: Literal["person", "auto"] = "person"
    """``person``: a step that is due waits for `k3rl curriculum approve RUN`. ``auto``: it is taken at once."""
    hold_steps: int = Field(20, gt=0)
    """Steps of the run that a tau is kept at least, before the next step is due."""
    min_reward: float | None = None
    """Mean task reward of the domain, over the last ``hold_steps`` steps, that is needed for the next step."""


class ReplaceOverBudget(Config):
    """K3's budget rule: over tau times b0 the task reward is replaced (spec/02 §3)."""

    type: Literal["replace"] = "replace"
    tau: dict[str, dict[Effort, float]] = Field(default_factory=dict)
    """tau by domain and effort; the domain ``default`` holds for those not named. Without an entry: no
    limit."""
    curriculum: TauCurriculum | None = None
    """How tau narrows. None: it stays."""
    penalty: float = -1.0
    """What replaces the task reward."""
    whole_trajectory_domains: tuple[str, ...] = ("agent", "coding")
    """Domains in which all sampled tokens count; in others the thinking tokens do."""

    @model_validator(mode="after")
    def _narrows(self) -> ReplaceOverBudget:
        for domain, table in self.tau.items():
            if any(not value > 0 for value in table.values()):
                raise ValueError(f"tau of '{domain}' must be above 0")
        for domain, stages in self.curriculum.stages.items() if self.curriculum else ():
            now = dict(self.tau.get(domain, {}))
            for number, stage in enumerate(stages, 1):
                for effort, value in stage.items():
                    if effort not in now:
                        raise ValueError(
                            f"stage {number} of '{domain}' moves '{effort}', which has no tau yet"
                        )
                    if not 0 < value <= now[effort]:
                        raise ValueError(
                            f"stage {number} of '{domain}' widens '{effort}' from {now[effort]} to {value}: "
                            "a curriculum narrows"
                        )
                now |= stage
        return self


class Toggle(Config):
    """K2.5's Toggle: in every other phase, a trajectory over its budget gets no reward unless its group is
    still weak (spec/02 §2)."""

    type: Literal["toggle"] = "toggle"
    period: int = Field(10, gt=0)
    """m: steps per phase. Phase 0 (limited) comes first."""
    accuracy: float = Field(0.8, ge=0, le=1)
    """lambda: below this group mean the limit is lifted."""
    factor: float = Field(1.0, gt=0)
    """Multiplies the problem's budget."""
    whole_trajectory_domains: tuple[str, ...] = ("agent", "coding")
    """Domains in which all sampled tokens count; in others the thinking tokens do."""


class LengthReward(Config):
    """K1.5's length reward: shorter than the group's middle is better (spec/02 §2)."""

    type: Literal["length"] = "length"
    weight: float = 1.0
    """Factor, when warmed up."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the factor rises from 0."""
    correct_at: float = 0.5
    """A total of at least this counts as a correct answer."""


BudgetConfig = Annotated[ReplaceOverBudget | Toggle | LengthReward, Field(discriminator="type")]


class RewardSandbox(Config):
    """The sandboxes of rewards that ask for one. They have no network."""

    backend: Literal["local", "agentenv"] = "local"
    """``local``: this machine's own isolation. ``agentenv``: the AgentENV server of the environment's variables."""
    template: str = "base"
    """What a sandbox is created from."""
    memory_mb: int = Field(512, gt=0)
    """Memory of one sandbox."""
    cpus: float = Field(1.0, gt=0)
    """Processors of one sandbox."""


class JudgeModel(Config):
    """A model that judges, on an engine of its own in the run's Ray cluster."""

    model: ModelConfig
    """Who judges: a model whose chat format knows tools."""
    engine: Annotated[NativeEngineConfig, AfterValidator(without_routing)] = NativeEngineConfig()
    """What it runs on."""
    max_context: int | None = Field(None, gt=0)
    """Tokens of a judgement, prompt and answers. None: what the model can."""
    thinking: bool = False
    """Let it think before each step."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: CUDA where there is one."""


class RewardConfig(Config):
    """What the reward service does."""

    parts: tuple[RewardPart, ...] = (RewardPart(),)
    """The rewards that are added up."""
    replacements: tuple[Replacement, ...] = ()
    """Rules that replace the sum; the first that applies wins."""
    clip: tuple[float, float] | None = None
    """Bounds of the total, before any budget rule."""
    budgets: BudgetConfig | None = None
    """What is done about length."""
    modules: tuple[str, ...] = ()
    """Modules or ``.py`` files to import, so that the rewards they register have names."""
    on_error: Literal["zero", "drop_group", "defer_group", "raise"] = "drop_group"
    """A reward that fails after its retries: counts as 0, takes its group out of training, lets its group be scored
    again in the next step, or ends the run."""
    deferrals: int = Field(3, gt=0)
    """With `defer_group`: in how many further steps a group is scored again, before it is dropped."""
    timeout_s: float = Field(10.0, gt=0)
    """Wall-clock limit of one call."""
    memory_mb: int = Field(2048, gt=0)
    """Memory that a reward's process may take beyond what it starts with."""
    sandbox: RewardSandbox = RewardSandbox()
    """Where rewards that ask for a sandbox run what the policy wrote."""
    judges: dict[str, JudgeModel] = Field(default_factory=dict)
    """Models of this run that judge, by name: ``judge: {type: engine, name: NAME}`` in the arguments of `grm`."""
    retries: int = Field(1, ge=0)
    """How often a failed call is repeated, in a new process."""
    workers: int = Field(1, gt=0)
    """Ray actors."""
    processes: int = Field(2, gt=0)
    """Killable processes per worker, started when needed. With one, a call that hangs holds up all others."""
    cache_entries: int = Field(10_000, ge=0)
    """Verdicts kept by content, per worker. 0: none."""
    drain_timeout_s: float = Field(600.0, gt=0)
    """How long a step waits for the last verdicts before it ends the run with the names of what is
    missing."""

    @model_validator(mode="after")
    def _labels(self) -> RewardConfig:
        labels = [part.key for part in self.parts]
        if len(set(labels)) != len(labels):
            raise ValueError(f"two parts have one label among {labels}: give one a 'label'")
        for part in self.parts:
            for label in part.requires:
                if label not in labels or label == part.key:
                    raise ValueError(
                        f"'{part.key}' requires '{label}', which is not another part of {labels}"
                    )
        for part in self.parts:
            judge = part.arguments.get("judge")
            name = judge.get("name") if isinstance(judge, dict) and judge.get("type") == "engine" else None
            if name is not None and name not in self.judges:
                raise ValueError(
                    f"'{part.key}' wants the judge '{name}', which is not in judges: {list(self.judges)}"
                )
        for rule in self.replacements:
            if rule.when not in labels:
                raise ValueError(f"a replacement looks at '{rule.when}', which is not a part of {labels}")
        return self
