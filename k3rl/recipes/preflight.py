"""Everything that can be wrong with a job and can be known before Ray starts: each is one `UserError`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

from distill.routing import Routing
from k3rl.chat import Renderer
from k3rl.config.jobs import DistillJob, EvaluateJob, Job, JobBase, PipelineJob, RlJob, SftJob, models_of
from k3rl.config.rewards import RewardConfig
from k3rl.data import ProblemSource, load_conversations, load_problems
from k3rl.data.config import DataConfig
from k3rl.errors import UserError
from k3rl.models import ModelConfig
from k3rl.models.config import PRESETS
from k3rl.models.loading import check_fits
from k3rl.recipes.launch import device_of, renderer_of
from rewards.worker import check_rewards

AnyJob = TypeVar("AnyJob", bound=JobBase)
LOOKED_AT = 1000
"""Problems whose rewards are looked up; the others are found out about when they are drawn."""
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
    trained: dict[
        str, ModelConfig
    ] = {}  # by job: the model it starts from, which its result has the shape of
    for name, part in job.jobs.items():
        stand_in = with_models(part, lambda model: trained.get(model.path.removeprefix("@"), model))
        try:
            _have_weights(part)
            _check_single(stand_in)
        except UserError as error:
            raise UserError(f"job '{name}': {error}") from error
        if isinstance(stand_in, SftJob | RlJob):
            trained[name] = stand_in.model


def with_models(job: AnyJob, change: Callable[[ModelConfig], ModelConfig]) -> AnyJob:
    """The job with every model of it replaced by ``change(model)``."""
    match job:
        case EvaluateJob():
            return job.model_copy(update={"models": {n: change(m) for n, m in job.models.items()}})
        case DistillJob():
            teachers = tuple(t.model_copy(update={"model": change(t.model)}) for t in job.teachers)
            return job.model_copy(update={"model": change(job.model), "teachers": teachers})
        case SftJob() | RlJob():
            return job.model_copy(update={"model": change(job.model)})
    return job


def _check_single(job: JobBase) -> None:
    device = device_of(job)
    if Path(job.runs).exists() and not Path(job.runs).is_dir():
        raise UserError(f"runs: {job.runs} is a file, and a folder is needed")
    match job:
        case SftJob():
            _check_model(job.model, device, training=True)
            _first_fits(job, renderer_of(job.model))
        case RlJob():
            _check_model(job.model, device, training=True)
            if reason := job.rollout.sampling.why_not_trainable():
                raise UserError(f"rollout.{reason}")
            problems = _check_problems(
                job.data, renderer_of(job.model), job.thinking, job.rollout.max_context
            )
            _check_rewards(job.rewards, problems)
            if isinstance(job, DistillJob):
                _check_teachers(job, problems, device)
        case EvaluateJob():
            for model in job.models.values():
                _check_model(model, device, training=False)
                problems = _check_problems(
                    job.evaluation.data, renderer_of(model), job.thinking, job.evaluation.max_context
                )
            _check_rewards(job.rewards, problems)


def _have_weights(job: JobBase) -> None:
    match job:
        case EvaluateJob():
            models = models_of(job)
        case DistillJob():
            models = [teacher.model for teacher in job.teachers]
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


def _check_teachers(job: DistillJob, problems: ProblemSource, device: str) -> None:
    if job.rollout.sampling.temperature != 1:
        raise UserError(
            "rollout.sampling.temperature: teachers score at temperature 1, so distillation samples at 1"
        )
    student = renderer_of(job.model).fingerprint()
    for number, teacher in enumerate(job.teachers):
        check_fits(teacher.model, device)
        if renderer_of(teacher.model).fingerprint() != student:
            raise UserError(
                f"teachers.{number}: '{teacher.model.path}' has another vocabulary or template than the student"
            )
    routing = Routing(job.teachers)
    for i in range(min(len(problems), LOOKED_AT)):
        efforts = [e for e, share in problems.efforts(i).items() if share > 0] or [problems[i].effort]
        routing.check(replace(problems[i], effort=effort) for effort in efforts)


def _first_fits(job: SftJob, renderer: Renderer) -> None:
    from k3rl.recipes.sft import encode

    conversations = load_conversations(job.data)
    if len(conversations) == 0:
        raise UserError("data: there are no conversations in it")
    if not any(encode(renderer, conversations[0], job.thinking).loss_mask):
        raise UserError(f"data: the assistant says nothing in conversation '{conversations[0].id}'")


def _check_rewards(config: RewardConfig, problems: ProblemSource) -> None:
    check_rewards(config, islice((problems[i] for i in range(len(problems))), LOOKED_AT))
