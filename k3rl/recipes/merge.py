"""Models made from models without training: merges, the baselines of distillation, and exports.

    average           W = sum_i w_i W_i, sum_i w_i = 1                   (model soups, Wortsman et al. 2022)
    task arithmetic   W = W_base + scale * sum_i w_i (W_i - W_base)      (Ilharco et al. 2023)

Sums are in float64, one tensor at a time, so that models of any size are merged within the memory of one tensor each.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from k3rl.config.jobs import ExportJob, MergeJob
from k3rl.errors import UserError
from k3rl.models import ModelConfig
from k3rl.models.checkpoint import weight_map, write_shards
from k3rl.models.config import read_json
from k3rl.models.loading import TOKENIZER_FILES, model_folder
from k3rl.recipes.journal import Journal
from k3rl.trainer.checkpoint import FORMAT
from k3rl.trainer.export import export, packer_for


def run_merge(job: MergeJob) -> Path:
    """Returns the run's folder; its checkpoint is the merged model. `UserError` where the models do not fit."""
    with Journal(job, 1) as journal:
        if journal.done:
            return journal.path
        with journal.progress.phase("merge"), journal.store.new_checkpoint(0) as folder:
            merge(job, folder / "trainer" / "model")
            (folder / "trainer" / "trainer.json").write_text(json.dumps({"format": FORMAT, "version": 0}))
        journal.record(
            0, {"merge/models": float(len(job.models))}, f"{job.method} of {len(job.models)} models"
        )
    return journal.path


def merge(job: MergeJob, target: Path) -> None:
    """Write the merged model, in the first model's layout and dtypes, with its tokenizer."""
    folders = [model_folder(m.path) for m in job.models]
    base = model_folder(job.base.path) if job.base else None
    _same_architecture([*folders, *([base] if base else [])])
    factors = list(job.weights) or [1.0] * len(folders)
    if job.method == "average":
        factors = [f / sum(factors) for f in factors]
    write_shards(target, _merged(folders, factors, base, job.scale))
    for name in ("config.json", *TOKENIZER_FILES):
        if (folders[0] / name).exists():
            shutil.copyfile(folders[0] / name, target / name)


def _merged(
    folders: Sequence[Path], factors: Sequence[float], base: Path | None, scale: float
) -> Iterator[tuple[str, Tensor]]:
    readers = [_Reader(folder) for folder in folders]
    under = _Reader(base) if base else None
    for name in readers[0].names:
        first = readers[0].read(name)
        if not first.is_floating_point():
            yield name, first
            continue
        origin = under.read(name).double() if under else torch.zeros_like(first, dtype=torch.float64)
        total = torch.zeros_like(origin)
        for reader, factor in zip(readers, factors, strict=True):
            total += factor * (reader.read(name).double() - origin)
        yield name, (origin + (scale if under else 1.0) * total).to(first.dtype)


class _Reader:
    """Tensors of a checkpoint folder by name, files opened once."""

    def __init__(self, folder: Path) -> None:
        self.where = weight_map(folder)
        self.names = sorted(self.where)
        self._open = {path: safe_open(path, framework="pt") for path in set(self.where.values())}

    def read(self, name: str) -> Tensor:
        return self._open[self.where[name]].get_tensor(name)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        found = {n: self._open[p].get_slice(n).get_shape() for n, p in self.where.items()}
        return {name: tuple(shape) for name, shape in found.items()}


def _same_architecture(folders: Sequence[Path]) -> None:
    first = _Reader(folders[0]).shapes()
    if packed := [n for n in first if n.endswith("_packed")]:
        raise UserError(f"merge: {folders[0]} has packed weights ('{packed[0]}'): merge before export")
    for folder in folders[1:]:
        other = _Reader(folder).shapes()
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                ours, theirs = first.get(name, "absent"), other.get(name, "absent")
                raise UserError(
                    f"merge: '{name}' is {ours} in {folders[0]} and {theirs} in {folder}: models of one "
                    "architecture are needed"
                )
        if _shape_of_text(folder) != _shape_of_text(folders[0]):
            raise UserError(f"merge: {folder} and {folders[0]} have different config.json files")


def _shape_of_text(folder: Path) -> dict:
    raw = read_json(folder / "config.json")
    return {k: v for k, v in raw.get("text_config", raw).items() if k not in ("dtype", "torch_dtype")}


def run_export(job: ExportJob) -> Path:
    """Returns the run's folder; its checkpoint is the exported model. Errors as `k3rl.trainer.export`."""
    with Journal(job, 1) as journal:
        if journal.done:
            return journal.path
        checkpoint = _checkpoint_of(job.model)
        packer = packer_for(checkpoint, job.targets, job.rule)
        with journal.progress.phase("export"), journal.store.new_checkpoint(0) as folder:
            target = folder / "trainer" / "model"
            target.parent.mkdir(parents=True)
            export(checkpoint, target, form=job.format, packer=packer)
            (target.parent / "trainer.json").write_text(json.dumps({"format": FORMAT, "version": 0}))
            size = sum(f.stat().st_size for f in target.glob("*.safetensors"))
        errors = {f"export/relative_error/{layer}": e for layer, e in packer.errors.items()}
        journal.record(0, {"export/bytes": float(size), **errors}, f"{job.format}, {size:,} bytes")
    return journal.path


def _checkpoint_of(model: ModelConfig) -> Path:
    """The checkpoint around a model's folder."""
    folder = Path(model.path)
    if not (folder.parent / "trainer.json").is_file():
        raise UserError(f"model.path: {folder} is not the model of a run's checkpoint")
    return folder.parent
