"""The released checkpoint's format: every name and shape of k3-full, its totals, and packed experts on load."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from k3rl.errors import UserError
from k3rl.models import ModelConfig, build_model, load_model, save_model
from k3rl.models.checkpoint import INDEX, SINGLE, read_tensors
from k3rl.models.config import config_json, parse_k3_config, preset
from k3rl.models.k3.model import K3Model
from k3rl.quant import unpack_mxfp4

# Released text tensors (spec/05 §2), layer numbers and experts left out: name, shape, type; BF16 unless stated.
F32, BF16 = torch.float32, torch.bfloat16
OUTSIDE = {
    "language_model.model.embed_tokens.weight": (163840, 7168),
    "language_model.lm_head.weight": (163840, 7168),
    "language_model.model.norm.weight": (7168,),
    "language_model.model.output_attn_res_norm.weight": (7168,),
    "language_model.model.output_attn_res_proj.weight": (1, 7168),
}
EVERY_LAYER = {
    "input_layernorm.weight": (7168,),
    "post_attention_layernorm.weight": (7168,),
    "self_attention_res_norm.weight": (7168,),
    "self_attention_res_proj.weight": (1, 7168),
    "mlp_res_norm.weight": (7168,),
    "mlp_res_proj.weight": (1, 7168),
    "self_attn.g_proj.weight": (12288, 7168),
    "self_attn.o_proj.weight": (7168, 12288),
}
KDA = {
    **{f"self_attn.{x}_proj.weight": (12288, 7168) for x in "qkv"},
    **{f"self_attn.{x}_conv1d.weight": (12288, 1, 4) for x in "qkv"},
    "self_attn.f_a_proj.weight": (128, 7168),
    "self_attn.f_b_proj.weight": (12288, 128),
    "self_attn.A_log": (128,),
    "self_attn.dt_bias": (12288,),
    "self_attn.b_proj.weight": (96, 7168),
    "self_attn.o_norm.weight": (128,),
}
MLA = {
    "self_attn.q_a_proj.weight": (1536, 7168),
    "self_attn.q_a_layernorm.weight": (1536,),
    "self_attn.q_b_proj.weight": (18432, 1536),
    "self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
    "self_attn.kv_a_layernorm.weight": (512,),
    "self_attn.kv_b_proj.weight": (24576, 512),
}
DENSE = {
    "mlp.gate_proj.weight": (33792, 7168),
    "mlp.up_proj.weight": (33792, 7168),
    "mlp.down_proj.weight": (7168, 33792),
}
MOE = {
    "block_sparse_moe.gate.weight": (896, 7168),
    "block_sparse_moe.gate.e_score_correction_bias": (896,),
    "block_sparse_moe.routed_expert_down_proj.weight": (3584, 7168),
    "block_sparse_moe.routed_expert_norm.weight": (3584,),
    "block_sparse_moe.routed_expert_up_proj.weight": (7168, 3584),
    "block_sparse_moe.shared_experts.gate_proj.weight": (6144, 7168),
    "block_sparse_moe.shared_experts.up_proj.weight": (6144, 7168),
    "block_sparse_moe.shared_experts.down_proj.weight": (7168, 6144),
}
EXPERT = {"w1.weight": (3072, 3584), "w2.weight": (3584, 3072), "w3.weight": (3072, 3584)}
FLOAT32 = re.compile(r"conv1d\.weight|A_log|dt_bias|o_norm\.weight|e_score_correction_bias")
FULL_ATTENTION = [*range(3, 92, 4), 92]  # 0-based

# The vision tower, which this project does not build: bfloat16 tensors of the released index.
VISION_TENSORS = 27 * 6 + 6
VISION_NUMBERS = 27 * (4608 * 1024 + 1024 * 1536 + 2 * 4096 * 1024 + 2 * 1024) + (
    1024 * 3 * 14 * 14 + 64 * 64 * 1024 + 1024 + 4096 * 4096 + 7168 * 4096 + 7168
)


def released() -> dict[str, tuple[int, ...]]:
    names = dict(OUTSIDE)
    for i in range(93):
        parts = EVERY_LAYER | (MLA if i in FULL_ATTENTION else KDA) | (MOE if i else DENSE)
        names |= {f"language_model.model.layers.{i}.{n}": s for n, s in parts.items()}
        for e in range(896 if i else 0):
            base = f"language_model.model.layers.{i}.block_sparse_moe.experts.{e}"
            names |= {f"{base}.{n}": s for n, s in EXPERT.items()}
    return names


@cache
def full() -> K3Model:
    return K3Model(preset("k3-full"), torch.bfloat16, "meta")


def test_k3_full_has_every_released_name_shape_and_type() -> None:
    expected = released()
    seen = Counter()
    for name, tensor in full().named_weights():
        assert tuple(tensor.shape) == expected[name], name
        assert tensor.dtype == (F32 if FLOAT32.search(name) else BF16), name
        seen[name] += 1
    assert seen.keys() == expected.keys()
    assert set(seen.values()) == {1}


def test_k3_full_counts_add_up_to_the_published_totals() -> None:
    """2.78T parameters are all text tensors. 104.2B active per token leave out the input embedding (a look-up) and
    880 of each layer's 896 experts; head, router, shared experts, latent projections and norms all count."""
    numbers = {name: t.numel() for name, t in full().state_dict().items()}
    total = sum(numbers.values())
    experts = sum(n for name, n in numbers.items() if ".experts.w" in name)
    active = total - experts + experts * 16 // 896 - numbers["model.embed_tokens.weight"]
    assert f"{total / 1e12:.2f}" == "2.78"
    assert f"{active / 1e9:.1f}" == "104.2"


