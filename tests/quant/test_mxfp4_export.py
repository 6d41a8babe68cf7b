"""Exported MXFP4 checkpoints: bytes that stay, values that compressed-tensors reads as we do, clear refusals."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from k3rl.errors import UserError
from k3rl.models import ModelConfig, build_model, load_model, save_model
from k3rl.models.loading import float32_weights
from k3rl.quant import fake_quantise, unpack_mxfp4
from k3rl.quant.config import QatConfig
from k3rl.quant.export import Packer
from k3rl.trainer.checkpoint import FORMAT
from k3rl.trainer.export import export

NANO = ModelConfig(overrides={"num_hidden_layers": 2, "attn_res_block_size": 1})


def checkpoint(folder: Path, model) -> Path:
    save_model(model, folder / "model")
    (folder / "trainer.json").write_text(json.dumps({"format": FORMAT, "version": 3}))
    return folder


@pytest.fixture
def trained(tmp_path):
    return build_model(NANO, seed=1), tmp_path


def test_experts_are_packed_and_the_rest_is_bfloat16(trained):
    model, folder = trained
    packer = Packer()
    out = export(checkpoint(folder / "a", model), folder / "out", form="mxfp4", packer=packer)
    stored = load_file(out / "model.safetensors")
    kept = float32_weights(out)
    for name, weight in model.named_weights():
        base = name.removesuffix(".weight")
        if ".experts." in name and "shared" not in name:
            values = unpack_mxfp4(
                stored[f"{base}.weight_packed"], stored[f"{base}.weight_scale"], torch.float32
            )
            assert torch.equal(values, fake_quantise(weight.detach()))
        elif name in kept:
            assert torch.equal(stored[name], weight.detach())
        else:
            assert torch.equal(stored[name], weight.detach().to(torch.bfloat16))
    config = json.loads((out / "config.json").read_text())
    declared = config["text_config"]["quantization_config"]
    assert declared["format"] == "mxfp4-pack-quantized"
    assert declared["config_groups"]["group_0"]["weights"]["group_size"] == 32
    assert config["quantization_config"] == declared
    facts = json.loads((out / "k3rl.json").read_text())
    assert facts["relative_error"] == packer.errors
    assert all(0.05 < error < 0.2 for error in packer.errors.values())


@pytest.mark.parametrize("rule", ["ceil", "floor", "even"])
@pytest.mark.parametrize("targets", [("experts",), ("experts", "*.mlp.*_proj", "*.self_attn.o_proj")])
def test_export_load_export_keeps_every_byte(trained, rule, targets):
    model, folder = trained
    packers = [Packer(targets, rule) for _ in range(2)]
    first = export(checkpoint(folder / "a", model), folder / "one", form="mxfp4", packer=packers[0])
    loaded = load_model(ModelConfig(path=str(first), dtype="bfloat16"))
    second = export(checkpoint(folder / "b", loaded), folder / "two", form="mxfp4", packer=packers[1])
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    packed = {
        n.removesuffix(".weight_packed") for n in load_file(first / "model.safetensors") if "packed" in n
    }
    assert any(".mlp." in name for name in packed) == (len(targets) > 1)
    assert set(packers[1].errors.values()) == {0.0}  # what was read was on the grid already


def test_the_exported_model_is_the_one_that_was_trained_with_quantisation(trained):
    _, folder = trained
    model = build_model(NANO, seed=1, dtype=torch.bfloat16)
    trainer = load_model(
        ModelConfig(path=str(checkpoint(folder / "a", model) / "model"), qat=QatConfig(), dtype="bfloat16")
    )
    out = export(folder / "a", folder / "out", form="mxfp4")
    served = load_model(ModelConfig(path=str(out), dtype="bfloat16"))
    ids = torch.randint(3, 500, (80,))
    with torch.no_grad():
        assert torch.equal(trainer(ids, torch.tensor([0, 80])), served(ids, torch.tensor([0, 80])))


def test_compressed_tensors_reads_our_bytes_as_we_do(trained):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationConfig

    model, folder = trained
    out = export(checkpoint(folder / "a", model), folder / "out", form="mxfp4")
    declared = json.loads((out / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(declared).config_groups["group_0"]
    stored = load_file(out / "model.safetensors")
    names = [n.removesuffix(".weight_packed") for n in stored if n.endswith(".weight_packed")]
    assert len(names) == 8 * 3
    for base in names:
        pair = {k: stored[f"{base}.{k}"] for k in ("weight_packed", "weight_scale")}
        theirs = MXFP4PackedCompressor.decompress(dict(pair), scheme)["weight"]
        ours = unpack_mxfp4(pair["weight_packed"], pair["weight_scale"], torch.float32)
        assert torch.equal(theirs.float(), ours)


def test_bf16_loads_and_nothing_to_pack_is_said(trained):
    model, folder = trained
    source = checkpoint(folder / "a", model)
    loaded = dict(
        load_model(ModelConfig(path=str(export(source, folder / "out", form="bf16")))).named_weights()
    )
    for name, weight in model.named_weights():
        if name not in float32_weights(folder / "out"):
            assert torch.equal(loaded[name], weight.to(torch.bfloat16).float())
    with pytest.raises(UserError, match="nothing to pack"):
        export(source, folder / "none", form="mxfp4", packer=Packer(targets=("*.fc1",)))
    assert not (folder / "none").exists()
    with pytest.raises(UserError, match="exists already"):
        export(source, folder / "out")
