"""Exact resume on one rank; a kill during a save; folders that aren't checkpoints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from trainer_data import make_conversations, make_trajectories, nano, same, state_of, worker

from k3rl.errors import UserError
from k3rl.models import ModelConfig, load_model
from k3rl.trainer import checkpoint
from k3rl.weights import checksum


def run(w, steps):
    for i in steps:
        w.sft_step(make_conversations(i))
        w.step(make_trajectories(100 + i))
    return w


def fresh(**config):
    schedule = {"shape": "linear", "warmup_steps": 2, "decay_steps": 8}
    return worker(schedule=schedule, **config)


# Behaviour versions are 0 in the test data, so `step` sees staleness grow: part of what must be equal.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_resumed_training_is_bit_identical(tmp_path, dtype, asynchronous):
    config = {"checkpoint": {"asynchronous": asynchronous}}
    through = run(fresh(model=nano(dtype=dtype), **config), range(4))
    first = run(fresh(model=nano(dtype=dtype), **config), range(2))
    first.save(tmp_path / "step-2")
    run(first, [7])  # a background save must not see this
    first.wait()
    second = fresh(model=nano(seed=55, dtype=dtype), **config)
    second.load(tmp_path / "step-2")
    assert second.version == 4
    run(second, range(2, 4))
    assert same(state_of(second), state_of(through))
    assert checksum(second.named_weights()) == checksum(through.named_weights())


def test_the_model_folder_is_an_ordinary_checkpoint(tmp_path):
    w = run(fresh(), range(1))
    w.save(tmp_path / "step-1")
    loaded = load_model(ModelConfig(path=str(tmp_path / "step-1" / "model")))
    assert checksum(loaded.named_weights()) == checksum(w.named_weights())
    assert not any(p.suffix in (".pt", ".bin", ".pkl", ".metadata") for p in tmp_path.rglob("*"))


def test_folders_that_do_not_fit_are_refused_in_one_sentence(tmp_path):
    w = fresh()
    with pytest.raises(UserError, match=r"no trainer\.json"):
        w.load(tmp_path)
    w.save(tmp_path / "a")
    with pytest.raises(UserError, match="exists already"):
        w.save(tmp_path / "a")
    other = worker(model=load_model(ModelConfig(path="k3-nano")))
    with pytest.raises(UserError, match="another model"):
        other.load(tmp_path / "a")
    facts = json.loads((tmp_path / "a" / "trainer.json").read_text())
    (tmp_path / "a" / "trainer.json").write_text(json.dumps({**facts, "format": 99}))
    with pytest.raises(UserError, match="format 99"):
        w.load(tmp_path / "a")
    (tmp_path / "a" / "trainer.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        w.load(tmp_path / "a")


SAVER = """
import sys
sys.path.insert(0, sys.argv[2])
from trainer_data import worker
w = worker()
n = 0
while True:
    w.version = n
    w.save(f"{sys.argv[1]}/step-{n}")
    print(n, flush=True)
    n += 1
"""


def test_a_kill_during_a_save_leaves_the_last_good_checkpoint(tmp_path):
    """Killed at random moments of a process that does nothing but save."""
    here = str(Path(__file__).parent)
    process = subprocess.Popen(
        [sys.executable, "-c", SAVER, str(tmp_path), here],
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ, OMP_NUM_THREADS="1"),
    )
    assert process.stdout is not None
    last = -1
    for line in process.stdout:
        last = int(line)
        if last == 2:
            break
    time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read().split()
    process.wait()
    last = int(rest[-1]) if rest else last
    complete = sorted(int(p.name.removeprefix("step-")) for p in tmp_path.glob("step-*"))
    assert complete[: last + 1] == list(range(last + 1))
    for n in complete:  # whatever has its name can be loaded
        w = worker(seed=9)
        w.load(tmp_path / f"step-{n}")
        assert w.version == n
    again = worker()
    target = tmp_path / f"step-{complete[-1] + 1}"
    again.save(target)  # a remnant of the killed save is no obstacle, and goes
    assert not list(tmp_path.glob(f".{target.name}.*"))


def test_retention(tmp_path):
    for n in (1, 2, 5, 10, 11, 12):
        (tmp_path / f"step-{n:06d}").mkdir()
    (tmp_path / "step-notes").mkdir()
    gone = checkpoint.prune(tmp_path, keep_last=2, keep_every=5)
    assert sorted(int(p.name[5:]) for p in gone) == [1, 2]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step-000005",
        "step-000010",
        "step-000011",
        "step-000012",
        "step-notes",
    ]


def test_an_error_in_a_background_save_surfaces(tmp_path):
    w = worker(checkpoint={"asynchronous": True})
    (tmp_path / "file").write_text("")
    w.save(tmp_path / "file" / "step-1")
    with pytest.raises(OSError):
        w.wait()
