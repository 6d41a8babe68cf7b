"""A whole RL run with vLLM (its CPU build) as the engine: weights arrive after every step, and what the engine says of
its own tokens is what the trainer says of them."""

from __future__ import annotations

import json

import pytest

from k3rl.config.load import validate
from k3rl.models.smollm2 import smollm2_folder
from k3rl.recipes.run import run_job
from rewards import Scored, reward


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A Llama of 3 million random parameters with SmolLM2's tokenizer and chat template."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, set_seed

    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    tokenizer.save_pretrained(folder)
    set_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=512, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.vllm
@pytest.mark.timeout(900)  # vLLM's start takes most of it
def test_two_steps_of_rl(tiny, tmp_path):
    pytest.importorskip("vllm")
    job = {
        "kind": "rl",
        "name": "vllm",
        "runs": str(tmp_path),
        "model": {"path": str(tiny), "dtype": "float32"},
        "data": {"type": "callable", "function": "k3rl.data.tasks:keyboard_walk", "arguments": {"part": "train"}},
        "steps": 2,
        "thinking": False,
        "rollout": {
            "groups": 4, "samples": 4, "lambda": 0.75, "max_context": 256, "max_tokens": 128,
            "sampling": {"stop_strings": ["z", "b"]},  # a token in twenty: lengths differ
            "engine": {"type": "vllm", "max_slots": 16, "arguments": {"kv_cache_memory_bytes": 64 << 20}},
        },
        # by length, so that every group has something to learn from
        "rewards": {"parts": [{"reward": f"{__file__}:says_less"}]},
        "trainer": {"optimizer": {"lr": 1e-3}},
    }  # fmt: skip
    run = run_job(validate(job, {}, "test"))
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [m["train/updates"] for m in metrics] == [1, 1]
    for m in metrics:
        assert 0 < m["rollout/logprob_diff_same_version"] < 1e-3


@reward()
def says_less(scored: Scored) -> float:
    """Fewer tokens are better."""
    return -float(scored.trajectory.sampled_tokens)
