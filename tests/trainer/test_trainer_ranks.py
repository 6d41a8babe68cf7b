"""Two gloo ranks with uneven micro-batches are one rank with one; checkpoints move between rank counts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from trainer_data import close, make_conversations, make_trajectories, state_of, worker

from k3rl.trainer.packing import spread
from k3rl.weights import checksum

STEPS = 5
# A small epsilon makes AdamW's first steps signs, which rounding flips; gradients are compared apart.
EPS = 1e-2


def train(w, steps=range(STEPS), world=None):
    """RL and SFT in turns; a rank of several takes its share of the examples as `TrainerGroup` deals them."""
    from k3rl.trainer.examples import from_sft, from_trajectories

    for i in steps:
        if i % 2 == 0:
            examples = from_trajectories(make_trajectories(i, groups=4, samples=2), w.version)
            run = w.step_examples
        else:
            examples, run = from_sft(make_conversations(i)), w.sft_examples
        if world is not None:
            groups = world.size // world.context_size
            share = spread([len(e) for e in examples], groups)[world.rank // world.context_size]
            examples = [examples[i] for i in share]
        run(examples)
    return w


CHILD = """
import sys, torch
sys.path.insert(0, {here!r})
from test_trainer_ranks import EPS, train
from trainer_data import worker
from k3rl.trainer.distributed import ShardedWorld
rank, address, size, folder, what = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), *sys.argv[4:]
world = ShardedWorld(rank, size, address, torch.device("cpu"), 60)
w = worker(world=world, micro_batch_tokens=90, optimizer_eps=EPS, seed=1 if what == "train" else 77)
if what == "train":
    train(w, world=world)
    w.save(folder + "/step-5")
else:
    w.load(folder + "/step-5")
    assert w.version == 5
    train(w, range(5, 7), world)
    w.save(folder + f"/step-7-{{size}}")
if rank == 0:
    torch.save(w.gradients, folder + f"/gradients-{{size}}-{{what}}.pt")
w.close()
"""


def run_ranks(code: str, count: int, *arguments: object, timeout_s: float = 300) -> None:
    """``code`` in a process for each rank, whose arguments are its rank, an address to meet at, and ``arguments``."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    env = dict(os.environ, OMP_NUM_THREADS="1")
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), address, *map(str, arguments)],
            env=env,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    errors = [c.communicate(timeout=timeout_s)[1] for c in children]
    assert all(c.returncode == 0 for c in children), "\n".join(e[-2000:] for e in errors)


def launch(size: int, folder: Path, what: str) -> None:
    run_ranks(CHILD.format(here=str(Path(__file__).parent)), size, size, folder, what, timeout_s=200)


@pytest.fixture(scope="module")
def one_rank():
    return train(worker(micro_batch_tokens=100_000, optimizer_eps=EPS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks")
    launch(2, path, "train")
    return path


def test_two_ranks_with_uneven_passes_equal_one_rank_with_one_pass(one_rank, folder):
    loaded = worker(seed=3, optimizer_eps=EPS)
    loaded.load(folder / "step-5")  # 2 ranks to 1
    loaded.gradients = torch.load(folder / "gradients-2-train.pt", weights_only=True)
    assert close(loaded, one_rank, atol=1e-6)
    a, b = state_of(loaded), state_of(one_rank)
    assert a.keys() == b.keys()
    worst = max(float((a[n] - b[n]).abs().max()) for n in a if n.startswith("weight/"))
    assert worst < 1e-5
    assert all(torch.allclose(a[n], b[n], atol=1e-6) for n in a if n.startswith("exp_avg"))


def test_the_passes_of_the_ranks_were_uneven():
    """Otherwise the test above shows less than it says."""
    from k3rl.trainer.examples import from_trajectories
    from k3rl.trainer.packing import plan

    counts = set()
    for i in range(0, STEPS, 2):
        lengths = [len(e) for e in from_trajectories(make_trajectories(i, groups=4, samples=2), i)]
        counts |= {tuple(len(plan([lengths[i] for i in s], 90)) for s in spread(lengths, 2))}
    assert any(a != b and max(a, b) >= 3 for a, b in counts), counts


@pytest.mark.parametrize("size", [pytest.param(4, marks=pytest.mark.slow), 1])
def test_a_checkpoint_of_two_ranks_goes_on_with_another_number(one_rank, folder, size):
    reference = worker(seed=3, micro_batch_tokens=100_000, optimizer_eps=EPS)
    reference.load(folder / "step-5")
    train(reference, range(5, 7))
    if size == 1:
        other = worker(seed=9, micro_batch_tokens=90, optimizer_eps=EPS)
        other.load(folder / "step-5")
        train(other, range(5, 7))
    else:
        launch(size, folder, "resume")
        other = worker(seed=9, optimizer_eps=EPS)
        other.load(folder / f"step-7-{size}")
    assert other.version == 7
    a, b = state_of(other), state_of(reference)
    assert max(float((a[n] - b[n]).abs().max()) for n in a if n.startswith("weight/")) < 1e-5


def test_a_sharded_model_publishes_whole_tensors(folder):
    from k3rl.models import ModelConfig, load_model

    w = worker(seed=3, optimizer_eps=EPS)
    w.load(folder / "step-5")
    saved = load_model(ModelConfig(path=str(folder / "step-5" / "model")))
    assert checksum(saved.named_weights()) == checksum(w.named_weights())
