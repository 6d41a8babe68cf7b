"""The `LanguageModel` contract, on K3 and transformers models: packed = separate, cached = whole, strict weights."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from k3rl.models.base import LanguageModel
from k3rl.models.config import preset
from k3rl.models.hf import HFModel
from k3rl.models.k3.model import K3Model


def k3(dtype: torch.dtype = torch.float32) -> K3Model:
    model = K3Model(preset("k3-nano", vocab_size=96), dtype)
    model.reset_parameters(0)
    return model.eval()


def _small(kind: type) -> dict[str, object]:
    return {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.2,
    }  # fmt: skip


def llama() -> HFModel:
    torch.manual_seed(0)
    return HFModel(LlamaForCausalLM(LlamaConfig(**_small(LlamaConfig), tie_word_embeddings=True))).eval()


def qwen3_sliding() -> HFModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        **_small(Qwen3Config),
        use_sliding_window=True,
        sliding_window=7,
        max_window_layers=1,
        tie_word_embeddings=False,
    )
    return HFModel(Qwen3ForCausalLM(config)).eval()


MODELS = {"k3": k3, "llama": llama, "qwen3-sliding": qwen3_sliding}
each_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())


def ragged(seed: int, n: int = 5, longest: int = 70) -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (n,), generator=generator).tolist()
    return [torch.randint(0, 96, (length,), generator=generator) for length in lengths], cumulative(lengths)


def cumulative(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def alone(model: LanguageModel, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, torch.tensor([0, len(ids)]))


def gradients(model: LanguageModel) -> dict[str, torch.Tensor]:
    """Hidden states do not reach an untied head, and layer 0's attention residual has nothing to attend to."""
    without = ("layers.0.self_attention_res", "lm_head")
    out = {n: p.grad.clone() for n, p in model.named_parameters() if not any(w in n for w in without)}
    assert all(g.isfinite().all() for g in out.values())
    return out


@each_model
@pytest.mark.parametrize("seed", [0, 1])
def test_packed_equals_separate(make, seed: int) -> None:
    model = make()
    sequences, cu = ragged(seed)
    packed = model(torch.cat(sequences), cu)
    apart = torch.cat([alone(model, s) for s in sequences])
    torch.testing.assert_close(packed, apart, rtol=1e-5, atol=1e-5)


@each_model
def test_packed_gradients_equal_the_sum_of_separate_ones(make) -> None:
    model = make().train()
    sequences, cu = ragged(3)
    weight = torch.randn(int(cu[-1]), model.hidden_size, generator=torch.Generator().manual_seed(1))
    (model(torch.cat(sequences), cu) * weight).sum().backward()
    packed = gradients(model)
    model.zero_grad()
    for i, s in enumerate(sequences):
        (alone(model, s) * weight[cu[i] : cu[i + 1]]).sum().backward()
    for name, gradient in gradients(model).items():
        scale = packed[name].abs().max().clamp_min(1e-3)
        error = float((gradient - packed[name]).abs().max() / scale)
        assert error < 3e-5, (name, error)


@each_model
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_prefill_cut_anywhere_then_decode_equals_the_whole(make, seed: int) -> None:
    """Ragged pieces of several sequences, single tokens among them, into shuffled slots."""
    model = make()
    sequences, _ = ragged(seed, n=4, longest=60)
    generator = torch.Generator().manual_seed(100 + seed)
    cache = model.make_cache(6, 64)
    slots = torch.randperm(6, generator=generator)[:4].tolist()
    done = [0] * 4
    pieces: list[list[torch.Tensor]] = [[] for _ in sequences]
    with torch.no_grad():
        while any(d < len(s) for d, s in zip(done, sequences)):
            live = [i for i, s in enumerate(sequences) if done[i] < len(s)]
            ones = bool(torch.rand((), generator=generator) < 0.4)
            take = [
                1
                if ones
                else min(int(torch.randint(1, 24, (), generator=generator)), len(sequences[i]) - done[i])
                for i in live
            ]
            ids = torch.cat([sequences[i][done[i] : done[i] + n] for i, n in zip(live, take)])
            out = model(ids, cumulative(take), cache, torch.tensor([slots[i] for i in live]))
            for i, n, part in zip(live, take, out.split(take)):
                done[i] += n
                pieces[i].append(part)
        for i, s in enumerate(sequences):
            assert cache.lengths[slots[i]] == len(s)
            torch.testing.assert_close(torch.cat(pieces[i]), alone(model, s), rtol=1e-5, atol=1e-5)


