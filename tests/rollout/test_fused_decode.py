"""The fused decode step against the model's own forward, its kernels run by Triton's interpreter on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

KINDS = ["llama", "qwen2", "qwen3", "mistral"]


@pytest.mark.parametrize("kind", KINDS)
def test_fused_decode_equals_the_models_own_forward(kind):
    pytest.importorskip("triton")
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
    }  # read when a kernel is defined: a process of its own
    done = subprocess.run(
        [sys.executable, __file__, kind], env=environment, capture_output=True, text=True, timeout=240,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)


def small(kind: str):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from k3rl.models.hf import HFModel

    torch.manual_seed(1)
    config = AutoConfig.for_model(
        kind, vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, initializer_range=0.3,
        tie_word_embeddings=True,
    )  # fmt: skip
    if kind == "qwen2":  # its head width is the hidden width's share, whatever the config says
        config.hidden_size = 64
    if kind == "mistral":
        config.sliding_window = 40
    model = AutoModelForCausalLM.from_config(config)
    for (
        name,
        parameter,
    ) in model.named_parameters():  # norms and biases start as ones and zeros: nothing to see
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    return HFModel(model).eval().requires_grad_(False)


def main(kind: str) -> None:
    import torch

    sys.path.insert(0, str(Path(__file__).parents[2]))
    from rollout.native import kernels
    from rollout.native.fused import FusedDecode

    plain, fused_model = small(kind), small(kind)
    fused = FusedDecode(fused_model)
    fused_model.load_named_weights([(n, t.clone()) for n, t in plain.named_weights()])
    ids_T = torch.randint(0, 97, (3 + 70 + 150,))
    cu, slots_N = torch.tensor([0, 3, 73, 223]), torch.tensor([4, 0, 2])
    worst = 0.0
    caches = [model.make_cache(5, 256) for model in (plain, fused_model)]
    for model, cache in zip((plain, fused_model), caches, strict=True):
        model(ids_T, cu, cache, slots_N)
    for step in range(4):
        kernels._WARPS_WORTH = 8 if step % 2 else 528  # one piece, and several that are combined
        tokens_N = torch.randint(0, 97, (3,))
        expected_ND = plain(tokens_N, torch.arange(4), caches[0], slots_N)
        hidden_ND = fused(tokens_N, slots_N, caches[1])
        worst = max(worst, float((hidden_ND - expected_ND).abs().max()))
    for name, tensor in caches[0].tokens.items():
        worst = max(worst, float((tensor - caches[1].tokens[name])[slots_N].abs().max()))
    assert (caches[0].lengths == caches[1].lengths).all()
    print(f"{kind}: largest difference {worst:.2e}")
    assert worst < 2e-4, worst


if __name__ == "__main__":
    main(sys.argv[1])
