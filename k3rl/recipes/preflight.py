"""Everything that can be wrong with a job and can be known before Ray starts: each is one `UserError`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from distill.routing import Routing
from k3rl.chat import Renderer
from k3rl.config.base import Config
from k3rl.config.distill import RolloutsData, TeacherConfig
from k3rl.config.jobs import (
    BudgetsJob,
    CollectJob,
    DistillJob,
    EvaluateJob,
    ExportJob,
    Job,
    JobBase,
    MergeJob,
    PipelineJob,
    RlJob,
    SftJob,
)
from k3rl.config.rewards import RewardConfig
from k3rl.config.rollout import AgentConfig, EngineConfig, NativeEngineConfig
from k3rl.config.trainer import TrainerConfig
from k3rl.data import ProblemSource, load_conversations, load_problems
from k3rl.data.config import DataConfig, JsonlData, SourceConfig
from k3rl.errors import UserError
from k3rl.models import ModelConfig
from k3rl.models.config import PRESETS, parse_k3_config, preset, read_json
from k3rl.models.loading import check_fits, model_folder
from k3rl.recipes.launch import device_of, renderer_of
from k3rl.types import Effort
from rewards.worker import check_rewards
from rollout.environment import HoldsSandbox, make_environment
from rollout.environments.sandboxes import Sandboxes, check_sandboxes

AnyJob = TypeVar("AnyJob", bound=JobBase)
Part = TypeVar("Part", bound=Config)
LOOKED_AT = 1000
"""Problems whose rewards are looked up; the others are found out about when they are drawn."""
WHOLE_VOCABULARY = 8192
"""Ids up to which teachers send whole distributions."""
TRAINING_BYTES = 16
"""Per parameter: float32 weight, gradient and two moments. Activations come on top."""


def check_job(job: Job) -> None:
    """Opens data, tokenizers, rewards and the headers of checkpoints. Raises `UserError`."""
    if isinstance(job, PipelineJob):
        _check_pipeline(job)
    else:
        _have_weights(job)
        _check_single(job)


def _check_pipeline(job: PipelineJob) -> None:
    trained: dict[str, ModelConfig] = {}  # by job: a model of the shape that its result has
    problems: dict[str, DataConfig] = {}  # by job: the problems that it writes again
    for name, part in job.jobs.items():
        stand_in = with_models(part, lambda model: trained.get(model.path.removeprefix("@"), model))
        stand_in = with_parts(stand_in, JsonlData, lambda data: _source_of(data, problems))
        try:
            _have_weights(part)
            _check_single(stand_in)
        except UserError as error:
            raise UserError(f"job '{name}': {error}") from error
        match stand_in:
            case SftJob() | RlJob() | ExportJob():
                trained[name] = stand_in.model
            case MergeJob():
                trained[name] = stand_in.models[0]
            case BudgetsJob():
                problems[name] = stand_in.evaluation.data


def _source_of(data: JsonlData, problems: Mapping[str, DataConfig]) -> DataConfig:
    """The data that an earlier job writes again to ``data``, with this one's efforts."""
    if data.path.removeprefix("@") not in problems:
        return data
    found = problems[data.path.removeprefix("@")]
    return with_parts(found, SourceConfig, lambda s: s.model_copy(update={"efforts": data.efforts}))


def with_models(job: AnyJob, change: Callable[[ModelConfig], ModelConfig]) -> AnyJob:
    """The job with every model of it replaced by ``change(model)``; a pipeline stays as it is."""
    return job if isinstance(job, PipelineJob) else with_parts(job, ModelConfig, change)


def with_parts(value: Any, kind: type[Part], change: Callable[[Part], Any]) -> Any:
    """The same config, with every part of this kind, at any depth, replaced by ``change(part)``."""
    match value:
        case kind():
            return change(value)
        case Config():
            fields = {name: getattr(value, name) for name in type(value).model_fields}
            new = {name: with_parts(old, kind, change) for name, old in fields.items()}
            changed = {name: part for name, part in new.items() if part is not fields[name]}
            return value.model_copy(update=changed) if changed else value
        case dict():
            return {name: with_parts(part, kind, change) for name, part in value.items()}
        case tuple():
            return tuple(with_parts(part, kind, change) for part in value)
    return value


