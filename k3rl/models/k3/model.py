"""K3's text decoder: embedding, layers joined by block attention residuals, norm and head. Source: spec/05 §5.

Module names are the released tensor names without their `language_model.` prefix. Legend: T tokens, D hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from k3rl.models.base import LanguageModel
from k3rl.models.cache import Cache
from k3rl.models.config import K3Config, config_json
from k3rl.models.k3.attention import KDAttention, MLAttention, _linear
from k3rl.models.k3.layers import AttnRes, RMSNorm, Values
from k3rl.models.k3.moe import MLP, Experts, LatentMoE
from k3rl.models.k3.mtp import MTPLayer
from k3rl.models.k3.routing import Routing, RoutingControl, RoutingRecord
from k3rl.models.packing import Layout

PREFIX = "language_model."


class DecoderLayer(nn.Module):
    """One layer with its two attention residuals. State in and out: finished values, and the open block's sum."""

    def __init__(self, config: K3Config, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        D, eps = config.hidden_size, config.rms_norm_eps
        self.opens_block = layer % config.attn_res_block_size == 0
        attention = KDAttention if config.is_kda(layer) else MLAttention
        self.input_layernorm = RMSNorm(D, eps, dtype, device)
        self.post_attention_layernorm = RMSNorm(D, eps, dtype, device)
        self.self_attention_res = AttnRes(D, eps, dtype, device)
        self.mlp_res = AttnRes(D, eps, dtype, device)
        self.self_attn = attention(config, layer, dtype, device)
        self.is_moe = config.is_moe(layer)
        if self.is_moe:
            self.block_sparse_moe = LatentMoE(config, layer - config.first_k_dense_replace, dtype, device)
        else:
            self.mlp = MLP(config, config.intermediate_size, dtype, device)

    def forward(self, values: Values, running_TD: Tensor, layout: Layout, routing: Routing) -> Tensor:
        """Returns the open block's sum after this layer. `values` already holds every block finished before it,
        and the embedding or the last block's sum where this layer opens a block."""
        if not values.sums:
            h = running_TD
        else:
            h = self.self_attention_res(values, running_TD)
        before = None if self.opens_block else running_TD
        if self.opens_block:
            values.append(running_TD)
        attended = self.self_attn(self.input_layernorm(h), layout)
        running_TD = attended if before is None else before + attended
        h = self.post_attention_layernorm(self.mlp_res(values, running_TD))
        return running_TD + (self.block_sparse_moe(h, routing) if self.is_moe else self.mlp(h))


class Decoder(nn.Module):
    """Everything but the head."""

    def __init__(self, config: K3Config, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        D, eps = config.hidden_size, config.rms_norm_eps
        self.eps = eps
        self.embed_tokens = nn.Embedding(config.vocab_size, D, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, dtype, device) for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(D, eps, dtype, device)
        self.output_attn_res = AttnRes(D, eps, dtype, device)
        self.two_phase = False
        """Serve all attention residuals of a block from one pass over the finished blocks where no gradient flows:
        less traffic, equal up to rounding. Off, inference and training round alike."""

    def readers(self) -> list[list[AttnRes]]:
        """For each set of finished values, from the embedding alone on, the residuals that read it."""
        groups: list[list[AttnRes]] = []
        for layer in self.layers:
            if groups:
                groups[-1].append(layer.self_attention_res)
            if layer.opens_block:
                groups.append([])
            groups[-1].append(layer.mlp_res)
        groups[-1].append(self.output_attn_res)
        return groups

    def forward(
        self, input_ids_T: Tensor, layout: Layout, routing: Routing, recompute: bool
    ) -> tuple[Tensor, Values]:
        """Returns (mixed and normed hidden states [T, D], all values they were mixed from)."""
        values = Values(self.eps, self.readers() if self.two_phase and not torch.is_grad_enabled() else None)
        running = self.embed_tokens(input_ids_T)
        for layer in self.layers:
            running = _recomputed(layer, values, running, layout, routing) if recompute else layer(
                values, running, layout, routing
            )  # fmt: skip
        mixed = self.output_attn_res(values, running)
        values.append(running)
        return self.norm(mixed), values


def _recomputed(
    layer: DecoderLayer, values: Values, running: Tensor, layout: Layout, routing: Routing
) -> Tensor:
    """A layer whose activations are computed again in the backward pass: of it, only the running sum is kept.

    Block values are stored once, whatever number of layers reads them.
    """

    def run(running: Tensor, *held: Tensor) -> Tensor:
        inside = Values(values.eps)
        half = len(held) // 2
        inside.sums, inside.inverse_rms = list(held[:half]), list(held[half:])
        return layer(inside, running, layout, routing)

    out = checkpoint(run, running, *values.sums, *values.inverse_rms, use_reentrant=False)
    if layer.opens_block:
        values.append(running)
    return out


class K3Model(LanguageModel):
    """The K3 family. See `LanguageModel` for the contract, `K3Config` for sizes.

    Matrices are in ``dtype``; convolutions, decay parameters, KDA's output norm and the routers' biases are float32
    whatever ``dtype`` says, as released.
    """

    shares_sequences = True
    """Ranks may hold pieces of one sequence (`k3rl.models.context_parallel`)."""

    def __init__(
        self, config: K3Config, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        device = torch.device(device)
        self.config, self.dtype = config, dtype
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.max_context = config.max_position_embeddings
        self.model = Decoder(config, dtype, device)
        self.lm_head = _linear(config.hidden_size, config.vocab_size, dtype, device)
        self.routing = RoutingControl()
        self.mtp: MTPLayer | None = None
        if config.num_nextn_predict_layers:
            extra = DecoderLayer(config, config.num_hidden_layers, dtype, device)
            extra.opens_block = True
            self.mtp = MTPLayer(config, extra, dtype, device)

    def _forward(self, input_ids_T: Tensor, layout: Layout) -> Tensor:
        return self.forward_values(input_ids_T, layout)[0]

    def forward_values(self, input_ids_T: Tensor, layout: Layout) -> tuple[Tensor, Values]:
        """Hidden states, and the block values behind them: the draft model reads some of those."""
        config = self.config
        routing = self.routing.start(
            input_ids_T.shape[0],
            len(config.moe_layers),
            config.num_experts_per_token,
            input_ids_T.device,
            layout.shard.tokens if layout.shard is not None else None,
        )
        recompute = self.activation_checkpointing and self.training and torch.is_grad_enabled()
        return self.model(input_ids_T, layout, routing, recompute)

    def record_routing(self) -> AbstractContextManager[RoutingRecord]:
        """``with model.record_routing() as record:`` keeps every forward's expert ids in `record`."""
        return self.routing.recording()

    def replay_routing(self, ids_TLK: Tensor) -> AbstractContextManager[None]:
        """Forwards inside take these experts ([T, expert layers, K], in their packed order) and choose none."""
        return self.routing.replaying(ids_TLK)

    def head_weight(self) -> Tensor:
        return self.lm_head.weight

    def make_cache(self, num_slots: int, max_tokens: int, device: torch.device | str | None = None) -> Cache:
        place = torch.device(device) if device is not None else self.lm_head.weight.device
        tokens: dict[str, Tensor] = {}
        states: dict[str, Tensor] = {}
        for layer in self.model.layers:
            attention = layer.self_attn
            if isinstance(attention, KDAttention):
                states |= attention.cache_tensors(num_slots, self.lm_head.weight.dtype, place)
            else:
                tokens |= attention.cache_tensors(num_slots, max_tokens, self.lm_head.weight.dtype, place)
        return Cache(num_slots, max_tokens, tokens, states)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.state_dict(keep_vars=True).items():
            yield from self.unfuse(name, tensor.detach())

    def unfuse(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """A parameter or buffer by its module name, as checkpoint entries: the expert stacks become one tensor each.

        Works on a gathered copy as well as on the live tensor, so that a sharded trainer can publish.
        """
        name = PREFIX + name.replace("_res.norm.", "_res_norm.").replace("_res.proj.", "_res_proj.")
        head, dot, leaf = name.rpartition(".")
        if head.endswith(".experts"):
            matrix, packed, part = leaf.partition("_")  # w1, or an engine's w1_packed and w1_scale
            for e in range(tensor.shape[0]):
                yield f"{head}.{e}{dot}{matrix}.weight{packed}{part}", tensor[e]
        else:
            yield name, tensor

    def config_dict(self) -> dict[str, object]:
        return config_json(self.config, str(self.dtype).removeprefix("torch."))

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Random initialisation, the same for a seed on every device and dtype: drawn on the CPU in float32."""
        generator = torch.Generator().manual_seed(seed)
        std = self.config.initializer_range
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.weight.fill_(1.0)
            elif isinstance(module, AttnRes):
                continue  # its projection, below, starts at zero: a plain mean of the values
            elif (
                isinstance(module, nn.Linear | nn.Embedding | Experts)
                or module.__class__.__name__ == "Router"
            ):
                for parameter in module.parameters(recurse=False):
                    parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))
            if isinstance(module, KDAttention | MLAttention):
                module.reset_parameters(generator)
        for module in self.modules():
            if isinstance(module, AttnRes):
                module.proj.weight.zero_()
            elif module.__class__.__name__ == "Router":
                module.e_score_correction_bias.zero_()
