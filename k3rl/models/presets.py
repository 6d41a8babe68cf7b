"""Sizes of the K3 family. `k3-full` is the released `config.json` (spec/05 §1); the others are its stand-ins."""

from __future__ import annotations

from typing import Any


def every_nth(layers: int, n: int, extra: tuple[int, ...] = ()) -> dict[str, tuple[int, ...]]:
    full = tuple(sorted(set(range(n, layers + 1, n)) | set(extra)))
    others = tuple(i for i in range(1, layers + 1) if i not in full)
    return {"full_attn_layers": full, "kda_layers": others}


PRESETS: dict[str, dict[str, Any]] = {
    # Sized for two CPU cores. Widths are multiples of 32 where MXFP4 reduces over them.
    "k3-nano": {
        "vocab_size": 512,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 256,
        "initializer_range": 0.08,
        "max_position_embeddings": 4096,
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 64,
        "routed_expert_hidden_size": 64,
        "attn_res_block_size": 2,
        "linear_attn_config": {"num_heads": 4, "head_dim": 32, **every_nth(4, 4)},
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    },
    # About 300M parameters, for one GPU, over the released vocabulary.
    "k3-mini": {
        "vocab_size": 163840,
        "hidden_size": 512,
        "num_hidden_layers": 13,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 2048,
        "initializer_range": 0.04,
        "max_position_embeddings": 131072,
        "q_lora_rank": 256,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "num_experts": 32,
        "num_experts_per_token": 4,
        "num_shared_experts": 2,
        "moe_intermediate_size": 256,
        "routed_expert_hidden_size": 256,
        "attn_res_block_size": 4,
        "linear_attn_config": {"num_heads": 8, "head_dim": 64, **every_nth(13, 4, (13,))},
    },
    # The released model: shapes only, on the meta device.
    "k3-full": {
        "vocab_size": 163840,
        "hidden_size": 7168,
        "num_hidden_layers": 93,
        "num_attention_heads": 96,
        "num_key_value_heads": 96,
        "intermediate_size": 33792,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_shared_experts": 2,
        "moe_intermediate_size": 3072,
        "routed_expert_hidden_size": 3584,
        "attn_res_block_size": 12,
        "linear_attn_config": {"num_heads": 96, "head_dim": 128, **every_nth(93, 4, (93,))},
    },
}
