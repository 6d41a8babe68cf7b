"""What every recipe starts: a Ray cluster, a trainer, rollout workers; and what it checks before any of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3rl.chat import Renderer, load_renderer
from k3rl.chat.loading import PRESETS as TOKENIZERS
from k3rl.config.jobs import EvaluateJob, JobBase, RayConfig, RlJob
from k3rl.config.rewards import RewardConfig
from k3rl.config.rollout import RolloutConfig
from k3rl.config.trainer import TrainerConfig
from k3rl.errors import UserError
from k3rl.models import ModelConfig
from k3rl.quant.packed import packs_experts
from k3rl.recipes.engines import make_engine, tokenizer_of
from k3rl.recipes.judges import judges_running
from k3rl.tracking.progress import Progress
from k3rl.trainer.group import TrainerGroup
from k3rl.weights import Handshake, Publication, verify
from rewards.service import RewardService
from rollout.environments.sandboxes import Sandboxes
from rollout.pool import RolloutPool
from rollout.worker import RolloutWorker

COLOCATED_GPU_SHARE = 0.45
"""A trainer's rank and a rollout worker share a GPU and take turns; the rest is for teachers."""


def device_of(job: JobBase) -> str:
    """``cpu`` or ``cuda``. Raises `UserError` where CUDA is asked for and absent."""
    import torch

    available = torch.cuda.is_available()
    if job.device == "cuda" and not available:
        raise UserError("device: 'cuda' was asked for and torch finds no CUDA device; see `k3rl doctor`")
    return "cuda" if available and job.device != "cpu" else "cpu"


@contextmanager
def ray_cluster(config: RayConfig) -> Iterator[None]:
    """A cluster of this process alone, or the one at ``address``; a cluster that is already joined is left as it is.

    Ray's servers listen on all interfaces; what keeps strangers out is its token, which this leaves on.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if config.address:
        options["address"] = config.address
    else:
        # Actors of one node take turns on its cores, so more are offered than there are.
        options |= {
            "address": "local",  # else Ray joins whatever cluster was started on this machine
            "num_cpus": max(config.num_cpus or os.cpu_count() or 1, 4),
            "include_dashboard": False,
        }
    ray.init(**options)
    token = Path.home() / ".ray" / "auth_token"
    if token.exists():
        token.chmod(0o600)  # Ray writes it readable to everyone
    try:
        yield
    finally:
        ray.shutdown()


def renderer_of(model: ModelConfig) -> Renderer:
    """Raises `UserError` where the model has no usable tokenizer."""
    return load_renderer(tokenizer_of(model))


def worker_factory(
    model: ModelConfig,
    config: RolloutConfig,
    *,
    seed: int,
    device: str,
    sandboxes: Path,
    threads: int = 1,
) -> Callable[[int], RolloutWorker]:
    """Builds rollout worker i in its own process. ``sandboxes`` is the run's folder for those of environments."""
    tokenizer = tokenizer_of(model)

    def make(index: int) -> RolloutWorker:
        import torch

        torch.set_num_threads(threads)
        renderer = load_renderer(tokenizer)
        engine, context = make_engine(model, config, renderer, seed, device)
        return RolloutWorker(
            config,
            engine,
            renderer,
            context,
            name=f"rollout-{index}",
            handshake=handshake_of(renderer, config, model),
            device=device,
            sandboxes=Sandboxes(
                config.agent.sandbox,
                folder=sandboxes,
                owner=f"rollout-{index}",
                places=config.groups * config.samples,
                tool_timeout_s=config.agent.tool_timeout_s,
            ),
        )

    return make


def handshake_of(renderer: Renderer, config: RolloutConfig, model: ModelConfig) -> Handshake:
    """What trainer and engines must mean alike."""
    sampling = config.sampling
    return Handshake(
        quantisation=str(model.qat) if model.qat else "none",
        sampling=f"processed; temperature={sampling.temperature}; top_p={sampling.top_p}; "
        f"top_k={sampling.top_k}; min_p={sampling.min_p}",
        tokenizer=renderer.fingerprint(),
    )