@each_model
def test_cache_slots_copy_export_import_and_reset(make) -> None:
    model = make()
    ids = torch.randint(0, 96, (31,), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        whole = alone(model, ids)
        first, other = model.make_cache(3, 40), model.make_cache(2, 50)
        model(ids[:20], torch.tensor([0, 20]), first, torch.tensor([1]))
        first.copy(1, [0, 2])
        other.import_(1, first.export(1))
        rest = torch.tensor([0, 11])
        for cache, slot in ((first, 0), (first, 2), (other, 1), (first, 1)):
            torch.testing.assert_close(
                model(ids[20:], rest, cache, torch.tensor([slot])), whole[20:], rtol=1e-5, atol=1e-5
            )
        first.reset([1])
        fresh = model(ids, torch.tensor([0, 31]), first, torch.tensor([1]))
        torch.testing.assert_close(fresh, whole, rtol=1e-5, atol=1e-5)


@each_model
def test_a_sequence_that_outgrows_its_slot_is_refused(make) -> None:
    model = make()
    with pytest.raises(ValueError, match="overflows a cache of 8"):
        model(torch.zeros(9, dtype=torch.int64), torch.tensor([0, 9]), model.make_cache(1, 8))


def test_malformed_cu_seqlens_are_refused() -> None:
    model = k3()
    ids = torch.zeros(6, dtype=torch.int64)
    for cu in ([0, 3, 3, 6], [0, 5], [1, 6], [0, 4, 2, 6]):
        with pytest.raises(ValueError, match="cu_seqlens"):
            model(ids, torch.tensor(cu))


@each_model
def test_weights_load_strictly_and_atomically(make) -> None:
    model, other = make(), make()
    with torch.no_grad():
        for _, tensor in other.named_weights():
            tensor.add_(1.0)
    new = list(other.named_weights())
    before = [t.clone() for _, t in model.named_weights()]
    name, tensor = new[1]
    wrong = {
        "twice": [*new, new[0]],
        "did not come": new[:-1],
        "not one of": [*new, ("nonsense", tensor)],
        "shape": [new[0], (name, tensor[..., :1].clone()), *new[2:]],
        "expected torch.float32": [new[0], (name, tensor.to(torch.bfloat16)), *new[2:]],
    }
    for reason, weights in wrong.items():
        with pytest.raises(ValueError, match=reason):
            model.load_named_weights(weights)
        assert all(torch.equal(a, b) for a, (_, b) in zip(before, model.named_weights()))
    model.load_named_weights(new)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(new, model.named_weights()))


def test_tied_head_is_one_weight_and_stays_tied() -> None:
    model = llama()
    names = [n for n, _ in model.named_weights()]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    model.load_named_weights([(n, torch.full_like(t, 0.5)) for n, t in model.named_weights()])
    assert model.head_weight().data_ptr() == model.hf.model.embed_tokens.weight.data_ptr()
    assert (model.head_weight() == 0.5).all()


def test_transformers_own_attention_gives_the_same_numbers() -> None:
    for make, cls in ((llama, LlamaForCausalLM), (qwen3_sliding, Qwen3ForCausalLM)):
        model = make()
        plain = cls(model.hf.config).eval()
        plain.load_state_dict(model.hf.state_dict())
        plain.set_attn_implementation("eager")
        ids = torch.randint(0, 96, (33,), generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            torch.testing.assert_close(
                model.logits(alone(model, ids)), plain(ids[None]).logits[0], rtol=1e-4, atol=1e-4
            )


@each_model
def test_activation_checkpointing_changes_no_gradient(make) -> None:
    model = make().train()
    sequences, cu = ragged(7, n=3, longest=30)
    grads = []
    for on in (False, True):
        model.activation_checkpointing = on
        model.zero_grad()
        model(torch.cat(sequences), cu).square().sum().backward()
        grads.append(gradients(model))
    for name in grads[0]:
        torch.testing.assert_close(
            grads[1][name], grads[0][name], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