def _check_single(job: JobBase) -> None:
    device = device_of(job)
    if Path(job.runs).exists() and not Path(job.runs).is_dir():
        raise UserError(f"runs: {job.runs} is a file, and a folder is needed")
    match job:
        case SftJob():
            _check_model(job.model, device, training=True)
            _check_parallel(job.model, job.trainer)
            _first_fits(job, renderer_of(job.model))
        case RlJob():
            _check_model(job.model, device, training=True)
            _check_parallel(job.model, job.trainer)
            _check_recording(job.model, job.rollout.engine)
            if reason := job.rollout.sampling.why_not_trainable():
                raise UserError(f"rollout.{reason}")
            problems = _check_problems(
                job.data, renderer_of(job.model), job.thinking, job.rollout.max_context
            )
            _check_environment(job.rollout.agent, problems)
            _check_rewards(job.rewards, problems)
            if isinstance(job, DistillJob):
                _check_teachers(job, problems, device)
        case EvaluateJob():
            teachers = [t.model for some in job.ensembles.values() for t in some]
            for model in [*job.models.values(), *teachers]:
                _check_model(model, device, training=False)
                problems = _check_problems(
                    job.evaluation.data, renderer_of(model), job.thinking, job.evaluation.max_context
                )
            _check_environment(job.evaluation.agent, problems)
            _check_rewards(job.rewards, problems)
            for some in job.ensembles.values():
                _check_routing(some, problems, job.evaluation.efforts)
        case CollectJob():
            _same_tokenizers(job.teachers, job.teachers[0].model)
            for teacher in job.teachers:
                _check_model(teacher.model, device, training=False)
            problems = _check_problems(
                job.evaluation.data,
                renderer_of(job.teachers[0].model),
                job.thinking,
                job.evaluation.max_context,
            )
            _check_environment(job.evaluation.agent, problems)
            _check_rewards(job.rewards, problems)
            _check_routing(job.teachers, problems, job.evaluation.efforts)
        case MergeJob():
            for model in [*job.models, *([job.base] if job.base else [])]:
                check_fits(model, "cpu")
        case ExportJob():
            check_fits(job.model, "cpu")


def _have_weights(job: JobBase) -> None:
    match job:
        case EvaluateJob():
            models = [*job.models.values(), *(t.model for some in job.ensembles.values() for t in some)]
        case DistillJob() | CollectJob():
            models = [teacher.model for teacher in job.teachers if teacher.remote is None]
        case MergeJob():
            models = [*job.models, *([job.base] if job.base else [])]
        case ExportJob():
            models = [job.model]
        case _:
            models = []
    for model in models:
        if model.path in PRESETS:
            raise UserError(f"model.path: '{model.path}' is a preset without weights: name a checkpoint")


def _check_model(model: ModelConfig, device: str, training: bool) -> None:
    vocabulary = check_fits(model, device, bytes_per_parameter=TRAINING_BYTES if training else 0)
    renderer = renderer_of(model)
    if renderer.vocab_size > vocabulary:
        raise UserError(
            f"model.path: '{model.path}' has {vocabulary} token ids and its tokenizer {renderer.vocab_size}: "
            "they belong to different models"
        )


def _check_parallel(model: ModelConfig, trainer: TrainerConfig) -> None:
    if trainer.parallel.context > 1 and not _is_k3(model):
        raise UserError(
            f"trainer.parallel.context: '{model.path}' cannot share a sequence between ranks, only K3 models can"
        )


def _check_recording(model: ModelConfig, engine: EngineConfig) -> None:
    if isinstance(engine, NativeEngineConfig) and engine.record_routing and not _expert_layers(model):
        raise UserError(
            f"rollout.engine.record_routing: '{model.path}' has no experts whose choice the native engine can note; "
            "only K3 models with expert layers have"
        )


def _expert_layers(model: ModelConfig) -> int:
    if not _is_k3(model):
        return 0
    if model.path in PRESETS:
        return len(preset(model.path, **model.overrides).moe_layers)
    file = model_folder(model.path) / "config.json"
    return len(parse_k3_config(read_json(file), str(file)).moe_layers)


def _is_k3(model: ModelConfig) -> bool:
    raw = {} if model.path in PRESETS else read_json(model_folder(model.path) / "config.json")
    return model.path in PRESETS or "attn_res_block_size" in raw.get("text_config", raw)


