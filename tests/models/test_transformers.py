"""K3 checkpoints through transformers' Auto classes: same weights, same numbers, same files again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

import k3rl.models.auto  # noqa: F401  (registers)
from k3rl.errors import UserError
from k3rl.models import ModelConfig, build_model, load_model, save_model
from k3rl.models.k3.model import K3Model


def made(folder: Path, dtype: str = "float32") -> K3Model:
    model = build_model(ModelConfig(path="k3-nano", dtype=dtype), seed=5)
    save_model(model, folder, shard_bytes=1_000_000)
    assert isinstance(model, K3Model)
    return model


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    out = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as handle:
            out |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_save_load_in_transformers_save_again_is_identical(tmp_path: Path, dtype: str) -> None:
    made(tmp_path / "a", dtype)
    hf, info = AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype="auto", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert hf.dtype == getattr(torch, dtype)
    hf.save_pretrained(tmp_path / "b")
    a, b = tensors(tmp_path / "a"), tensors(tmp_path / "b")
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name], b[name]), name
    first, second = (json.loads((tmp_path / x / "config.json").read_text()) for x in "ab")
    second.pop("transformers_version", None)
    assert first == second
    again = load_model(ModelConfig(path=str(tmp_path / "b"), dtype=dtype))
    assert all(torch.equal(a[n], t) for n, t in again.named_weights())


def test_logits_loss_and_padding_equal_ours(tmp_path: Path) -> None:
    ours = made(tmp_path)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(0)
    one, two = (torch.randint(3, 512, (n,), generator=generator) for n in (9, 5))
    with torch.no_grad():
        expected = [ours.logits(ours(x, torch.tensor([0, len(x)]))) for x in (one, two)]
        for left in (True, False):
            pad = torch.full((4,), 2)
            short = torch.cat([pad, two] if left else [two, pad])
            mask = torch.tensor([[1] * 9, [0] * 4 + [1] * 5 if left else [1] * 5 + [0] * 4])
            out = hf(input_ids=torch.stack([one, short]), attention_mask=mask).logits
            torch.testing.assert_close(out[0], expected[0], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(out[1, 4:] if left else out[1, :5], expected[1], rtol=1e-4, atol=1e-5)
        loss = hf(input_ids=one[None], labels=one[None]).loss
    reference = torch.nn.functional.cross_entropy(expected[0][:-1], one[1:])
    torch.testing.assert_close(loss, reference)


def test_generate_with_the_cache_equals_the_longest_way_round(tmp_path: Path) -> None:
    ours = made(tmp_path)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path)
    prompt = torch.randint(3, 512, (7,), generator=torch.Generator().manual_seed(1))
    ids = prompt.clone()
    with torch.no_grad():
        for _ in range(12):
            nxt = ours.logits(ours(ids, torch.tensor([0, len(ids)])))[-1].argmax()
            ids = torch.cat([ids, nxt[None]])
    padded = torch.stack([torch.cat([torch.full((3,), 2), prompt]), torch.arange(3, 13)])
    mask = torch.tensor([[0] * 3 + [1] * 7, [1] * 10])
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 2}
    for use_cache in (True, False):
        out = hf.generate(input_ids=padded, attention_mask=mask, use_cache=use_cache, **settings)
        assert out[0, 3:].tolist() == ids.tolist()


def test_a_model_built_from_a_config_is_initialised(tmp_path: Path) -> None:
    made(tmp_path)
    hf = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    spread = hf.language_model.model.layers[1].self_attn.q_proj.weight.detach().std()
    assert 0.07 < float(spread) < 0.09
    assert all(p.isfinite().all() for p in hf.parameters())


def test_a_bad_config_says_what_is_wrong(tmp_path: Path) -> None:
    made(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config.text_config.num_experts_per_token = 99
    with pytest.raises(UserError, match="99 exceeds num_experts 8"):
        AutoModelForCausalLM.from_config(config)
