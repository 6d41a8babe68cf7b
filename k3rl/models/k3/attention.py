"""K3's two attentions as layers: KDA and gated NoPE MLA. Module names are the released tensor names (spec/05 §2-4).

Legend: T tokens packed, N sequences, H heads, D hidden width, K key width, V value width, R latent (512 + 64), L keys.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from k3rl.models.attention import packed_attention, read_decode, read_packed, write_tokens
from k3rl.models.config import K3Config
from k3rl.models.context_parallel import Shard, gather, tail_before
from k3rl.models.k3.kda_ops import Backend, kda
from k3rl.models.k3.layers import RMSNorm, wide
from k3rl.models.packing import Layout

MLA_NORM_EPS = 1e-6


class ShortConv(nn.Module):
    """Weight of one depthwise causal convolution, float32 [C, 1, W] as released."""

    def __init__(self, channels: int, width: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width, device=device))


def causal_conv(
    x_TC: Tensor, weight_CW: Tensor, layout: Layout, state_NWC: Tensor | None
) -> tuple[Tensor, Tensor]:
    """SiLU of a depthwise causal convolution over packed sequences, in the weights' float32, rounded once at the end.

    ``state_NWC`` holds each sequence's last W-1 inputs (zeros where None). Sequences are laid out with their own
    earlier inputs in front, so no input of another sequence or of padding can enter (spec/10 row 11).
    Returns (outputs [T, C], next state [N, W-1, C]).
    """
    width = weight_CW.shape[1]
    weight_WC = (
        weight_CW.t() if x_TC.dtype in (torch.bfloat16, torch.float16) else weight_CW.t().to(x_TC.dtype)
    )
    if layout.decode:
        before = x_TC.new_zeros(x_TC.shape[0], width - 1, x_TC.shape[1]) if state_NWC is None else state_NWC
        window_NWC = torch.cat([before.to(x_TC.dtype), x_TC[:, None]], 1)
        return F.silu((window_NWC * weight_WC).sum(1)).to(x_TC.dtype), window_NWC[:, 1:]
    tokens, before, after, total = layout.conv(width)
    laid = x_TC.new_zeros(total, x_TC.shape[1]).index_copy(0, tokens, x_TC)
    if state_NWC is not None:
        laid = laid.index_copy(0, before, state_NWC.to(x_TC.dtype).flatten(0, 1))
    out = laid[: total - width + 1] * weight_WC[0]
    for w in range(1, width):
        out = torch.addcmul(out, laid[w : total - width + 1 + w].to(out.dtype), weight_WC[w])
    next_state = laid.index_select(0, after).unflatten(0, (layout.num_sequences, width - 1))
    return F.silu(out).to(x_TC.dtype).index_select(0, tokens - (width - 1)), next_state


def _linear(inputs: int, outputs: int, dtype: torch.dtype, device: torch.device) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False, dtype=dtype, device=device)


class KDAttention(nn.Module):
    """Kimi Delta Attention with short convolutions, low-rank decay and a full-rank output gate."""

    def __init__(self, config: K3Config, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        linear = config.linear_attn_config
        self.heads, self.head_dim, self.width = (
            linear.num_heads,
            linear.head_dim,
            linear.short_conv_kernel_size,
        )
        self.lower_bound = linear.gate_lower_bound
        self.layer = layer
        self.backend: Backend = "auto"
        D, HK = config.hidden_size, self.heads * self.head_dim
        self.q_proj, self.k_proj, self.v_proj = (_linear(D, HK, dtype, device) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (ShortConv(HK, self.width, device) for _ in range(3))
        self.f_a_proj = _linear(D, self.head_dim, dtype, device)
        self.f_b_proj = _linear(self.head_dim, HK, dtype, device)
        self.b_proj = _linear(D, self.heads, dtype, device)
        self.g_proj = _linear(D, HK, dtype, device)
        self.o_proj = _linear(HK, D, dtype, device)
        # Released checkpoints pad the heads of A_log with zeros to a multiple of 128.
        self.A_log = nn.Parameter(torch.empty(math.ceil(self.heads / 128) * 128, device=device))
        self.dt_bias = nn.Parameter(torch.empty(HK, device=device))
        self.o_norm = RMSNorm(self.head_dim, config.rms_norm_eps, torch.float32, device)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Rates start at 1 (report). Biases put first decays log-uniformly between e^-0.1 and e^-0.001 a step, as
        gated linear attention usually starts; with zeros every channel would forget within two tokens."""
        with torch.no_grad():
            self.A_log.zero_()
            first = (
                torch.empty(self.dt_bias.shape)
                .uniform_(math.log(1e-3), math.log(1e-1), generator=generator)
                .exp()
            )
            self.dt_bias.copy_(torch.logit(first / -self.lower_bound))
            bound = self.width**-0.5
            for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d):
                conv.weight.copy_(torch.empty(conv.weight.shape).uniform_(-bound, bound, generator=generator))

    def head_blocks(self) -> dict[str, tuple[int, int]]:
        """Parameters with a head axis: (axis, width of a head along it)."""
        rows = ("q_proj", "k_proj", "v_proj", "g_proj", "f_b_proj")
        return {f"{n}.weight": (0, self.head_dim) for n in rows} | {"o_proj.weight": (1, self.head_dim)}

    def forward(self, x_TD: Tensor, layout: Layout) -> Tensor:
        heads = (self.heads, self.head_dim)
        conv_state, state = self._read(layout)
        qkv = torch.cat([self.q_proj(x_TD), self.k_proj(x_TD), self.v_proj(x_TD)], -1)
        convs = torch.cat([self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight]).squeeze(1)
        if layout.shard is not None:
            conv_state = tail_before(qkv, self.width - 1, layout.shard)
        qkv, conv_state = causal_conv(qkv, convs, layout, conv_state)
        q, k, v = (part.unflatten(-1, heads) for part in qkv.chunk(3, -1))
        z = self.f_b_proj(self.f_a_proj(x_TD)).unflatten(-1, heads)
        A_log, dt_bias = self.A_log[: self.heads], self.dt_bias.unflatten(0, heads)
        b = self.b_proj(x_TD)
        out, state = kda(q, k, v, z, b, A_log, dt_bias, self.lower_bound, layout, state, self.backend)
        self._write(layout, conv_state, state)
        gate = torch.sigmoid(wide(self.g_proj(x_TD))).unflatten(-1, heads)
        return self.o_proj((self.o_norm(wide(out)) * gate).flatten(-2).to(x_TD.dtype))

    def _read(self, layout: Layout) -> tuple[Tensor | None, Tensor | None]:
        if layout.cache is None:
            return None, None
        both = (layout.cache.states[f"{self.layer}.conv"], layout.cache.states[f"{self.layer}.kda"])
        if layout.all_slots:
            return both
        return tuple(t.index_select(0, layout.slots_N) for t in both)

    @torch.no_grad()
    def _write(self, layout: Layout, conv_state: Tensor, state: Tensor) -> None:
        if layout.cache is None:
            return
        for name, new in (("conv", conv_state), ("kda", state)):
            held = layout.cache.states[f"{self.layer}.{name}"]
            if layout.all_slots:
                held.copy_(new)
            else:
                held[layout.slots_N] = new.to(held.dtype)

    def cache_tensors(self, slots: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        conv = torch.zeros(slots, self.width - 1, 3 * self.heads * self.head_dim, dtype=dtype, device=device)
        state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        state = torch.zeros(slots, self.heads, self.head_dim, self.head_dim, dtype=state_dtype, device=device)
        return {f"{self.layer}.conv": conv, f"{self.layer}.kda": state}


class MLAttention(nn.Module):
    """Gated multi-head latent attention without position embeddings.

    Prefill and training expand the latent to keys and values per head. Decode absorbs the expansion into the query
    and the output, so that it reads only the cached latents.
    """

    def __init__(self, config: K3Config, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        H, D = config.num_attention_heads, config.hidden_size
        self.heads, self.layer = H, layer
        self.nope, self.shared, self.value = (
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
            config.v_head_dim,
        )
        self.latent = config.kv_lora_rank
        self.scale = (self.nope + self.shared) ** -0.5
        self.q_a_proj = _linear(D, config.q_lora_rank, dtype, device)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, MLA_NORM_EPS, dtype, device)
        self.q_b_proj = _linear(config.q_lora_rank, H * (self.nope + self.shared), dtype, device)
        self.kv_a_proj_with_mqa = _linear(D, self.latent + self.shared, dtype, device)
        self.kv_a_layernorm = RMSNorm(self.latent, MLA_NORM_EPS, dtype, device)
        self.kv_b_proj = _linear(self.latent, H * (self.nope + self.value), dtype, device)
        self.g_proj = _linear(D, H * self.value, dtype, device)
        self.o_proj = _linear(H * self.value, D, dtype, device)
        self.absorb = True  # off: decode expands keys and values like prefill, for comparison
        self.track_max_logit = False  # on: training forwards fill `max_logit_H` [H], for QK-Clip
        self.max_logit_H: Tensor | None = None

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Nothing beyond the matrices' common initialisation."""

    def head_blocks(self) -> dict[str, tuple[int, int]]:
        """Parameters with a head axis: (axis, width of a head along it)."""
        return {
            "q_b_proj.weight": (0, self.nope + self.shared),
            "kv_b_proj.weight": (0, self.nope + self.value),
            "g_proj.weight": (0, self.value),
            "o_proj.weight": (1, self.value),
        }

    def forward(self, x_TD: Tensor, layout: Layout) -> Tensor:
        q_THK = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_TD))).unflatten(-1, (self.heads, -1))
        c_TR, shared_TR = self.kv_a_proj_with_mqa(x_TD).split([self.latent, self.shared], -1)
        latent_TR = torch.cat([self.kv_a_layernorm(c_TR), shared_TR], -1)
        if layout.cache is not None:
            held = layout.cache.tokens[f"{self.layer}.latent"]
            write_tokens(held, layout, latent_TR)
            if layout.decode and self.absorb:
                return self._out(self._absorbed(q_THK, *read_decode(held, layout)), x_TD)
            latent_TR = (
                read_packed(held, layout).to(x_TD.dtype) if layout.decode or layout.past.any() else latent_TR
            )
        if layout.shard is not None:
            return self._out(self._over_ranks(q_THK, latent_TR, layout.shard), x_TD)
        k_UHK, v_UHV = self._expand(latent_TR)
        if self.track_max_logit and self.training and torch.is_grad_enabled():
            self._note_max_logit(q_THK, k_UHK, layout)
        return self._out(packed_attention(q_THK, k_UHK, v_UHV, layout, self.scale), x_TD)

    def _over_ranks(self, q_THK: Tensor, latent_TR: Tensor, shard: Shard) -> Tensor:
        """Over the latents of all ranks up to this one: the mask is causal, aligned at the lower right."""
        latent_UR = gather(latent_TR, shard)[: shard.rank + 1].flatten(0, 1)
        k_UHK, v_UHV = self._expand(latent_UR)
        if self.track_max_logit and self.training and torch.is_grad_enabled():
            first = latent_UR.shape[0] - q_THK.shape[0]
            self._note_peak(self._peak(q_THK[: shard.tokens], k_UHK, first))
        q, k, v = (x.transpose(0, 1)[None] for x in (q_THK, k_UHK, v_UHV))
        mask = causal_lower_right(q_THK.shape[0], latent_UR.shape[0])
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        return out[0].transpose(0, 1)

    def _expand(self, latent_UR: Tensor) -> tuple[Tensor, Tensor]:
        c, shared = latent_UR.split([self.latent, self.shared], -1)
        k, v = self.kv_b_proj(c).unflatten(-1, (self.heads, -1)).split([self.nope, self.value], -1)
        return torch.cat([k, shared[:, None].expand(-1, self.heads, -1)], -1), v

    def _absorbed(self, q_NHK: Tensor, rows_NLR: Tensor, seen_NL: Tensor) -> Tensor:
        """<q, W_k c> = <W_k^T q, c> and W_v sum_l p_l c_l = sum_l p_l W_v c_l: one shared key and value per token."""
        up_HKR = self.kv_b_proj.weight.unflatten(0, (self.heads, self.nope + self.value))
        q_n, q_s = q_NHK.split([self.nope, self.shared], -1)
        q_NHR = torch.cat([torch.einsum("nhk,hkr->nhr", q_n, up_HKR[:, : self.nope]), q_s], -1)
        scores_NHL = wide(q_NHR @ rows_NLR.to(q_NHR.dtype).transpose(-1, -2)) * self.scale
        weights_NHL = scores_NHL.masked_fill(~seen_NL[:, None], -math.inf).softmax(-1).to(q_NHK.dtype)
        mixed_NHR = weights_NHL @ rows_NLR[..., : self.latent].to(q_NHK.dtype)
        return torch.einsum("nhr,hvr->nhv", mixed_NHR, up_HKR[:, self.nope :])

    def _out(self, attended_THV: Tensor, x_TD: Tensor) -> Tensor:
        gate = torch.sigmoid(wide(self.g_proj(x_TD)))
        return self.o_proj((wide(attended_THV).flatten(-2) * gate).to(x_TD.dtype))

    @torch.no_grad()
    def _note_max_logit(self, q_THK: Tensor, k_UHK: Tensor, layout: Layout) -> None:
        """Largest attention logit of each head since the last optimiser step, [H] float32."""
        peak = torch.full((self.heads,), -math.inf, device=q_THK.device)
        for n in range(layout.num_sequences):
            rows = slice(int(layout.cu[n]), int(layout.cu[n + 1]))
            peak = torch.maximum(peak, self._peak(q_THK[rows], k_UHK[rows]))
        self._note_peak(peak)

    @torch.no_grad()
    def _peak(self, q_THK: Tensor, k_UHK: Tensor, first: int = 0) -> Tensor:
        """Largest logit of each head in one sequence, whose queries are those of positions ``first`` on."""
        peak = torch.full((self.heads,), -math.inf, device=q_THK.device)
        keys = k_UHK.transpose(0, 1).transpose(-1, -2)
        place_U = torch.arange(keys.shape[-1], device=q_THK.device)
        for start, q in zip(range(first, first + len(q_THK), 1024), q_THK.split(1024), strict=False):
            logits = wide(q.transpose(0, 1) @ keys) * self.scale
            later = place_U > place_U[start : start + len(q), None]
            peak = torch.maximum(peak, logits.masked_fill(later, -math.inf).amax((-1, -2)))
        return peak

    def _note_peak(self, peak_H: Tensor) -> None:
        self.max_logit_H = peak_H if self.max_logit_H is None else torch.maximum(self.max_logit_H, peak_H)

    def cache_tensors(
        self, slots: int, max_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        return {
            f"{self.layer}.latent": torch.zeros(
                slots, max_tokens, self.latent + self.shared, dtype=dtype, device=device
            )
        }
