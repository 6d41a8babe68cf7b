"""Weights from a trainer's process into an engine's: how long one publication takes, and whether log-probs then agree.

    python benchmarks/publication.py --out benchmarks/results/publication.h200.json      # cuda_ipc, both on one GPU
    python benchmarks/publication.py --out benchmarks/results/publication.cpu.json       # disk, k3-nano

On a GPU: a Qwen3-0.6B shape in bfloat16. Before each publication every trained tensor changes. Time is from the call of
`publish` to the engine's acknowledgement: sending, loading, and checksums on both sides; the canary's scoring is timed
apart. The peer is a plain copy of the same bytes on the device.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.multiprocessing as mp

sys.path.append(sys.path.pop(0))  # this folder has a rewards.py too
from harness import Result, seconds
from qwen3_shape import QWEN3

from k3rl.config.trainer import TrainerConfig
from k3rl.models import ModelConfig, load_model
from k3rl.models.loading import build_model, save_model
from k3rl.trainer.worker import TrainerWorker
from k3rl.weights import deliver, verify
from k3rl.weights.transports import CudaIpc, Disk
from rollout.native import NativeEngine

ROUNDS = 5


def engine_process(pipe: Connection, config: ModelConfig, device: str) -> None:
    """Loads what comes through the pipe into an engine, and answers with its acknowledgement, until None comes."""
    model = load_model(config, device).requires_grad_(False)
    engine = NativeEngine(model, max_slots=4, max_context=128)
    pipe.send("ready")
    while (publication := pipe.recv()) is not None:
        ack = deliver(publication, engine, receiver="engine", device=device)
        if device == "cuda":
            torch.cuda.synchronize()
        pipe.send(ack)


def change(worker: TrainerWorker) -> None:
    with torch.no_grad():
        for parameter in worker.parameters.values():
            parameter.mul_(1 + 2**-6)
    worker.version += 1
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(result: Result, config: ModelConfig, device: str, scratch: Path) -> None:
    transport = CudaIpc() if device == "cuda" else Disk(scratch / "published")
    worker = TrainerWorker(config, TrainerConfig(), device=device, transport=transport)
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=engine_process, args=(theirs, config, device), daemon=True)
    process.start()
    assert ours.recv() == "ready"
    times, nbytes, gap = [], 0, 0.0
    previous = None
    for _ in range(ROUNDS):
        change(worker)
        began = time.perf_counter()
        publication = worker.publisher.publish(worker.named_weights(), worker.version)
        ours.send(publication)
        verify(publication, [ours.recv()], previous)
        times.append(time.perf_counter() - began)
        previous, nbytes = publication, publication.nbytes
    change(worker)
    checked = worker.publication()
    assert checked is not None
    ours.send(checked)
    gap = verify(checked, [ours.recv()], previous, tolerance=5e-2)["weights/canary_gap"]
    ours.send(None)
    process.join(30)
    best = sorted(times)[len(times) // 2]
    name = f"{transport.name}, {nbytes / 1e9:.2f} GB"
    result.row(f"{name}: publication", best, "s", "limit", 0.1)
    if device == "cuda":
        source = torch.empty(nbytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copy = nbytes / seconds(lambda: target.copy_(source)) / 1e9
        result.row(f"{name}: publication", nbytes / best / 1e9, "GB/s", "copy on the device", copy)
    else:
        result.row(f"{name}: publication", nbytes / best / 1e9, "GB/s")
    result.row(f"{name}: log-probs of engine and trainer, mean gap", gap, "nats")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result = Result("publication", "h200" if device == "cuda" else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        shape = Path(folder) / "shape"
        shape.mkdir()
        if device == "cuda":
            (shape / "config.json").write_text(json.dumps(QWEN3))
            start = build_model(ModelConfig(path=str(shape), dtype="bfloat16"), seed=0)
        else:
            start = build_model(ModelConfig(path="k3-nano"), seed=0)
        save_model(start, Path(folder) / "model")
        dtype = "bfloat16" if device == "cuda" else "float32"
        config = ModelConfig(path=str(Path(folder) / "model"), dtype=dtype)
        measure(result, config, device, Path(folder))
    result.write(args.out)


if __name__ == "__main__":
    main()
