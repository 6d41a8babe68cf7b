"""What K3 costs on given hardware: bytes, operations and seconds, by arithmetic from its config. For simulate_fleet.py.

Legend: B sequences decoded at once, L tokens of one sequence. Rates are rooflines times an efficiency; the efficiencies
are assumptions, stated with every result.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

from k3rl.models.config import K3Config, preset
from k3rl.models.loading import parameter_count

MXFP4_BYTES = 4.25 / 8
"""Of one element, its block's scale included (spec/04)."""


@dataclass(frozen=True)
class Hardware:
    """One GPU and its share of a host; NVIDIA H200, eight to a host, one 400 Gb/s port each, by its data sheet."""

    hbm_bytes: float = 141e9
    hbm_bytes_s: float = 4.8e12
    flops: float = 989e12  # bfloat16, dense
    network_bytes_s: float = 50e9
    host_dram_bytes: float = 2e12
    per_host: int = 8
    decode_efficiency: float = 0.4
    prefill_mfu: float = 0.4
    train_mfu: float = 0.3
    network_efficiency: float = 0.7
    step_floor_s: float = 0.02  # of one decode step: launches and exchange between experts
    memory_used: float = 0.9


@dataclass(frozen=True)
class Costs:
    """One model on engines of ``gpus`` GPUs each. Engines hold routed experts as MXFP4, the rest as bfloat16."""

    config: K3Config
    gpus: int
    hardware: Hardware = Hardware()

    @cached_property
    def mla_layers(self) -> int:
        return len(self.config.linear_attn_config.full_attn_layers)

    @cached_property
    def expert_params(self) -> int:
        """Of one routed expert: w1, w2, w3 in the latent width."""
        return 3 * self.config.routed_expert_hidden_size * self.config.moe_intermediate_size

    @cached_property
    def total_params(self) -> int:
        return parameter_count(self.config)

    @cached_property
    def routed_params(self) -> int:
        return len(self.config.moe_layers) * self.config.num_experts * self.expert_params

    @cached_property
    def active_params(self) -> int:
        """That one token multiplies with; the embedding is a look-up."""
        used = len(self.config.moe_layers) * self.config.num_experts_per_token * self.expert_params
        return (
            self.total_params - self.routed_params + used - self.config.vocab_size * self.config.hidden_size
        )

    @cached_property
    def served_bytes(self) -> float:
        """Weights of one engine."""
        return self.routed_params * MXFP4_BYTES + (self.total_params - self.routed_params) * 2

    @cached_property
    def state_bytes(self) -> int:
        """KDA's recurrent states of one sequence, float32, whatever its length."""
        linear = self.config.linear_attn_config
        return len(linear.kda_layers) * linear.num_heads * linear.head_dim**2 * 4

    @cached_property
    def kv_bytes_per_token(self) -> int:
        """MLA's cached latents, bfloat16."""
        return self.mla_layers * (self.config.kv_lora_rank + self.config.qk_rope_head_dim) * 2

    def cache_bytes(self, tokens: float) -> float:
        return self.state_bytes + self.kv_bytes_per_token * tokens

    @cached_property
    def cache_budget_bytes(self) -> float:
        """Of one engine, while the trainer's state is in host memory."""
        return self.gpus * self.hardware.hbm_bytes * self.hardware.memory_used - self.served_bytes

    def decode_step_s(self, batch: int, context_tokens: float) -> float:
        """One token for each of B sequences whose contexts add up to ``context_tokens``."""
        c, h = self.config, self.hardware
        touched = c.num_experts * (1 - (1 - c.num_experts_per_token / c.num_experts) ** batch)
        weights = len(c.moe_layers) * touched * self.expert_params * MXFP4_BYTES
        weights += (self.total_params - self.routed_params) * 2
        caches = 2 * batch * self.state_bytes + context_tokens * self.kv_bytes_per_token
        latent = 2 * c.kv_lora_rank + c.qk_rope_head_dim
        flops = 2 * batch * self.active_params
        flops += 2 * self.mla_layers * c.num_attention_heads * latent * context_tokens
        bound = max((weights + caches) / h.hbm_bytes_s, flops / h.flops) / self.gpus
        return bound / h.decode_efficiency + h.step_floor_s

    def forward_flops(self, tokens: float) -> float:
        """Of one sequence, causal attention included."""
        c = self.config
        width = c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim
        return 2 * self.active_params * tokens + self.mla_layers * c.num_attention_heads * width * tokens**2

    def prefill_s(self, tokens: float) -> float:
        return self.forward_flops(tokens) / (self.gpus * self.hardware.flops * self.hardware.prefill_mfu)

    def train_s(self, forward_flops: float, fleet_gpus: int) -> float:
        """Forward, backward (twice the forward) over the whole fleet."""
        return 3 * forward_flops / (fleet_gpus * self.hardware.flops * self.hardware.train_mfu)

    def publish_s(self, nbytes: float) -> float:
        """Every engine receives all weights, each of its GPUs a part through its own port; so does every sender: in a
        colocated fleet the bytes that leave a GPU are those that arrive at one."""
        return nbytes / (self.gpus * self.hardware.network_bytes_s * self.hardware.network_efficiency)

    def trainer_bytes(self) -> float:
        """State over the whole fleet: float32 master weights, one float32 moment (Muon), bfloat16 weights."""
        return self.total_params * (4 + 4 + 2)


@cache
def costs(model: str, gpus: int) -> Costs:
    return Costs(preset(model), gpus)