def test_k3_full_equals_the_released_index_to_the_byte() -> None:
    """96 shards, 497,220 tensors, 1,560,860,324,864 bytes (spec/04 §3): packed experts are two tensors each."""
    expert_tensors = 92 * 896 * 3
    assert sum(1 for _ in full().named_weights()) + expert_tensors + VISION_TENSORS == 497_220
    size = 2 * VISION_NUMBERS
    for name, tensor in full().state_dict().items():
        packed = ".experts.w" in name
        size += tensor.numel() * 17 // 32 if packed else tensor.numel() * tensor.element_size()
    assert size == 1_560_860_324_864


def test_sizes_of_the_stand_ins() -> None:
    count = lambda name: sum(p.numel() for p in K3Model(preset(name), BF16, "meta").parameters())  # noqa: E731
    assert 0.9e6 < count("k3-nano") < 1.1e6
    assert 2.5e8 < count("k3-mini") < 3.5e8


def test_the_released_config_is_read_and_written_with_its_own_field_names() -> None:
    config = preset("k3-full")
    written = config_json(config, "bfloat16")
    assert written["model_type"] == "kimi_k3"
    text = written["text_config"]
    assert (text["num_experts"], text["num_experts_per_token"], text["moe_intermediate_size"]) == (
        896,
        16,
        3072,
    )
    assert text["linear_attn_config"]["full_attn_layers"][-3:] == [88, 92, 93]
    assert len(text["linear_attn_config"]["kda_layers"]) == 69
    assert parse_k3_config(json.loads(json.dumps(written)), "x") == config


def _tiny_folder(tmp_path: Path, shard_bytes: int = 4 << 30) -> tuple[Path, K3Model]:
    model = build_model(ModelConfig(path="k3-nano"), seed=3)
    save_model(model, tmp_path, shard_bytes=shard_bytes)
    assert isinstance(model, K3Model)
    return tmp_path, model


@pytest.mark.parametrize("shard_bytes", [4 << 30, 300_000])
def test_saved_and_loaded_weights_are_identical(tmp_path: Path, shard_bytes: int) -> None:
    folder, model = _tiny_folder(tmp_path, shard_bytes)
    assert (folder / INDEX).exists() == (shard_bytes < 1 << 30)
    loaded = load_model(ModelConfig(path=str(folder)))
    for (name, a), (other, b) in zip(model.named_weights(), loaded.named_weights(), strict=True):
        assert name == other
        assert torch.equal(a, b), name


def pack(codes: Tensor, exponents: Tensor) -> dict[str, Tensor]:
    """Nibbles [out, in] and scale bytes [out, in/32] as the release stores them: even columns in the low nibble."""
    return {
        "weight_packed": (codes[:, 0::2] | (codes[:, 1::2] << 4)).to(torch.uint8),
        "weight_scale": exponents.to(torch.uint8),
    }


