"""K3's parts against their definitions: attention residuals in all forms, SiTU, the router, experts, MLA, MTP."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from kda_reference import relative
from torch import Tensor

from k3rl.models import Layout
from k3rl.models.config import preset
from k3rl.models.k3.attention import MLAttention
from k3rl.models.k3.layers import (
    AttnRes,
    Values,
    attn_res_full,
    attn_res_phase_one,
    attn_res_phase_two,
    situ_glu,
)
from k3rl.models.k3.model import K3Model
from k3rl.models.k3.moe import Experts, LatentMoE, Router
from k3rl.models.k3.mtp import mtp_hidden, mtp_loss
from k3rl.models.k3.routing import Routing


def k3(seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: object) -> K3Model:
    """A small model whose residual queries and router biases are not zero."""
    model = K3Model(preset("k3-nano", vocab_size=96, **overrides), dtype)
    model.reset_parameters(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, AttnRes):
                module.proj.weight.copy_(torch.randn(module.proj.weight.shape, generator=generator) * 0.5)
            elif isinstance(module, Router):
                module.e_score_correction_bias.copy_(
                    torch.randn(module.weight.shape[0], generator=generator) * 0.1
                )
    return model.eval()


def tokens(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 96, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    return ids, torch.tensor([0, *lengths]).cumsum(0)


# -- attention residuals


def mixed(blocks: list[Tensor], running: Tensor, residual: AttnRes, eps: float) -> Tensor:
    """One attention residual as spec/05 §5 writes it."""
    V = torch.stack([*blocks, running]).double()
    rms = V / (V.square().mean(-1, keepdim=True) + eps).sqrt()
    scores = torch.einsum("jtd,d->jt", rms, residual.norm.weight.double() * residual.proj.weight[0].double())
    return torch.einsum("jt,jtd->td", scores.softmax(0), V).to(running.dtype)


@torch.no_grad()
def forward_by_the_book(model: K3Model, ids: Tensor, layout: Layout) -> Tensor:
    """The decoder's loop of spec/05 §5, with the model's own sublayers."""
    eps, block = model.config.rms_norm_eps, model.config.attn_res_block_size
    blocks: list[Tensor] = []
    p: Tensor | None = model.model.embed_tokens(ids)
    routing = Routing()
    for i, layer in enumerate(model.model.layers):
        h = mixed(blocks, p, layer.self_attention_res, eps) if blocks else p
        if i % block == 0:
            blocks.append(p)
            p = None
        a = layer.self_attn(layer.input_layernorm(h), layout)
        p = a if p is None else p + a
        h = layer.post_attention_layernorm(mixed(blocks, p, layer.mlp_res, eps))
        p = p + (layer.block_sparse_moe(h, routing) if layer.is_moe else layer.mlp(h))
    return model.model.norm(mixed(blocks, p, model.model.output_attn_res, eps))


@pytest.mark.parametrize(("layers", "block"), [(4, 2), (5, 2), (6, 4), (3, 1), (3, 8)])
def test_the_decoder_joins_its_layers_as_specified(layers: int, block: int) -> None:
    model = k3(num_hidden_layers=layers, attn_res_block_size=block)
    ids, cu = tokens([17, 30])
    expected = forward_by_the_book(model, ids, Layout(47, cu, ids.device))
    with torch.no_grad():
        hidden, values = model.forward_values(ids, Layout(47, cu, ids.device))
        model.model.two_phase = True
        two_phase = model(ids, cu)
    assert relative(hidden, expected) < 1e-5
    assert relative(two_phase, expected) < 1e-5
    assert len(values.sums) == math.ceil(layers / block) + 1, (
        "the embedding, finished blocks and the open one"
    )


@pytest.mark.parametrize("seed", range(5))
def test_both_phases_merge_to_the_full_form(seed: int) -> None:
    """Scores so large that exponentials without a running maximum would overflow."""
    generator = torch.Generator().manual_seed(seed)
    sums = torch.randn(5, 7, 16, generator=generator)
    queries = 60 * torch.randn(3, 16, generator=generator)
    values = Values(1e-5)
    for s in sums[:4]:
        values.append(s)
    phase = attn_res_phase_one(values, queries)
    for i, query in enumerate(queries):
        got = attn_res_phase_two(tuple(x[i] for x in phase), query, sums[4], 1e-5)
        torch.testing.assert_close(got, attn_res_full(sums, query, 1e-5), rtol=1e-4, atol=1e-4)


def test_with_checkpointing_what_is_kept_grows_with_blocks_not_with_layers_times_blocks() -> None:
    """Counts [T, D] tensors saved for the backward pass: one running sum a layer, one sum a block."""
    counts = {}
    for layers in (4, 8):
        model = k3(num_hidden_layers=layers, attn_res_block_size=2).train()
        model.activation_checkpointing = True
        ids, cu = tokens([33])
        kept: dict[int, int] = {}

        def note(t: Tensor, kept: dict[int, int] = kept) -> Tensor:
            if t.shape == (33, 128):
                kept[t.untyped_storage().data_ptr()] = 1
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            hidden = model(ids, cu)
        counts[layers] = len(kept)
        hidden.sum().backward()
    assert counts[8] <= 8 + 4 + 6, counts
    assert counts[8] - counts[4] <= 4 + 2 + 1, counts


# -- SiTU, router, experts


def test_situ_is_bounded_smooth_and_swiglu_near_zero() -> None:
    wide = torch.linspace(-1e4, 1e4, 1001)
    assert float(situ_glu(wide, wide.flip(0), 4.0, 25.0).abs().max()) <= 100
    small = torch.linspace(-1e-2, 1e-2, 101, dtype=torch.float64)
    torch.testing.assert_close(situ_glu(small, small, 4.0, 25.0), F.silu(small) * small, rtol=1e-4, atol=1e-9)
    x = torch.full((), 30.0, dtype=torch.float64, requires_grad=True)
    situ_glu(torch.tensor(3.0, dtype=torch.float64), x, 4.0, 25.0).backward()
    assert float(x.grad) > 0, "beyond the cap a clamp's gradient would be zero"


def test_the_router_chooses_by_score_plus_bias_and_weighs_by_score_alone() -> None:
    config = preset("k3-nano", num_experts=12, num_experts_per_token=3)
    router = Router(config, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        router.weight.copy_(torch.randn(router.weight.shape, generator=generator) * 0.1)
        router.e_score_correction_bias.copy_(torch.randn(12, generator=generator))
    x = torch.randn(50, 128, generator=generator)
    ids, weights = router(x, Routing(), 0)
    for t in range(50):
        s = 1 / (1 + torch.exp(-(router.weight.double() @ x[t].double())))
        chosen = sorted(range(12), key=lambda e: -float((s[e] + router.e_score_correction_bias[e]).detach()))[
            :3
        ]
        assert sorted(ids[t].tolist()) == sorted(chosen)
        expected = s[ids[t]] / (s[ids[t]].sum() + 1e-20)
        torch.testing.assert_close(weights[t].double(), expected, rtol=1e-5, atol=1e-6)
    assert "e_score_correction_bias" not in dict(router.named_parameters())


def expert_inputs(T: int, dtype: torch.dtype, idle: int) -> tuple[Experts, Tensor, Tensor, Tensor]:
    experts = Experts(preset("k3-nano"), dtype, torch.device("cpu"))
    generator = torch.Generator().manual_seed(T)
    with torch.no_grad():
        for p in experts.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.2)
    order = torch.tensor([e for e in range(8) if e != idle])
    ids = order[torch.rand(T, 7, generator=generator).topk(2, -1).indices]
    return (
        experts,
        torch.randn(T, 64, generator=generator).to(dtype),
        ids,
        torch.rand(T, 2, generator=generator),
    )


@pytest.mark.parametrize("T", [1, 5, 200])
@pytest.mark.parametrize("path", ["auto", "grouped"])
def test_experts_sum_weighted_outputs_token_by_token(
    T: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The few-token, the sorted and the grouped path, forward and backward, with an expert that nobody takes."""
    experts, z, ids, weights = expert_inputs(T, torch.float32, idle=3)
    if path == "grouped":
        if not hasattr(F, "grouped_mm"):
            pytest.skip("this torch has no grouped_mm")
        monkeypatch.setattr("k3rl.models.k3.moe.FEW_TOKENS", 0)
        monkeypatch.setattr("k3rl.models.k3.moe._can_group", lambda *_: True)
    z.requires_grad_()
    up = torch.randn(T, 64, generator=torch.Generator().manual_seed(1))
    out = experts(z, ids, weights)
    (out * up).sum().backward()
    got = [out, z.grad, *(p.grad for p in experts.parameters())]

    w1, w2, w3 = (p.detach().double().requires_grad_() for p in (experts.w1, experts.w2, experts.w3))
    zz = z.detach().double().requires_grad_()
    rows = []
    for t in range(T):
        parts = []
        for e, weight in zip(ids[t].tolist(), weights[t].double(), strict=True):
            g, u = w1[e] @ zz[t], w3[e] @ zz[t]
            inner = 4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25 * torch.tanh(u / 25)
            parts.append(weight * (w2[e] @ inner))
        rows.append(sum(parts))
    expected = torch.stack(rows)
    (expected * up.double()).sum().backward()
    for name, a, b in zip(
        ("out", "dz", "w1", "w2", "w3"), got, (expected, zz.grad, w1.grad, w2.grad, w3.grad), strict=True
    ):
        assert relative(a, b) < 1e-5, name
    assert float(experts.w1.grad[3].abs().max()) == 0


