"""The trainer's state on disk: a model folder that others load, and what an exact resume needs beside it.

    <dir>/model/            safetensors + config.json (+ tokenizer), for transformers, vLLM and `load_model`
    <dir>/state/            optimiser moments and float32 masters, one safetensors file per rank
                            (`torch.distributed.checkpoint` over safetensors: reshards on load, nothing is
                            unpickled)
    <dir>/trainer.json      version, optimiser steps, RNG; written last

A folder appears under its name only when complete: it is written as ``.<name>.<id>`` and renamed. A kill at
any moment leaves the last good one and at most one such remnant, which the next save removes.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

from k3rl.errors import UserError
from k3rl.models import save_model

if TYPE_CHECKING:
    from k3rl.trainer.worker import TrainerWorker

FORMAT = 1


def save(worker: TrainerWorker, folder: Path | str, tokenizer_dir: Path | str | None = None) -> None:
    """Write ``folder`` atomically; all ranks call it together. `UserError` where it exists already."""
    save_snapshot(worker, folder, tokenizer_dir)()


def save_snapshot(
    worker: TrainerWorker, folder: Path | str, tokenizer_dir: Path | str | None = None, copy: bool = False
) -> Callable[[], None]:
    """Take the state now, return the function that writes it. With ``copy``, training may go on before it
    is called.

    Writing is collective where there are several ranks.
    """
    folder = Path(folder)
    if folder.exists():
        raise UserError(f"checkpoint {folder} exists already")
    unique = _agree(worker, uuid4().hex[:8])
    temporary = folder.parent / f".{folder.name}.{unique}"
    own = (lambda t: t.detach().to("cpu", copy=True)) if copy else (lambda t: t.detach())
    weights = (
        [(n, own(t) if worker.world.rank == 0 else t[:0]) for n, t in worker.named_weights()]
        if copy
        else None
    )
    tensors = {n: own(t) for n, t in optimizer_tensors(worker).items()}
    facts = _facts(worker)

    def write() -> None:
        if worker.world.rank == 0:
            for stale in folder.parent.glob(f".{folder.name}.*"):
                shutil.rmtree(stale)
            temporary.mkdir(parents=True)
        worker.world.barrier()
        source = weights if weights is not None else worker.named_weights()
        if worker.world.rank == 0:
            save_model(worker.model, temporary / "model", tokenizer_dir, source)
        else:
            for _ in source:
                pass
        writer = dcp.HuggingFaceStorageWriter(str(temporary / "state"), save_distributed=True)
        with _quiet():
            dcp.save(tensors, storage_writer=writer, no_dist=worker.world.size == 1)
        if worker.world.rank == 0:
            (temporary / "trainer.json").write_text(json.dumps(facts, indent=2) + "\n")
            _sync(temporary)
            os.replace(temporary, folder)
        worker.world.barrier()

    return write


def load(worker: TrainerWorker, folder: Path | str) -> None:
    """Restore model, masters, optimiser, version and RNG, whatever number of ranks wrote them.

    `UserError` where the folder is no checkpoint, or one of another model or optimiser.
    """
    folder = Path(folder)
    facts = read_facts(folder)
    stored, asked = facts["optimizer"], worker.config.optimizer.type
    if stored != asked:
        raise UserError(f"{folder}: its optimiser is {stored}, the config asks for {asked}")
    if facts["parameters"] != _signature(worker):
        raise UserError(f"{folder}: a checkpoint of another model, or of other parameters to train")
    _fill_optimizer(worker, set(facts["stepped"]))
    tensors = optimizer_tensors(worker)
    reader = dcp.HuggingFaceStorageReader(str(folder / "state"))
    with _quiet():
        dcp.load(tensors, storage_reader=reader, no_dist=worker.world.size == 1)
    worker.masters.publish()
    load_frozen(worker, folder / "model")
    worker.version = int(facts["version"])
    torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(facts["rng"])), dtype=torch.uint8))


def load_frozen(worker: TrainerWorker, folder: Path) -> None:
    """What doesn't train but may differ from the start: buffers (a router's bias) and frozen parameters."""
    from k3rl.models.checkpoint import read_tensors

    stored = dict(read_tensors(folder))
    if worker.config.lora is not None:
        return  # its weights are merged ones; the base is what the model was loaded from
    trained = {id(p) for p in worker.parameters.values()}
    with torch.no_grad():
        for name, tensor in worker.model.state_dict(keep_vars=True).items():
            if id(tensor) in trained or isinstance(tensor, DTensor):
                continue
            for out_name, part in worker.model.unfuse(name, tensor.detach()):
                if out_name in stored:
                    part.copy_(stored[out_name])


def read_facts(folder: Path) -> dict[str, Any]:
    """`trainer.json`, checked for its format."""
    path = folder / "trainer.json"
    if not path.exists():
        raise UserError(f"{folder} is no trainer checkpoint: it has no trainer.json")
    try:
        facts = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not JSON ({error})") from None
    if facts.get("format") != FORMAT:
        raise UserError(f"{path}: format {facts.get('format')}, this version reads {FORMAT}")
    return facts


def optimizer_tensors(worker: TrainerWorker) -> dict[str, Tensor]:
    """Moments, step counts and masters (or the parameters themselves where they are the masters), by
    parameter name.
    """
    names = {id(t): n for n, t in worker.masters.targets.items()}
    tensors: dict[str, Tensor] = {f"weight/{n}": t for n, t in worker.masters.targets.items()}
    for parameter, state in worker.optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{key}/{names[id(parameter)]}"] = value
    return {name: t.detach() for name, t in tensors.items()}


def _fill_optimizer(worker: TrainerWorker, stepped: set[str]) -> None:
    """Make the optimiser create its state for these parameters: a step with zero gradients at rate 0 moves
    nothing.

    Others have none: a parameter that no gradient ever reached is not decayed or moved by a resume either.
    """
    worker.optimizer.state.clear()
    worker.optimizer.zero_grad(set_to_none=True)
    for name in stepped:
        target = worker.masters.targets[name]
        target.grad = torch.zeros_like(target)
    rates = [group["lr"] for group in worker.optimizer.param_groups]
    for group in worker.optimizer.param_groups:
        group["lr"] = 0.0
    worker.optimizer.step()
    worker.optimizer.zero_grad(set_to_none=True)
    for group, lr in zip(worker.optimizer.param_groups, rates, strict=True):
        group["lr"] = lr


def _facts(worker: TrainerWorker) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": worker.version,
        "optimizer": worker.config.optimizer.type,
        "stepped": [n for n, t in worker.masters.targets.items() if t in worker.optimizer.state],
        "parameters": _signature(worker),
        "rng": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
        "ranks": worker.world.size,
        "qat": worker.qat.model_dump(mode="json") if worker.qat else None,
    }


def _signature(worker: TrainerWorker) -> dict[str, list[int]]:
    """Name and whole shape of every parameter that trains."""
    return {n: list(t.shape) for n, t in worker.masters.targets.items()}


def _agree(worker: TrainerWorker, value: str) -> str:
    """Rank 0's value, on every rank."""
    if worker.world.size == 1:
        return value
    values: list[Any] = [value]
    dist.broadcast_object_list(values, src=0)
    return str(values[0])