def _check_problems(
    data: DataConfig, renderer: Renderer, thinking: bool, max_context: int | None
) -> ProblemSource:
    problems = load_problems(data)
    if len(problems) == 0:
        raise UserError("data: there are no problems in it")
    first = problems[0]
    prompt = renderer.encode_prompt(first.messages, first.tools, first.effort, thinking=thinking)
    if max_context is not None and len(prompt) >= max_context:
        raise UserError(
            f"max_context: the prompt of problem '{first.id}' has {len(prompt)} tokens, the limit is {max_context}"
        )
    return problems


def _check_environment(agent: AgentConfig, problems: ProblemSource) -> None:
    """The first problem's environment can be made, and its sandboxes."""
    sandboxes = Sandboxes(agent.sandbox, folder=Path("unused"), owner="check")  # opened by nobody
    try:
        environment = make_environment(problems[0], agent, sandboxes)
    except TypeError as error:
        raise UserError(f"agent.arguments: problem '{problems[0].id}': {error}") from error
    if isinstance(environment, HoldsSandbox):
        check_sandboxes(agent.sandbox)


def _check_teachers(job: DistillJob, problems: ProblemSource, device: str) -> None:
    if job.rollout.sampling.temperature != 1:
        raise UserError(
            "rollout.sampling.temperature: teachers score at temperature 1, so distillation samples at 1"
        )
    for teacher in job.teachers:
        if teacher.remote is None:
            check_fits(teacher.model, device)
    _same_tokenizers(job.teachers, job.model)
    _check_routing(job.teachers, problems, ())
    if job.divergence is not None and job.divergence.top_k == 0:
        if remote := [t for t in job.teachers if t.remote is not None]:
            raise UserError(
                f"divergence.top_k: a server gives its likeliest tokens only, so 0 (all) cannot be had from teacher "
                f"'{remote[0].name or remote[0].model.path}'"
            )
        if (size := renderer_of(job.model).vocab_size) > WHOLE_VOCABULARY:
            raise UserError(
                f"divergence.top_k: 0 sends all {size} log-probs of every token; above {WHOLE_VOCABULARY} ids, say how "
                "many"
            )


def _same_tokenizers(teachers: Sequence[TeacherConfig], student: ModelConfig) -> None:
    wanted = renderer_of(student)
    for number, teacher in enumerate(teachers):
        found = renderer_of(teacher.model)
        if found.fingerprint() != wanted.fingerprint():
            raise UserError(
                f"teachers.{number}: '{teacher.model.path}' has another vocabulary or template than "
                f"'{student.path}'{difference(found, wanted)}"
            )


def difference(teacher: Renderer, student: Renderer) -> str:
    """The first token id with another text, in words; empty where all are alike (the templates then differ)."""
    if teacher.vocab_size != student.vocab_size:
        return f": {teacher.vocab_size} token ids against {student.vocab_size}"
    for token in range(student.vocab_size):
        ours, theirs = student.decode([token]), teacher.decode([token])
        if ours != theirs:
            return f": token {token} is {theirs!r} there and {ours!r} here"
    return ""


def _check_routing(
    teachers: Sequence[TeacherConfig], problems: ProblemSource, efforts: Sequence[Effort]
) -> None:
    routing = Routing(teachers)
    for i in range(min(len(problems), LOOKED_AT)):
        own = [e for e, share in problems.efforts(i).items() if share > 0] or [problems[i].effort]
        routing.check(replace(problems[i], effort=effort) for effort in efforts or own)


def _first_fits(job: SftJob, renderer: Renderer) -> None:
    from k3rl.recipes.sft import encode

    if isinstance(job.data, RolloutsData):
        return  # an earlier job makes them
    conversations = load_conversations(job.data)
    if len(conversations) == 0:
        raise UserError("data: there are no conversations in it")
    if not any(encode(renderer, conversations[0], job.thinking).loss_mask):
        raise UserError(f"data: the assistant says nothing in conversation '{conversations[0].id}'")


def _check_rewards(config: RewardConfig, problems: ProblemSource) -> None:
    check_rewards(config, islice((problems[i] for i in range(len(problems))), LOOKED_AT))