def test_latent_experts_read_the_latent_and_the_router_the_full_width() -> None:
    config = preset("k3-nano")
    moe = LatentMoE(config, 0, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in moe.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    x = torch.randn(20, 128, generator=generator)
    ids, weights = moe.gate(x, Routing(), 0)
    y = moe.experts(x @ moe.routed_expert_down_proj.weight.T, ids, weights)
    y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * moe.routed_expert_norm.weight
    expected = y @ moe.routed_expert_up_proj.weight.T + moe.shared_experts(x)
    torch.testing.assert_close(moe(x, Routing()), expected, rtol=1e-5, atol=1e-5)


def test_routing_recorded_and_replayed_gives_the_same_numbers_and_other_ids_other_ones() -> None:
    model = k3()
    ids, cu = tokens([20, 13])
    with torch.no_grad():
        with model.record_routing() as record:
            plain = model(ids, cu)
        chosen = record.ids_TLK()
        assert chosen.shape == (33, 3, 2)
        with model.replay_routing(chosen):
            assert torch.equal(model(ids, cu), plain)
        with model.replay_routing((chosen + 1) % 8):
            assert not torch.allclose(model(ids, cu), plain, atol=1e-3)


# -- MLA


def naive_mla(layer: MLAttention, x: Tensor) -> Tensor:
    """Gated MLA of one sequence by its definition, a head at a time, in float64."""
    w = {n: p.detach().double() for n, p in layer.named_parameters()}
    rms = lambda y, g: y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * g  # noqa: E731
    x = x.double()
    q = rms(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"]) @ w["q_b_proj.weight"].T
    kv = x @ w["kv_a_proj_with_mqa.weight"].T
    c, shared = rms(kv[:, : layer.latent], w["kv_a_layernorm.weight"]), kv[:, layer.latent :]
    up = c @ w["kv_b_proj.weight"].T
    heads = []
    for h in range(layer.heads):
        wide, both = layer.nope + layer.shared, layer.nope + layer.value
        qh = q[:, h * wide : (h + 1) * wide]
        kh = torch.cat([up[:, h * both : h * both + layer.nope], shared], -1)
        vh = up[:, h * both + layer.nope : (h + 1) * both]
        scores = qh @ kh.T / math.sqrt(wide)
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
        heads.append(scores.softmax(-1) @ vh)
    gate = torch.sigmoid(x @ w["g_proj.weight"].T)
    return (torch.cat(heads, -1) * gate) @ w["o_proj.weight"].T


@pytest.mark.parametrize("absorb", [True, False])
def test_mla_equals_its_definition_whole_and_by_decode_steps(absorb: bool) -> None:
    model = k3()
    layer = model.model.layers[3].self_attn
    assert isinstance(layer, MLAttention)
    layer.absorb = absorb
    x = torch.randn(23, 128, generator=torch.Generator().manual_seed(0))
    expected = naive_mla(layer, x)
    with torch.no_grad():
        whole = layer(x, Layout(23, torch.tensor([0, 23]), x.device))
        assert relative(whole, expected) < 1e-5
        cache = model.make_cache(1, 32)
        outs = []
        for start, stop in ((0, 9), *((t, t + 1) for t in range(9, 23))):
            piece = torch.tensor([0, stop - start])
            outs.append(layer(x[start:stop], Layout(stop - start, piece, x.device, cache)))
            cache.lengths += stop - start
        assert relative(torch.cat(outs), expected) < 1e-5


def test_the_cache_of_mla_is_its_latent_alone() -> None:
    cache = k3().make_cache(2, 10)
    assert {n: tuple(t.shape) for n, t in cache.tokens.items()} == {"3.latent": (2, 10, 32 + 16)}


# -- float32 islands


def test_in_bfloat16_states_routers_and_conv_weights_stay_float32_and_results_near() -> None:
    single, half = k3(), k3(dtype=torch.bfloat16)
    kept = {n for n, t in half.named_weights() if t.dtype == torch.float32}
    marks = ("conv1d", "A_log", "dt_bias", "o_norm", "e_score_correction_bias")
    assert kept == {n for n, _ in half.named_weights() if any(m in n for m in marks)}
    assert half.make_cache(1, 4).states["0.kda"].dtype == torch.float32
    ids, cu = tokens([40])
    x = torch.randn(40, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        for module in half.modules():
            if isinstance(module, AttnRes):  # sharp residual weights magnify any rounding
                module.proj.weight.mul_(0.1)
        single.load_named_weights([(n, t.float()) for n, t in half.named_weights()])
        for a, b in zip(half.model.layers, single.model.layers, strict=True):
            got = a.self_attn(x, Layout(40, cu, x.device))
            assert relative(got, b.self_attn(x.float(), Layout(40, cu, x.device))) < 1e-2
        with single.record_routing() as record:
            exact = single(ids, cu)
        # Routing is replayed: an expert that flips is no rounding error.
        with half.replay_routing(record.ids_TLK()):
            assert relative(half(ids, cu), exact) < 4e-2


# -- multi-token prediction


def test_mtp_sees_the_next_token_and_predicts_the_one_after_it() -> None:
    model = k3(num_nextn_predict_layers=1)
    lengths = [6, 1, 2, 9, 3]
    ids, cu = tokens(lengths)
    with torch.no_grad():
        hidden = model(ids, cu)
        out, targets = mtp_hidden(model, hidden, ids, cu)
        loss, count = mtp_loss(model, hidden, ids, cu)
    expected_targets = [
        int(ids[s + t + 2]) for s, n in zip(cu.tolist(), lengths, strict=False) for t in range(n - 2)
    ]
    assert targets.tolist() == expected_targets
    assert count == len(expected_targets) == 4 + 7 + 1
    reference = F.cross_entropy(model.logits(out), targets, reduction="sum")
    torch.testing.assert_close(loss, reference)
    start = 0
    for s, n in zip(cu.tolist(), lengths, strict=False):
        if n < 3:
            continue
        # Alone, and with the last token changed: it is a target, and seen by nobody with an earlier target.
        piece = ids[s : s + n].clone()
        with torch.no_grad():
            alone, _ = mtp_hidden(model, hidden[s : s + n], piece, torch.tensor([0, n]))
            piece[-1] = (piece[-1] + 1) % 96
            other, _ = mtp_hidden(model, hidden[s : s + n], piece, torch.tensor([0, n]))
        torch.testing.assert_close(out[start : start + n - 2], alone, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(alone, other, rtol=1e-4, atol=1e-5)
        start += n - 2


def test_mtp_trains_and_its_weights_are_published_and_absent_without_it() -> None:
    model = k3(num_nextn_predict_layers=1).train()
    names = [n for n, _ in model.named_weights()]
    assert any(n.startswith("language_model.mtp.eh_proj") for n in names)
    assert not any(".mtp." in n for n, _ in k3().named_weights())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids = torch.arange(60) % 12
    cu = torch.tensor([0, 60])
    losses = []
    for _ in range(15):
        loss, count = mtp_loss(model, model(ids, cu), ids, cu)
        (loss / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()) / count)
    assert losses[-1] < 0.5 * losses[0], losses
    with pytest.raises(ValueError, match="num_nextn_predict_layers is 0"):
        mtp_loss(k3(), torch.zeros(3, 128), ids[:3], torch.tensor([0, 3]))