@contextmanager
def _quiet() -> Iterator[None]:
    """torch warns that one process saves alone, which is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _sync(folder: Path) -> None:
    """Bytes before names: a power cut can't leave a complete-looking folder with empty files."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)


def prune(root: Path | str, keep_last: int, keep_every: int = 0, prefix: str = "step-") -> list[Path]:
    """Delete the oldest ``step-N`` folders; returns those deleted. The newest ``keep_last`` stay, and
    multiples of ``keep_every``.
    """
    steps = sorted(
        (int(p.name.removeprefix(prefix)), p)
        for p in Path(root).glob(f"{prefix}*")
        if p.name.removeprefix(prefix).isdigit()
    )
    gone = [p for n, p in steps[:-keep_last] if not (keep_every and n % keep_every == 0)]
    for path in gone:
        hidden = path.parent / f".{path.name}.deleted"
        os.replace(path, hidden)  # never seen half deleted
        shutil.rmtree(hidden)
    return gone


class Background:
    """Writes one checkpoint at a time in a thread; errors surface at the next `start` or `wait`."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Waits for the one before."""
        self.wait()

        def run() -> None:
            try:
                write()
            except BaseException as error:  # re-raised by `wait`, in the thread that owns the trainer
                self._error = error

        self._thread = threading.Thread(target=run, name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Until the last one is on disk; raises what went wrong."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
