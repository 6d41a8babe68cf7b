"""What fits: a plan printed before training, and each phase's peak."""

from __future__ import annotations

import resource
from dataclasses import dataclass

import torch
from torch import nn

from k3rl.config.trainer import TrainerConfig
from k3rl.models import LanguageModel
from k3rl.models.loading import free_memory
from k3rl.trainer.logprobs import CPU_CHUNK_BYTES, CUDA_CHUNK_BYTES

ACTIVATION_BYTES = {False: 60, True: 8}
"""Bytes kept per token, layer and unit of width, without and with activation checkpointing (rough:
attention + gated MLP).
"""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes per rank."""

    weights: int
    gradients: int
    masters: int
    moments: int
    activations: int
    head: int
    free: int | None

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.masters + self.moments + self.activations + self.head

    def __str__(self) -> str:
        parts = ("weights", "gradients", "masters", "moments", "activations", "head")
        text = ", ".join(f"{name} {getattr(self, name) / 2**30:.2f}" for name in parts)
        line = f"memory plan (GiB per rank): {text}; total {self.total / 2**30:.2f}"
        if self.free is None:
            return line
        return (
            f"{line} of {self.free / 2**30:.2f} free: {'fits' if self.total <= self.free else 'does NOT fit'}"
        )


def plan(model: LanguageModel, config: TrainerConfig, device: torch.device, ranks: int = 1) -> MemoryPlan:
    """Estimate from the model as it is loaded, before the optimiser exists; weights already on the device
    count as free. Activations are those of ``micro_batch_tokens``: packed sequences, or with ``parallel.context``
    one sequence of that length, of which a rank holds its piece.
    """
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    trained = [p for p in model.parameters() if p.requires_grad]
    numel = sum(p.numel() for p in trained)
    narrow = sum(p.numel() for p in trained if p.element_size() < 4)
    masters = 4 * narrow if config.master_weights else 0
    gradients = 4 * numel if config.master_weights else sum(p.numel() * p.element_size() for p in trained)
    layers = max((len(m) for m in model.modules() if isinstance(m, nn.ModuleList)), default=1)
    per_token = ACTIVATION_BYTES[model.activation_checkpointing] * model.hidden_size * layers
    narrowest = min((p.element_size() for p in trained), default=4)
    tokens = -(-config.micro_batch_tokens // config.parallel.context)
    activations = tokens * per_token * narrowest // 4
    chunk = config.logprob_chunk_mb << 20 or (CUDA_CHUNK_BYTES if device.type == "cuda" else CPU_CHUNK_BYTES)
    head = min(2 * chunk, 8 * tokens * model.vocab_size)
    free = free_memory(device)
    return MemoryPlan(
        weights // ranks,
        gradients // ranks,
        masters // ranks,
        8 * numel // ranks,
        activations,
        head,
        None if free is None else free + weights,
    )


def start_peak(device: torch.device) -> None:
    """Begin a phase."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """Highest use since `start_peak` on a GPU; the process's highest ever on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
