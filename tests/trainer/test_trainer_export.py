"""An exported folder loads in transformers with the trained log-probs; LoRA adapters merge into it."""

from __future__ import annotations

import pytest
import torch
from trainer_data import make_conversations, make_trajectories, nano, worker

from k3rl.config.trainer import LoraConfig
from k3rl.errors import UserError
from k3rl.models import ModelConfig, load_model
from k3rl.models.hf import HFModel
from k3rl.quant.config import QatConfig
from k3rl.quant.mx import fake_quantise
from k3rl.trainer.export import export, latest_checkpoint, packer_for
from k3rl.weights import checksum


def tiny_llama(seed: int = 0, tied: bool = True) -> HFModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
    )
    return HFModel(LlamaForCausalLM(config))


@pytest.mark.parametrize("tied", [True, False])
def test_an_exported_hugging_face_model_loads_in_transformers(tmp_path, tied):
    from transformers import AutoModelForCausalLM

    w = worker(model=tiny_llama(tied=tied))
    w.sft_step(make_conversations(1))
    w.step(make_trajectories(2))
    w.save(tmp_path / "run" / "checkpoints" / "step-000002")
    folder = export(tmp_path / "run", tmp_path / "out")
    hf = AutoModelForCausalLM.from_pretrained(folder)
    (t,) = make_trajectories(3, groups=1, samples=1)
    ids = torch.tensor([*t.prompt_ids, *t.token_ids])
    with torch.no_grad():
        logp = hf(ids[None]).logits[0].float().log_softmax(-1)
    where = [len(t.prompt_ids) + i for i, m in enumerate(t.sampled_mask) if m]
    assert w.score([t])[0] == pytest.approx([logp[i - 1, ids[i]].item() for i in where], abs=1e-4)


def test_an_exported_k3_loads_here_and_the_newest_complete_checkpoint_is_taken(tmp_path):
    w = worker()
    w.save(tmp_path / "checkpoints" / "step-000009")
    w.sft_step(make_conversations(1))
    w.save(tmp_path / "checkpoints" / "step-000010")
    (tmp_path / "checkpoints" / "step-000011").mkdir()  # nothing in it: a kill before anything was written
    assert latest_checkpoint(tmp_path).name == "step-000010"
    folder = export(tmp_path, tmp_path / "out")
    loaded = load_model(ModelConfig(path=str(folder)))
    assert checksum(loaded.named_weights()) == checksum(w.named_weights())


def test_a_model_is_packed_as_it_was_trained_unless_said_otherwise(tmp_path):
    scheme = QatConfig(targets=("experts", "*.mlp.*_proj"), rule="even")
    trained = worker(model=ModelConfig(qat=scheme))
    trained.save(tmp_path / "trained")
    packer = packer_for(tmp_path / "trained")
    assert (packer.targets, packer.rule) == (scheme.targets, "even")
    folder = export(tmp_path / "trained", tmp_path / "out", form="mxfp4", packer=packer)
    masters = dict(trained.named_weights())
    served = dict(load_model(ModelConfig(path=str(folder))).named_weights())
    packed = [n for n in masters if ".experts." in n or ".mlp." in n]
    assert packed
    assert all(torch.equal(served[n].float(), fake_quantise(masters[n], rule="even").float()) for n in packed)
    assert packer_for(tmp_path / "trained", ("experts",), "floor").rule == "floor"
    worker().save(tmp_path / "plain")
    assert (packer_for(tmp_path / "plain").targets, packer_for(tmp_path / "plain").rule) == (
        ("experts",),
        "ceil",
    )


def test_what_cannot_be_exported_is_said_in_one_sentence(tmp_path):
    with pytest.raises(UserError, match="no checkpoint to export"):
        export(tmp_path, tmp_path / "out")
    worker().save(tmp_path / "c")
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="exists already"):
        export(tmp_path / "c", tmp_path / "out")


def test_lora_trains_adapters_only_and_publishes_merged_weights():
    peft = pytest.importorskip("peft")
    assert peft
    base = {n: t.clone() for n, t in tiny_llama().named_weights()}
    w = worker(model=tiny_llama(), lora=LoraConfig(rank=4, target_modules=("q_proj", "down_proj")))
    assert all("lora_" in n for n in w.parameters)
    assert {n: t.shape for n, t in w.named_weights()} == {n: t.shape for n, t in base.items()}
    assert all(torch.equal(t, base[n]) for n, t in w.named_weights())  # nothing trained yet
    w.sft_step(make_conversations(1))
    w.sft_step(make_conversations(2))
    merged = dict(w.named_weights())
    changed = {n for n, t in merged.items() if not torch.equal(t, base[n])}
    assert changed == {n for n in base if "q_proj" in n or "down_proj" in n}
    plain = worker(model=tiny_llama())
    plain.model.load_named_weights(merged.items())
    data = make_trajectories(5)
    for a, b in zip(w.score(data), plain.score(data), strict=True):
        assert a == pytest.approx(b, abs=1e-5)


def test_lora_checkpoints_resume(tmp_path):
    pytest.importorskip("peft")
    config = {"lora": LoraConfig(rank=4)}
    w = worker(model=tiny_llama(), **config)
    w.sft_step(make_conversations(1))
    w.save(tmp_path / "a")
    again = worker(model=tiny_llama(), **config)
    again.load(tmp_path / "a")
    w.sft_step(make_conversations(2))
    again.sft_step(make_conversations(2))
    assert checksum(w.named_weights()) == checksum(again.named_weights())


def test_lora_of_a_model_that_is_not_hugging_faces_is_refused():
    with pytest.raises(UserError, match="Hugging Face models"):
        worker(model=nano(), lora=LoraConfig())
    with pytest.raises(UserError, match="no module is called 'nothing'"):
        worker(model=tiny_llama(), lora=LoraConfig(target_modules=("nothing",)))