def decoded(codes: Tensor, exponents: Tensor) -> Tensor:
    """By the format's definition, number by number: sign bit, two exponent bits of bias 1, one mantissa bit."""
    out = torch.zeros(codes.shape, dtype=torch.float64)
    for r, row in enumerate(codes.tolist()):
        for c, code in enumerate(row):
            sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
            value = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
            out[r, c] = (-1) ** sign * value * 2.0 ** (int(exponents[r, c // 32]) - 127)
    return out


def random_packed(seed: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, columns), generator=generator)
    return codes, torch.randint(100, 140, (rows, columns // 32), generator=generator)


def test_packed_experts_are_read_exactly(tmp_path: Path) -> None:
    folder, model = _tiny_folder(tmp_path)
    weights = {n: t.clone() for n, t in model.named_weights()}
    expected = {}
    for i, name in enumerate(n for n in list(weights) if ".experts." in n):
        del weights[name]
        codes, exponents = random_packed(i, *dict(model.named_weights())[name].shape)
        base = name.removesuffix(".weight")
        weights |= {f"{base}.{k}": v.contiguous() for k, v in pack(codes, exponents).items()}
        expected[name] = (codes, exponents)
    save_file(weights, folder / SINGLE)
    loaded = dict(load_model(ModelConfig(path=str(folder))).named_weights())
    for name, (codes, exponents) in list(expected.items())[::17]:
        assert torch.equal(loaded[name].double(), decoded(codes, exponents)), name


def test_malformed_packed_experts_are_refused(tmp_path: Path) -> None:
    codes, exponents = random_packed(0, 4, 64)
    pair = pack(codes, exponents)
    with pytest.raises(UserError, match="not an MXFP4 pair"):
        unpack_mxfp4(pair["weight_packed"], pair["weight_scale"][:, :1])
    pair["weight_scale"][0, 0] = 255
    save_file({f"w1.{k}": v.contiguous() for k, v in pair.items()}, tmp_path / SINGLE)
    with pytest.raises(UserError, match="NaN"):
        dict(read_tensors(tmp_path))


def _edit(folder: Path, change) -> None:
    raw = json.loads((folder / "config.json").read_text())
    change(raw)
    (folder / "config.json").write_text(json.dumps(raw))


CONFIG_MISTAKES = {
    "unknown field": (
        lambda c: c["text_config"].update(num_expert=8),
        "unknown field 'num_expert'; did you mean",
    ),
    "nested unknown": (
        lambda c: c["text_config"]["linear_attn_config"].update(head_dims=8),
        "unknown field 'linear_attn_config.head_dims'",
    ),
    "missing": (lambda c: c["text_config"].pop("q_lora_rank"), "q_lora_rank"),
    "too many chosen": (
        lambda c: c["text_config"].update(num_experts_per_token=99),
        "99 exceeds num_experts 8",
    ),
    "layer twice": (
        lambda c: c["text_config"]["linear_attn_config"].update(kda_layers=[1, 2, 3, 4]),
        "both in full_attn_layers and kda_layers",
    ),
    "layer nowhere": (lambda c: c["text_config"].update(num_hidden_layers=5), "must cover layers 1 to 5"),
    "rotary": (lambda c: c["text_config"].update(mla_use_nope=False), "mla_use_nope"),
    "decay too deep": (
        lambda c: c["text_config"]["linear_attn_config"].update(gate_lower_bound=-9),
        "gate_lower_bound",
    ),
    "two values": (lambda c: c.update(eos_token_id=7), "'eos_token_id' is 7 at the top"),
}


@pytest.mark.parametrize("mistake", CONFIG_MISTAKES)
def test_a_bad_config_is_one_sentence_that_names_the_field(tmp_path: Path, mistake: str) -> None:
    folder, _ = _tiny_folder(tmp_path)
    change, words = CONFIG_MISTAKES[mistake]
    _edit(folder, change)
    with pytest.raises(UserError) as error:
        load_model(ModelConfig(path=str(folder)))
    assert words in str(error.value)
    assert "config.json" in str(error.value)
    assert "\n" not in str(error.value)


def test_bad_weights_are_one_sentence_that_names_the_tensor_or_the_shard(tmp_path: Path) -> None:
    folder, model = _tiny_folder(tmp_path, shard_bytes=300_000)
    first = sorted(folder.glob("model-*.safetensors"))[0]
    kept = first.read_bytes()
    first.unlink()
    with pytest.raises(UserError, match=f"shard '{first.name}', named by the index, is missing"):
        load_model(ModelConfig(path=str(folder)))
    first.write_bytes(kept[:100])
    with pytest.raises(UserError, match="not a readable safetensors file"):
        load_model(ModelConfig(path=str(folder)))

    name = "language_model.model.layers.1.self_attn.q_proj.weight"
    weights = {n: t.clone() for n, t in model.named_weights()}
    for change, words in (
        ({name: torch.zeros(3, 5)}, rf"'{name}' is \[3, 5\], config.json asks for \[128, 128\]"),
        ({name: torch.zeros(128, 128, dtype=torch.int32)}, "torch.int32, expected floating point"),
        ({"language_model.extra": torch.zeros(1)}, "'language_model.extra' does not belong"),
        ({name: None}, f"1 tensors of the model are missing, among them '{name}'"),
    ):
        for old in folder.glob("model*"):
            old.unlink()
        save_file({n: t for n, t in (weights | change).items() if t is not None}, folder / SINGLE)
        with pytest.raises(UserError, match=words):
            load_model(ModelConfig(path=str(folder)))
