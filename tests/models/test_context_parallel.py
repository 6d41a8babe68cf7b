"""One sequence over four gloo ranks is the sequence on one: hidden states, losses and every gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from k3rl.models import ModelConfig, build_model
from k3rl.models.context_parallel import sharded
from k3rl.models.k3.attention import MLAttention
from k3rl.models.k3.kda_ops import kda
from k3rl.models.packing import Layout

RANKS = 4


def inputs(tokens: int, heads: int = 3, K: int = 8, V: int = 12) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(tokens, heads, K), (tokens, heads, K), (tokens, heads, V), (tokens, heads, K), (tokens, heads)]
    return [torch.randn(s, generator=generator) for s in shapes]


def attend(parts: list[torch.Tensor]) -> torch.Tensor:
    """Slow decays, so that the state of far ranks matters."""
    q, k, v, z, b = parts
    A_log, dt_bias = torch.zeros(q.shape[1]), torch.full(q.shape[1:], -6.0)
    layout = Layout(len(q), torch.tensor([0, len(q)]), torch.device("cpu"))
    return kda(q, k, v, z, b, A_log, dt_bias, -5.0, layout, None)[0]


def loss_of(model: torch.nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    hidden = model(ids, torch.tensor([0, len(ids)]))
    return torch.nn.functional.cross_entropy(model.logits(hidden), targets, reduction="sum")


def tokens(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count + 1,), generator=torch.Generator().manual_seed(count))


def watch_logits(model: torch.nn.Module) -> list[MLAttention]:
    """As QK-Clip does."""
    layers = [m for m in model.modules() if isinstance(m, MLAttention)]
    for layer in layers:
        layer.track_max_logit, layer.max_logit_H = True, None
    return layers


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    group = dist.group.WORLD
    out: dict[str, object] = {}
    for count in (64, 128):
        mine = [p.chunk(RANKS)[rank].clone().requires_grad_() for p in inputs(count)]
        with sharded(group) as shard:
            o = attend(mine)
            (o * torch.linspace(0.5, 1.5, count).chunk(RANKS)[rank][:, None, None]).sum().backward()
        out[f"kda/{count}"] = [o.detach(), *(p.grad for p in mine)]
        out[f"sent/{count}"] = shard.sent
    model = build_model(ModelConfig(path="k3-nano"), seed=0)
    layers = watch_logits(model)
    for recompute in (False, True):
        model.activation_checkpointing = recompute
        model.train().zero_grad()
        ids = tokens(96)
        with sharded(group):
            loss = loss_of(model, ids[:-1].chunk(RANKS)[rank], ids[1:].chunk(RANKS)[rank])
            loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        total = loss.detach().clone()
        dist.all_reduce(total)
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        peaks = torch.stack([layer.max_logit_H for layer in layers])
        dist.all_reduce(peaks, dist.ReduceOp.MAX)
        out[f"model/{recompute}"] = (total, grads, peaks)
        watch_logits(model)
    torch.save(out, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    mp.spawn(work, (str(folder),), nprocs=RANKS)
    return [torch.load(folder / f"{r}.pt", weights_only=True) for r in range(RANKS)]


@pytest.mark.parametrize("count", [64, 128])
def test_kda(ranks, count):
    whole = [p.requires_grad_() for p in inputs(count)]
    o = attend(whole)
    (o * torch.linspace(0.5, 1.5, count)[:, None, None]).sum().backward()
    expected = [o.detach(), *(p.grad for p in whole)]
    first = attend([p.detach()[count // RANKS :] for p in whole])
    assert (first - o.detach()[count // RANKS :]).abs().max() > 1e-2, "what went before must matter"
    for position, reference in enumerate(expected):
        found = torch.cat([r[f"kda/{count}"][position] for r in ranks])
        assert (found - reference).abs().max() < 1e-5


def test_what_is_exchanged_does_not_grow_with_the_sequence(ranks):
    for r in ranks:
        assert r["sent/64"] == r["sent/128"] > 0


@pytest.mark.parametrize("recompute", [False, True])
def test_the_whole_model(ranks, recompute):
    """K3-nano with both attentions, residuals and experts. Gradients are sums over ranks."""
    model = build_model(ModelConfig(path="k3-nano"), seed=0).train()
    layers = watch_logits(model)
    ids = tokens(96)
    loss = loss_of(model, ids[:-1], ids[1:])
    loss.backward()
    total, grads, peaks = ranks[0][f"model/{recompute}"]
    assert torch.allclose(peaks, torch.stack([layer.max_logit_H for layer in layers]), atol=1e-5)
    assert float(total) == pytest.approx(loss.item(), rel=1e-6)
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert grads.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (grads[name] - gradient).abs().max() < 1e-5 * max(1.0, float(gradient.abs().max())), name


def test_what_cannot_be_shared_is_refused(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/r", rank=0, world_size=1)
    try:
        with sharded(dist.group.WORLD), pytest.raises(ValueError, match="one sequence"):
            Layout(4, torch.tensor([0, 2, 4]), torch.device("cpu"))
    finally:
        dist.destroy_process_group()
