"""What vLLM loads of a quantised publication: exact values where it holds matrices, codes where it holds codes."""

import json
import os

import pytest
import torch

from k3rl.config.trainer import TrainerConfig
from k3rl.errors import UserError
from k3rl.models import ModelConfig
from k3rl.quant import fake_quantise, quantise_mxfp4
from k3rl.quant.config import QatConfig
from k3rl.quant.export import Packer
from k3rl.trainer.worker import TrainerWorker
from rollout.engine import Generation, SamplingParams
from rollout.vllm.quantised import check_scheme, served

MLPS = QatConfig(targets=("*.mlp.*_proj",))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random Qwen3 of 0.2M parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("qwen3")
    config = Qwen3Config(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=161, tie_word_embeddings=False,
        initializer_range=0.15, eos_token_id=3, bos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(5)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def test_codes_are_unpacked_for_an_engine_of_whole_matrices_and_pass_to_one_of_codes():
    weight = torch.randn(8, 64)
    codes, scale = quantise_mxfp4(weight)
    sent = [("a.weight_packed", codes), ("b.weight", weight), ("a.weight_scale", scale)]
    whole = dict(served(sent, {"a.weight", "b.weight"}, torch.float32))
    assert torch.equal(whole["a.weight"], fake_quantise(weight))
    assert torch.equal(whole["b.weight"], weight)
    passed = list(served(sent, {n for n, _ in sent}, torch.float32))
    assert [n for n, _ in passed] == [n for n, _ in sent]
    assert all(a is b for (_, a), (_, b) in zip(passed, sent, strict=True))
    with pytest.raises(ValueError, match="'a' came with only one of weight_packed and weight_scale"):
        list(served(sent[:2], {"a.weight", "b.weight"}, torch.float32))


@pytest.mark.parametrize("rule", ["ceil", "floor", "even"])
def test_master_weights_are_rounded_as_the_trainer_rounds_them_and_as_export_packs_them(folder, rule):
    scheme = QatConfig(targets=MLPS.targets, rule=rule)
    trainer = TrainerWorker(ModelConfig(path=str(folder), qat=scheme), TrainerConfig(), device="cpu")
    masters = dict(trainer.named_weights())
    rounded = dict(served(masters.items(), masters, torch.float32, scheme))
    exported = Packer(scheme.targets, rule).packed(masters.items())
    unpacked = dict(served(exported, masters, torch.float32))
    changed = {n for n in masters if not torch.equal(rounded[n], masters[n])}
    assert changed == {n for n in masters if ".mlp." in n}
    for name in changed:
        assert torch.equal(rounded[name], unpacked[name])


def test_what_vllm_would_compute_otherwise_is_refused(folder, tmp_path):
    with pytest.raises(UserError, match="vLLM does not round activations to mxfp8"):
        check_scheme(folder, QatConfig(activations="mxfp8"))
    pytest.importorskip("vllm")
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("other builds have kernels for the codes")
    packer = Packer(MLPS.targets)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": packer.declaration()}))
    with pytest.raises(
        UserError, match="holds MXFP4 codes, and this build of vLLM has no kernel for them on cpu"
    ):
        check_scheme(tmp_path, None)


@pytest.mark.vllm
@pytest.mark.timeout(900)  # vLLM's start takes most of it
def test_vllm_says_of_its_tokens_what_a_trainer_with_qat_says(folder):
    settings = {
        "TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING",
    }  # fmt: skip
    for key, value in settings.items():
        os.environ.setdefault(key, value)
    pytest.importorskip("vllm")
    from rollout.vllm import VLLMEngine

    trainers = {
        name: TrainerWorker(ModelConfig(path=str(folder), qat=qat), TrainerConfig(), device="cpu")
        for name, qat in {"rounded": MLPS, "masters": None}.items()
    }
    engine = VLLMEngine(
        folder, 8, 160, [3], dtype="float32", qat=MLPS,
        engine_args={"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20, "max_num_batched_tokens": 256},
    )  # fmt: skip
    masters = list(trainers["rounded"].named_weights())
    packed = list(Packer(MLPS.targets).packed(masters, keep={n for n, _ in masters}))
    try:
        for weights in (None, masters, packed):  # as started, then as published in either form
            if weights is not None:
                engine.load_weights(weights, 1)
            context = torch.randint(4, 320, (20,)).tolist()
            done = Generation(str(id(weights)), context, SamplingParams(max_tokens=60, ignore_eos=True), 7)
            engine.submit([done])
            while engine.pending():
                engine.step()
            gaps = {}
            for name, trainer in trainers.items():
                scored = trainer.score_ids([context + done.token_ids], [len(context)])[0]
                gaps[name] = max(abs(a - b) for a, b in zip(scored, done.logprobs, strict=True))
            print(gaps)
            assert gaps["rounded"] < 2e-4
            assert gaps["masters"] > 100 * gaps["rounded"]
    finally:
        engine.shutdown()
    assert not torch.distributed.is_initialized()  # or nobody could form a group in this process again