@contextmanager
def trainer_resources(
    model: ModelConfig,
    config: TrainerConfig,
    device: str,
    seed: int,
    rollout: RolloutConfig | None = None,
    renderer: Renderer | None = None,
) -> Iterator[TrainerGroup]:
    """The trainer's ranks. ``rollout``: whose sampling the objective scores, and whose handshake weights carry."""
    temperature = rollout.sampling.temperature if rollout else 1.0
    trainer = TrainerGroup(
        model,
        config,
        seed=seed,
        temperature=temperature,
        handshake=handshake_of(renderer, rollout, model) if rollout and renderer else None,
        packed=rollout is not None and rollout.engine.type == "native" and packs_experts(model.qat),
        transport="cuda_ipc" if device == "cuda" else "shm",
        num_gpus=COLOCATED_GPU_SHARE if device == "cuda" else 0.0,
        device=device,
    )
    try:
        yield trainer
    finally:
        trainer.close()


@contextmanager
def rollout_running(
    job: RlJob | EvaluateJob, config: RolloutConfig, model: ModelConfig, device: str
) -> Iterator[RolloutPool]:
    """The rollout workers of a job."""
    options: dict[str, Any] = {"num_cpus": 1}
    if device == "cuda":
        options["num_gpus"] = COLOCATED_GPU_SHARE
    pool = RolloutPool(
        config,
        worker_factory(
            model, config, seed=job.seed, device=device, sandboxes=Path(job.runs) / job.name / "sandboxes"
        ),
        run_seed=job.seed,
        actor_options=options,
    )
    try:
        yield pool
    except BaseException:
        pool.close()  # the run can go on from its last checkpoint
        raise
    pool.close(over=True)


@contextmanager
def rewards_running(config: RewardConfig, model: ModelConfig, thinking: bool) -> Iterator[RewardService]:
    """The reward workers of a job, and the models that judge for them."""
    with judges_running(config) as environment:
        service = RewardService(config, tokenizer_of(model), thinking, environment)
        try:
            yield service
        finally:
            service.close()


class Turns:
    """Trainer and engines on one device: who has its memory, and how much of it each phase takes.

    With ``colocation: share`` both stay where they are. With ``turns`` the engines drop weights and caches while the
    trainer works (the publication brings the weights back), and the trainer's state waits on the host while they do.
    Trajectories that are paused are recomputed from their tokens.
    """

    def __init__(self, job: RlJob, trainer: TrainerGroup, pool: RolloutPool, progress: Progress) -> None:
        self._apart = job.colocation == "turns"
        self._trainer, self._pool, self._progress = trainer, pool, progress
        self._metrics: dict[str, float] = {}

    def to_engines(self) -> None:
        """Before rollout: weights are published, and the trainer has nothing more to give."""
        self._note("publish")
        if self._apart:
            with self._progress.phase("sleep"):
                self._trainer.sleep()

    def to_trainer(self) -> None:
        """Before the update."""
        self._note("rollout")
        if self._apart:
            with self._progress.phase("sleep"):
                self._pool.sleep(level=2)
            with self._progress.phase("wake"):
                self._trainer.wake()

    def to_both(self) -> None:
        """Before weights are published: the optimiser makes room for the engines."""
        self._note("train")
        if self._apart:
            with self._progress.phase("sleep"):
                self._trainer.sleep(keep_weights=True)
            with self._progress.phase("wake"):
                self._pool.wake()

    def _note(self, phase: str) -> None:
        """A process keeps the most that it used until it sleeps, so what is held at a phase's end is its peak."""
        if held := self._trainer.device_bytes():
            self._metrics[f"memory/{phase}_gib"] = held / 2**30

    def metrics(self) -> dict[str, float]:
        return dict(self._metrics)


@dataclass(frozen=True)
class Published:
    """What the engines hold, and how it got there."""

    publication: Publication
    metrics: dict[str, float]


def publish(trainer: TrainerGroup, pool: RolloutPool, previous: Published | None = None) -> Published:
    """The trainer's weights to every worker. `RunError` unless each proves that it holds exactly these."""
    publication = trainer.publication()
    acks = pool.publish(publication)
    trained = previous is not None and publication.version != previous.publication.version
    tolerance = 1e-3 if all(t.dtype != "bfloat16" for t in publication.tensors) else 5e-2
    before = previous.publication if previous else None
    return Published(publication, verify(publication, acks, before, changed=trained, tolerance=tolerance))


def tokenizer_folder(model: ModelConfig) -> Path:
    """Where the model's tokenizer files are, to go into its checkpoints."""
    path = tokenizer_of(model)
    return Path(TOKENIZERS.get(path, path))
