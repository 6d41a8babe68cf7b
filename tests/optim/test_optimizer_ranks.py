"""Muon, QK-Clip and balancing on several gloo ranks with FSDP2 are what they are on one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from k3rl.models import ModelConfig, build_model
from k3rl.optim import Muon, MuonConfig, QKClip, QuantileBalancing, RouterBalancing, muon_groups, plan_blocks
from k3rl.optim.balancing import RouterBalance

CUTS = {1: [], 2: [700], 3: [200, 650], 4: [200, 600, 650]}
STEPS, THRESHOLD = 3, 0.02  # a bound that freshly initialised heads exceed


def build(ranks: int) -> nn.Module:
    model = build_model(ModelConfig(path="k3-nano", overrides={"num_attention_heads": 4}), 0).train()
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def train(ranks: int) -> dict[str, Tensor]:
    """Every rank sees the same tokens, so that averaged gradients are one rank's. Returns whole weights."""
    model = build(ranks)
    config = MuonConfig(lr=0.02, weight_decay=0.1)
    targets = dict(model.named_parameters())
    plan = plan_blocks(model)
    assert len(plan) > 40
    optimizer = Muon(muon_groups(config, targets, plan), config.lr)
    clip = QKClip(model, targets, THRESHOLD)
    for step in range(STEPS):
        ids = torch.randint(0, 512, (90,), generator=torch.Generator().manual_seed(step))
        hidden = model(ids, torch.tensor([0, 50, 90]))
        (hidden @ torch.linspace(-1, 1, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        clip()
        assert clip.largest > THRESHOLD
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in targets.items()}


def balance(ranks: int, rank: int) -> dict[str, Tensor]:
    """Three micro-batches a rank of one set of tokens, unevenly dealt; histogram and exact."""
    generator = torch.Generator().manual_seed(5)
    scores = torch.sigmoid(torch.randn(1200, 32, generator=generator) + torch.randn(32, generator=generator))
    out = {}
    for name, config in (("histogram", QuantileBalancing()), ("exact", QuantileBalancing(bins=0))):
        bias = torch.zeros(32)
        whole = RouterBalancing(nn.Module(), config)
        whole.routers["0"] = RouterBalance(bias, 4, config)
        for _ in range(3):
            share = scores.tensor_split(CUTS[ranks])[rank]
            for part in share.tensor_split(3):
                whole.routers["0"].observe(part, (part + bias).topk(4, -1).indices)
            whole.step()
        out[name] = bias
    return out


def launch(ranks: int, folder: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    code = f"""
import sys, torch, torch.distributed as dist
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_optimizer_ranks import balance, train
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:{port}", rank=rank, world_size={ranks})
out = balance({ranks}, rank) | train({ranks})
torch.save(out, {str(folder)!r} + f"/{{rank}}.pt")
dist.destroy_process_group()
"""
    env = dict(os.environ, OMP_NUM_THREADS="1")
    children = [
        subprocess.Popen([sys.executable, "-c", code, str(r)], env=env, stderr=subprocess.PIPE, text=True)
        for r in range(ranks)
    ]
    errors = [c.communicate(timeout=120)[1] for c in children]
    assert all(c.returncode == 0 for c in children), "\n".join(e[-3000:] for e in errors)


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_sharded_equals_whole(ranks: int, tmp_path: Path) -> None:
    """Two ranks split four heads evenly; with three, shards end inside heads; four is one head each."""
    assert not dist.is_initialized()
    launch(ranks, tmp_path)
    alone = balance(1, 0) | train(1)
    for rank in range(ranks):
        got = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert got.keys() == alone.keys()
        for name in ("histogram", "exact"):
            assert torch.equal(got[name], alone[name]), name
        worst = max(float((got[n] - alone[n]).abs().max()) for n in alone)
        assert worst < 2e-5, worst
