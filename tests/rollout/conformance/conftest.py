"""Labs for the conformance suite. Engines are made once and are idle between tests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_labs import EOS, MAX_CONTEXT, VOCAB, Lab, k3_lab, native_qwen_lab, vllm_lab


@pytest.fixture(scope="session")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of 0.2M parameters, spread enough to have opinions."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("qwen3")
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=MAX_CONTEXT + 1,
        tie_word_embeddings=False, initializer_range=0.15, eos_token_id=EOS, bos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(5)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(
    scope="module", params=["native-k3", "native-hf", pytest.param("vllm", marks=pytest.mark.vllm)]
)
def made_lab(request: pytest.FixtureRequest, qwen_folder: Path) -> Iterator[Lab]:
    make = {"native-k3": k3_lab, "native-hf": lambda: native_qwen_lab(qwen_folder)}
    make["vllm"] = lambda: vllm_lab(qwen_folder)
    lab = make[request.param]()
    yield lab
    if request.param == "vllm":
        lab.engine.shutdown()


@pytest.fixture
def lab(made_lab: Lab) -> Iterator[Lab]:
    """A lab at rest, before and after."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    made_lab.rng = random.Random(seed)
    assert made_lab.engine.pending() == 0
    yield made_lab
    made_lab.engine.pause()
    made_lab.drain()
    if made_lab.engine.stats().version != 0:
        made_lab.engine.load_weights(made_lab.weights["a"], 0)
