"""Engines from configs: what rollout workers and a run's judges generate with."""

from __future__ import annotations

import os
from typing import Any

from k3rl.chat import Renderer
from k3rl.config.rollout import EngineConfig, NativeEngineConfig, RolloutConfig, VllmEngineConfig
from k3rl.models import ModelConfig, load_model
from k3rl.models.config import PRESETS
from k3rl.models.loading import model_folder
from k3rl.quant.packed import pack_experts, packs_experts
from rollout.native import NativeEngine


def tokenizer_of(model: ModelConfig) -> str:
    """Path to load the renderer of a model from: its preset's, or its folder's."""
    return model.path if model.path in PRESETS else str(model_folder(model.path))


def make_engine(
    model: ModelConfig, config: RolloutConfig, renderer: Renderer, seed: int, device: str
) -> tuple[Any, int]:
    """What ``config.engine`` names, and the tokens that it holds of one sequence."""
    choice: EngineConfig = config.engine
    if isinstance(choice, VllmEngineConfig):
        return _vllm_engine(model, config, choice, renderer, cuda=device == "cuda")
    keep_cache = config.resume == "keep_cache"
    return native_engine(
        model, choice, renderer, device, config.max_context, seed=seed, keep_cache=keep_cache
    )


def native_engine(
    model: ModelConfig,
    choice: NativeEngineConfig,
    renderer: Renderer,
    device: str,
    max_context: int | None,
    *,
    seed: int = 0,
    keep_cache: bool = False,
) -> tuple[NativeEngine, int]:
    """The model on this project's engine. ``keep_cache``: caches outlive pauses and new weights."""
    loaded = load_model(model, device, seed=seed).eval().requires_grad_(False)
    if packs_experts(model.qat):
        pack_experts(loaded, read_codes=choice.expert_weights == "packed")
    context = min(max_context or loaded.max_context, loaded.max_context)
    engine = NativeEngine(
        loaded,
        max_slots=choice.max_slots,
        max_context=context,
        eos_token_ids=renderer.stop_token_ids,
        decode=renderer.decode,
        max_batch_tokens=choice.max_batch_tokens,
        kv_budget_tokens=choice.kv_budget_tokens,
        keep_cache=keep_cache,
        reuse_stale=keep_cache,
        deterministic=choice.deterministic,
        prefix_bytes=choice.prefix_cache_bytes,
        record_routing=choice.record_routing,
    )
    return engine, context


def _vllm_engine(
    model: ModelConfig, config: RolloutConfig, choice: VllmEngineConfig, renderer: Renderer, cuda: bool
) -> tuple[Any, int]:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the worker is a process of its own already
    if not cuda:
        settings = {
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        for name, value in settings.items():
            os.environ.setdefault(name, value)
    from rollout.vllm import VLLMEngine

    eager = choice.enforce_eager or not cuda
    arguments = {"gpu_memory_utilization": choice.gpu_memory_fraction, "enforce_eager": eager}
    if choice.max_batch_tokens:
        arguments["max_num_batched_tokens"] = choice.max_batch_tokens
    engine = VLLMEngine(
        model_folder(model.path),
        max_slots=choice.max_slots,
        max_context=config.max_context,
        eos_token_ids=renderer.stop_token_ids,
        decode=renderer.decode,
        dtype=model.dtype,
        qat=model.qat,
        tensor_parallel_size=choice.tensor_parallel,
        engine_args={**arguments, **choice.arguments},
    )
    return engine, engine.max_context
