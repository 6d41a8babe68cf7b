"""How trajectories are generated: how many, by which engine, when a step is over, what limits one of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from k3rl.config.base import Config
from k3rl.types import Effort


class SamplingConfig(Config):
    """The distribution that tokens are drawn from."""

    temperature: float = Field(1.0, ge=0)
    """Divides the logits. The objective scores trajectories at the same temperature. 0: greedy, for
    evaluation."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the likeliest tokens up to this mass. Below 1 the engine's log-probs are those of a truncated
    distribution, which no objective here reproduces: training jobs refuse it, evaluations may use it."""
    top_k: int = Field(0, ge=0)
    """Keep so many tokens, 0: all. Refused for training, like ``top_p``."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Keep tokens at least this fraction as likely as the likeliest. Refused for training, like ``top_p``."""
    stop_strings: tuple[str, ...] = ()
    """A turn also ends after the token that completes one of these."""

    @property
    def truncates(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def why_not_trainable(self) -> str:
        """Empty where an objective can score what is sampled; else the reason, naming the keys."""
        if self.truncates:
            cut = [
                k
                for k in ("top_p", "top_k", "min_p")
                if getattr(self, k) != type(self).model_fields[k].default
            ]
            return (
                f"sampling.{', sampling.'.join(cut)}: the trainer cannot reproduce a truncated distribution; "
                "use them for evaluation only"
            )
        if self.temperature == 0:
            return "sampling.temperature: greedy responses have no log-probs to train on; use 1"
        return ""


class NativeEngineConfig(Config):
    """This project's engine: K3 and Hugging Face models, CPU and GPU."""

    type: Literal["native"] = "native"
    max_slots: int = Field(64, ge=1)
    """Sequences that run at once in one worker."""
    max_batch_tokens: int = Field(2048, ge=1)
    """Tokens computed in one engine step, decode and prefill together."""
    kv_budget_tokens: int | None = Field(None, ge=1)
    """Tokens that all slots together can hold. None: every slot can fill the whole context."""
    prefix_cache_bytes: int = Field(0, ge=0)
    """Memory for prefixes shared between requests and turns. 0: no prefix cache."""
    deterministic: bool = False
    """Results independent of batching to the last bit. Slow."""
    expert_weights: Literal["unpacked", "packed"] = "unpacked"
    """Of a model with `qat` on its experts, which are published in MXFP4. ``packed`` holds the 4-bit codes alone, a
    quarter of bfloat16's memory, at about twice the decode speed of experts on an H200, and slower on a CPU."""
    record_routing: bool = False
    """Training jobs, models with experts: note which experts each token took, for the trainer to take the same ones
    (`trainer.replay_routing`) or to count how often it takes others. Two bytes for each token, expert layer and expert;
    on a GPU, decode steps are then no CUDA graphs."""

    @model_validator(mode="after")
    def _records_all(self) -> NativeEngineConfig:
        other = (
            "deterministic" if self.deterministic else "prefix_cache_bytes" if self.prefix_cache_bytes else ""
        )
        if self.record_routing and other:
            raise ValueError(
                f"record_routing and {other} exclude each other: "
                + (
                    "the deterministic forward notes no experts"
                    if self.deterministic
                    else "tokens from the prefix cache are not read again, so nobody knows their experts"
                )
            )
        return self


class VllmEngineConfig(Config):
    """vLLM, 0.24 to 0.33."""

    type: Literal["vllm"] = "vllm"
    max_slots: int = Field(256, ge=1)
    """Sequences that run at once in one worker (``max_num_seqs``)."""
    max_batch_tokens: int | None = Field(None, ge=1)
    """Tokens computed in one engine step. None: vLLM's own choice."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs that share one copy of the model."""
    gpu_memory_fraction: float = Field(0.85, gt=0, le=1)
    """Share of the GPU's memory that vLLM may take."""
    enforce_eager: bool = False
    """No CUDA graphs and no compilation: starts faster, runs slower."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Any other argument of vLLM's engine, by its own name."""

    @model_validator(mode="before")
    @classmethod
    def _records_nothing(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("record_routing"):
            raise ValueError(
                "record_routing needs type: native; vLLM does not say which experts a token took"
            )
        return data


EngineConfig = Annotated[NativeEngineConfig | VllmEngineConfig, Field(discriminator="type")]


_Engine = TypeVar("_Engine", NativeEngineConfig, VllmEngineConfig)


def without_routing(engine: _Engine) -> _Engine:
    """`ValueError` where an engine that nobody trains on records routing."""
    if isinstance(engine, NativeEngineConfig) and engine.record_routing:
        raise ValueError(
            "record_routing is for jobs that train on what this engine samples; nobody reads it here"
        )
    return engine


UntrainedEngineConfig = Annotated[EngineConfig, AfterValidator(without_routing)]
"""Of jobs that only sample."""


class RepetitionConfig(Config):
    """Ends a response that is caught in a loop: its last ``window_tokens`` tokens repeat one block."""

    window_tokens: int = Field(256, ge=8)
    """Length of the repeated stretch."""
    min_repeats: int = Field(4, ge=2)
    """The block occurs at least so often within the window."""
    every_tokens: int = Field(64, ge=1)
    """Looked for each time a turn's length is a multiple of this."""

    @model_validator(mode="after")
    def _fits(self) -> RepetitionConfig:
        if self.min_repeats * 2 > self.window_tokens:
            raise ValueError(
                f"min_repeats {self.min_repeats} needs a window_tokens of at least {2 * self.min_repeats}"
            )
        return self


class SandboxConfig(Config):
    """Where environments run what the policy wrote: one sandbox for each trajectory that uses tools."""

    backend: Literal["local", "agentenv"] = "local"
    """``local``: this machine's own isolation. ``agentenv``: the AgentENV server of the environment's variables."""
    template: str = "base"
    """What a sandbox is created from."""
    root: str | None = None
    """Folder of local sandboxes and their snapshots. None: ``sandboxes`` in the run's folder."""
    unsafe: bool = False
    """Local, where the machine cannot isolate: run the policy's code regardless, with this user's rights."""
    quota: int | None = Field(None, ge=1)
    """Sandboxes of trajectories that one worker holds, resting ones included; a trajectory that finds none free waits
    in its tool call. None: as many as trajectories can be in flight."""
    warm: int = Field(0, ge=0)
    """Sandboxes that a worker keeps ready, paused, for trajectories to come."""
    rest_s: float = Field(0.0, ge=0)
    """A sandbox is paused when no call used it for so long. 0: as soon as the policy generates."""
    ttl_s: float = Field(600.0, ge=20)
    """A sandbox that nobody extends lives for so long; awake ones are extended in time."""
    network: bool = False
    """Let code reach the network."""
    memory_mb: int = Field(512, gt=0)
    """Memory of one sandbox."""
    disk_mb: int = Field(256, gt=0)
    """Its home folder; ``/tmp`` has as much again."""
    cpus: float = Field(1.0, gt=0)
    """Its processors."""
    processes: int = Field(128, gt=0)
    """Its processes and threads."""

    @model_validator(mode="after")
    def _warm_ones_fit(self) -> SandboxConfig:
        if self.quota is not None and self.warm > self.quota:
            raise ValueError(f"warm {self.warm} exceeds quota {self.quota}")
        if self.unsafe and self.backend != "local":
            raise ValueError("unsafe concerns local sandboxes only")
        return self


class AgentConfig(Config):
    """Multi-turn trajectories: what an environment's tools may do and how long it may take."""

    environment: str | None = None
    """Environment of problems that do not name their own in ``metadata.environment``: a registered name or
    ``package.module:factory``. None: one turn, no tools."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment."""
    max_turns: int = Field(16, ge=1)
    """Turns of the policy in one trajectory."""
    tool_timeout_s: float = Field(60.0, gt=0)
    """Time limit of one call of a sandbox's tool; the policy is told when it passes."""
    step_timeout_s: float = Field(300.0, gt=0)
    """Time limit of an environment's reset, step, pause or resume. When it passes the trajectory fails."""
    max_observation_tokens: int | None = Field(None, ge=1)
    """A longer observation is cut in the middle. None: only the context limits it."""
    stop_tools: tuple[str, ...] = ()
    """Calling one of these ends the trajectory; the call is not run."""
    malformed_calls: Literal["answer", "stop"] = "answer"
    """A call that cannot be read is answered with the reason, or ends the trajectory."""
    max_malformed_turns: int = Field(4, ge=1)
    """So many turns in a row with nothing but malformed calls end the trajectory."""
    sandbox: SandboxConfig = SandboxConfig()
    """Sandboxes of environments that use them."""


class RolloutConfig(Config):
    """Partial rollout (spec/02 §3): N groups of K run, a step ends when λ·N·K are complete, the rest resume
    first."""

    model_config = ConfigDict(populate_by_name=True)

    groups: int = Field(ge=1)
    """N: problems whose trajectories are kept in flight."""
    samples: int = Field(ge=1)
    """K: trajectories of one problem."""
    lambda_: float = Field(0.75, gt=0, le=1, alias="lambda")
    """λ: a step is over when ⌈λ·N·K⌉ trajectories were completed in it. 1: wait for the slowest."""
    min_groups: int = Field(1, ge=0)
    """And when so many whole groups were completed in it."""
    mode: Literal["partial", "one_step_off", "in_flight"] = "partial"
    """``partial`` (K3's): generation rests while the policy is trained. ``one_step_off``: the next step's
    generation runs during training and rests only for the new weights. ``in_flight``: it never rests; weights
    change under running trajectories."""
    resume: Literal["recompute", "keep_cache"] = "recompute"
    """A resumed trajectory's cache is computed again with the new weights, or kept from the old ones."""
    max_staleness: int | None = Field(None, ge=0)
    """Largest age, in optimiser steps, of a token that is trained on. None: no limit, as far as K3's report
    says."""
    on_stale: Literal["drop", "restart", "keep"] = "drop"
    """A trajectory with an older token fails with stop reason ``stale``, starts again from its prompt, or
    goes on."""
    engine: EngineConfig = Field(default_factory=NativeEngineConfig)
    """Which engine generates."""
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    """How tokens are drawn."""
    max_context: int | None = Field(None, ge=2)
    """Tokens of prompt and response together. None: the model's own limit."""
    max_tokens: int = Field(1024, ge=1)
    """Tokens that the policy may sample in one trajectory, over all its turns and steps."""
    max_tokens_by_effort: dict[Effort, int] = Field(default_factory=dict)
    """Other limits than ``max_tokens`` for some efforts."""
    max_turn_tokens: int | None = Field(None, ge=1)
    """Tokens that the policy may sample in one turn."""
    thinking: bool = True
    """The generation prompt opens the thinking channel. In a job, the job's `thinking` holds."""
    repetition: RepetitionConfig | None = None
    """Loops end early. None: they run into ``max_tokens``."""
    agent: AgentConfig = Field(default_factory=AgentConfig)
    """Tools and environments."""
    workers: int = Field(1, ge=1)
    """Rollout workers, one engine each."""
    max_in_flight: int | None = Field(None, ge=1)
    """Trajectories that one worker holds. None: a quarter more than the engine's slots, so that none stands
    empty. The others wait with the controller, longest first."""
    longest_first: bool = True
    """Order what waits by predicted length, from finished siblings and earlier draws of the problem. False:
    as
    drawn."""
    work_stealing: bool = True
    """A worker with nothing left takes running trajectories from the busiest."""
    slice_s: float = Field(0.1, gt=0)
    """A worker reports its new tokens this often. A worker that dies costs at most two slices, generated
    again."""
    call_timeout_s: float = Field(120.0, gt=0)
    """A worker that does not answer within this is killed and replaced."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Time limit for a worker's start: process, model, weights."""
    stall_timeout_s: float = Field(1800.0, gt=0)
    """The run stops with an error if nothing at all happens for so long."""
    max_retries: int = Field(3, ge=1)
    """A trajectory fails when its worker died so often without one new token of it."""
    max_worker_faults: int = Field(100, ge=1)
    """The run stops with an error when so many workers died in a row and nothing finished between."""
    progress_s: float = Field(1.0, gt=0)
    """Progress is reported this often."""

    @model_validator(mode="after")
    def _consistent(self) -> RolloutConfig:
        if self.min_groups > self.groups:
            raise ValueError(f"min_groups {self.min_groups} exceeds groups {self.groups}")
        if self.max_turn_tokens is not None and self.max_turn_tokens > self.max_tokens:
            raise ValueError(f"max_turn_tokens {self.max_turn_tokens} exceeds max_tokens {self.max_tokens}")
        for effort, limit in self.max_tokens_by_effort.items():
            if limit < 1:
                raise ValueError(f"max_tokens_by_effort.{effort} must be positive, it is {limit}")
        if self.mode == "in_flight" and self.resume != "keep_cache":
            raise ValueError(
                "mode in_flight needs resume: keep_cache, since running caches outlive the weights"
            )
        if self.engine.type == "native" and self.engine.deterministic and self.resume == "keep_cache":
            raise ValueError(
                "engine.deterministic needs resume: recompute: kept caches were made by older weights"
            )
        if self.on_stale != "drop" and self.max_staleness is None:
            raise ValueError(f"on_stale: {self.on_stale} has no effect without max_staleness")
        return self

    def token_limit(self, effort: Effort | None) -> int:
        """Tokens that the policy may sample in a trajectory of this effort."""
        return self.max_tokens if effort is None else self.max_tokens_by_effort.get(effort, self.max_tokens)

    def in_flight_per_worker(self) -> int:
        return self.max_in_flight or self.engine.max_slots + -(-self.engine.max_slots // 4)
