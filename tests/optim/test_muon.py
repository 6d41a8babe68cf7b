"""Per-head Muon: which matrices it takes, how it cuts them, its updates' singular values, torch's Muon beside it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from k3rl.models import ModelConfig, build_model
from k3rl.models.config import preset
from k3rl.models.hf import HFModel
from k3rl.models.k3.attention import MLAttention
from k3rl.models.k3.model import K3Model
from k3rl.optim import Block, Muon, MuonConfig, QKClip, muon_groups, plan_blocks
from k3rl.optim.newton_schulz import BAND, orthogonalise


def nano() -> K3Model:
    model = build_model(ModelConfig(path="k3-nano"), 0)
    assert isinstance(model, K3Model)
    return model


def muon(targets: dict[str, Tensor], plan: dict[str, Block], **fields: object) -> Muon:
    config = MuonConfig.model_validate({"lr": 0.01, **fields})
    groups = muon_groups(config, targets, plan)
    return Muon(groups, config.lr, config.momentum, config.nesterov, config.iterations)


@pytest.mark.parametrize("shape", [(5, 32, 128), (3, 128, 32), (4, 48, 48), (1, 7, 90)])
def test_singular_values_land_in_the_band_and_vectors_stay(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    U, _ = torch.linalg.qr(torch.randn(shape[0], shape[1], min(shape[1:]), generator=generator))
    V, _ = torch.linalg.qr(torch.randn(shape[0], shape[2], min(shape[1:]), generator=generator))
    values = torch.empty(shape[0], min(shape[1:])).uniform_(0.2, 1.0, generator=generator)
    out = orthogonalise((U * values[:, None]) @ V.mT)
    new = torch.linalg.svdvals(out)
    assert float(new.min()) > BAND[0]
    assert float(new.max()) < BAND[1]
    inside = U.mT @ out @ V
    off = inside - torch.diag_embed(inside.diagonal(dim1=1, dim2=2))
    assert float(off.abs().max()) < 1e-4


def test_zero_gradient_is_a_zero_update() -> None:
    assert torch.equal(orthogonalise(torch.zeros(2, 4, 6)), torch.zeros(2, 4, 6))


@pytest.mark.parametrize("block", [Block("rows", 4), Block("columns", 3), Block()])
def test_cutting_and_joining_are_inverse(block: Block) -> None:
    x = torch.arange(96.0).view(8, 12)
    assert torch.equal(block.join(block.cut(x)), x)
    assert block.cut(x).ndim == 3


def test_every_k3_parameter_has_its_place() -> None:
    model = nano()
    plan = plan_blocks(model)
    kinds: dict[str, set[str]] = {}
    for name, _ in model.named_parameters():
        last = ".".join(name.split(".")[-2:])
        kinds.setdefault(plan[name].kind if name in plan else "adamw", set()).add(last)
    per_head = {f"{n}_proj.weight" for n in ("q", "k", "v", "g", "f_b", "q_b", "kv_b")}
    assert kinds["rows"] == per_head
    assert kinds["columns"] == {"o_proj.weight"}
    assert kinds["stack"] == {"experts.w1", "experts.w2", "experts.w3"}
    whole = {
        "f_a_proj",
        "b_proj",
        "q_a_proj",
        "kv_a_proj_with_mqa",
        "gate_proj",
        "up_proj",
        "down_proj",
        "gate",
    }
    assert kinds["whole"] == {
        f"{n}.weight" for n in (*whole, "routed_expert_down_proj", "routed_expert_up_proj")
    }
    for name in ("embed_tokens.weight", "lm_head.weight", "q_conv1d.weight", "o_norm.weight", "proj.weight"):
        assert name in kinds["adamw"]
    assert not any(b.kind in ("rows", "columns") for b in plan_blocks(model, per_head=False).values())


def test_transformers_models_are_cut_by_their_heads() -> None:
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    plan = plan_blocks(HFModel(LlamaForCausalLM(config)))
    names = {name.split(".")[-2]: block for name, block in plan.items()}
    assert names["q_proj"] == names["k_proj"] == names["v_proj"] == Block("rows", 8)
    assert names["o_proj"] == Block("columns", 8)
    assert names["gate_proj"] == Block()
    assert "embed_tokens" not in names
    assert "lm_head" not in names


def test_each_heads_update_is_orthogonal_by_itself() -> None:
    """The step's own movement, divided by its scale, has every head's singular values in the band."""
    model = nano()
    plan = plan_blocks(model)
    generator = torch.Generator().manual_seed(1)
    targets = dict(model.named_parameters())
    before = {n: p.detach().clone() for n, p in targets.items()}
    for p in targets.values():
        p.grad = torch.randn(p.shape, generator=generator)
    muon(targets, plan, momentum=0.0, nesterov=False).step()
    checked = 0
    for name, block in plan.items():
        moved = block.cut((before[name] - targets[name].detach()) / 0.01)
        values = torch.linalg.svdvals(moved / (0.2 * math.sqrt(max(moved.shape[-2:]))))
        # Square Gaussian blocks have singular values near 0, which five steps do not lift all the way.
        square = moved.shape[-1] == moved.shape[-2]
        assert float(values.max()) < BAND[1] + 0.07, name
        if not square:
            assert float(values.min()) > BAND[0] - 0.02, (name, float(values.min()))
        checked += moved.shape[0]
    assert checked > 100


@pytest.mark.parametrize("nesterov", [True, False])
def test_whole_matrices_step_as_torch_muon_does(nesterov: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    ours = [nn.Parameter(torch.randn(s, generator=generator)) for s in ((24, 40), (40, 24), (30, 30))]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    targets = {str(i): p for i, p in enumerate(ours)}
    fields = {"momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.1}
    mine = muon(targets, dict.fromkeys(targets, Block()), **fields)
    reference = torch.optim.Muon(theirs, lr=0.01, adjust_lr_fn="match_rms_adamw", **fields)
    for _ in range(4):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        mine.step()
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        # torch iterates in bfloat16, which leaves a per cent of the movement
        assert float((a - b).detach().norm() / (0.01 * 0.2 * 4 * math.sqrt(a.numel()))) < 0.05


def test_everything_else_steps_as_adamw_does() -> None:
    model, twin = nano(), nano()
    plan = plan_blocks(model)
    mine = muon(dict(model.named_parameters()), plan, weight_decay=0.1)
    matrices = [p for n, p in twin.named_parameters() if n not in plan and p.ndim >= 2]
    vectors = [p for n, p in twin.named_parameters() if n not in plan and p.ndim < 2]
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=0.01, betas=(0.9, 0.95), eps=1e-8, fused=True,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        mine.step()
        reference.step()
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b) == (name not in plan), name


def test_a_step_at_rate_zero_creates_state_and_moves_nothing() -> None:
    """How a checkpoint's load makes room for the optimiser's state."""
    model = nano()
    optimizer = muon(dict(model.named_parameters()), plan_blocks(model), weight_decay=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(len(optimizer.state[p]) in (1, 3) for p in model.parameters())


def largest_logits(layer: MLAttention, x_TD: Tensor) -> Tensor:
    """Largest causal attention logit of each head by its definition, [H]."""
    q = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(x_TD))).unflatten(-1, (layer.heads, -1))
    c, shared = layer.kv_a_proj_with_mqa(x_TD).split([layer.latent, layer.shared], -1)
    k = layer.kv_b_proj(layer.kv_a_layernorm(c)).unflatten(-1, (layer.heads, -1))[..., : layer.nope]
    k = torch.cat([k, shared[:, None].expand(-1, layer.heads, -1)], -1)
    logits = torch.einsum("thk,shk->hts", q, k) * layer.scale
    causal = torch.ones(logits.shape[1:], dtype=torch.bool).tril()
    return logits.masked_fill(~causal, -math.inf).amax((-1, -2))


def test_qk_clip_brings_the_hottest_head_to_the_bound_and_leaves_cool_heads_alone() -> None:
    model = K3Model(preset("k3-nano", initializer_range=0.4))
    model.reset_parameters(0)
    model.train()
    seen: list[Tensor] = []
    layer = model.model.layers[3].self_attn
    assert isinstance(layer, MLAttention)
    layer.register_forward_pre_hook(lambda m, args: seen.append(args[0].detach()))
    ids, cu = torch.randint(0, 512, (60,), generator=torch.Generator().manual_seed(0)), torch.tensor([0, 60])
    clip = QKClip(model, dict(model.named_parameters()), 1e9)
    model(ids, cu)
    with torch.no_grad():
        before = largest_logits(layer, seen[0])
        torch.testing.assert_close(layer.max_logit_H, before, rtol=1e-5, atol=1e-5)
        clip.threshold = float(before.sort().values[1:3].mean())
        weights = layer.q_b_proj.weight.detach().clone()
        clip()
        after = largest_logits(layer, seen[0])
    assert clip.largest == pytest.approx(float(before.max()))
    assert layer.max_logit_H is None
    hot = before > clip.threshold
    assert int(hot.sum()) == 2
    torch.testing.assert_close(after[hot], torch.full_like(after[hot], clip.threshold), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after[~hot], before[~hot])
    same = (layer.q_b_proj.weight == weights).unflatten(0, (layer.heads, -1)).flatten(1).all(1)
    assert torch.equal(same, ~hot)


def test_logits_are_measured_only_where_gradients_flow() -> None:
    model = nano().train()
    QKClip(model, dict(model.named_parameters()), 1.0)
    with torch.no_grad():
        model(torch.zeros(5, dtype=torch.int64), torch.tensor([0, 5]))
    assert model.model.layers[3].self_attn.max_logit_H is None
