"""From a run's checkpoint to a folder that others load: `transformers`, vLLM, `k3rl` itself."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from k3rl.errors import UserError
from k3rl.models.checkpoint import INDEX, read_tensors, weight_map, write_shards
from k3rl.models.config import read_json
from k3rl.models.loading import TOKENIZER_FILES, float32_weights
from k3rl.quant.config import EXPERTS
from k3rl.quant.export import Packer, in_bfloat16
from k3rl.quant.mx import Rule
from k3rl.trainer.checkpoint import read_facts

Form = Literal["same", "bf16", "mxfp4"]


def latest_checkpoint(run: Path | str) -> Path:
    """The newest complete checkpoint of a run's folder; ``run`` may also be a checkpoint itself.

    `UserError` where there is none.
    """
    run = Path(run)
    if (run / "trainer.json").exists() or (run / "trainer" / "trainer.json").exists():
        return run
    found = [
        (int(m.group(1)), p)
        for p in (run / "checkpoints").glob("step-*")
        if (m := re.fullmatch(r"step-(\d+)", p.name)) and trainer_folder(p) is not None
    ]
    if not found:
        raise UserError(f"{run}: no checkpoint to export, there is none in {run / 'checkpoints'}")
    return max(found)[1]


def trainer_folder(checkpoint: Path) -> Path | None:
    """Where the trainer's part of a checkpoint lies: itself, or its folder ``trainer``."""
    for folder in (checkpoint, checkpoint / "trainer"):
        if (folder / "trainer.json").exists():
            return folder
    return None


def export(
    source: Path | str,
    target: Path | str,
    tokenizer_dir: Path | str | None = None,
    form: Form = "same",
    packer: Packer | None = None,
) -> Path:
    """The model of a run or checkpoint to ``target``, whole or not at all; returns the target.

    ``same`` copies, ``bf16`` casts, ``mxfp4`` packs what ``packer`` says (routed experts by default), casts the rest.
    The tokenizer's files come along where the checkpoint has them, or from ``tokenizer_dir``. `UserError` where the
    source has no complete model, nothing is there to pack, or the target exists.
    """
    checkpoint = latest_checkpoint(source)
    folder = trainer_folder(checkpoint)
    assert folder is not None  # latest_checkpoint found it
    facts = read_facts(folder)
    model, target = folder / "model", Path(target)
    if target.exists():
        raise UserError(f"{target} exists already")
    if not (model / "config.json").exists():
        raise UserError(f"{model}: no config.json; the checkpoint is not complete")
    files = {path.name: path for path in weight_map(model).values()} if form == "same" else {}
    files |= {
        p.name: p
        for p in model.iterdir()
        if (p.suffix == ".json" and (form == "same" or p.name != INDEX)) or p.name in TOKENIZER_FILES
    }
    for name in TOKENIZER_FILES if tokenizer_dir is not None else ():
        path = Path(tokenizer_dir) / name
        if path.exists():
            files[name] = path
    temporary = target.parent / f".{target.name}.{uuid4().hex[:8]}"
    temporary.mkdir(parents=True)
    try:
        for name, path in files.items():
            shutil.copyfile(path, temporary / name)
        origin = {"checkpoint": str(checkpoint), "version": facts["version"], "format": form}
        if form != "same":
            origin |= _convert(model, temporary, form, packer or Packer())
        (temporary / "k3rl.json").write_text(json.dumps(origin, indent=2) + "\n")
        os.replace(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return target


def packer_for(source: Path | str, targets: Sequence[str] = (), rule: Rule | None = None) -> Packer:
    """What packs the model of a run or checkpoint: as it was trained, unless said otherwise; routed experts under
    ``ceil`` where it was trained without `qat`. `UserError` where the source has no complete model.
    """
    folder = trainer_folder(latest_checkpoint(source))
    assert folder is not None  # latest_checkpoint found it
    trained = read_facts(folder).get("qat") or {}
    return Packer(targets or trained.get("targets") or (EXPERTS,), rule or trained.get("rule") or "ceil")


def _convert(model: Path, target: Path, form: Form, packer: Packer) -> dict[str, Any]:
    """Weights and config.json in another format; returns what there is to say about it."""
    tensors = read_tensors(model)
    keep = float32_weights(model)
    write_shards(target, packer.packed(tensors, keep) if form == "mxfp4" else in_bfloat16(tensors, keep))
    config = read_json(model / "config.json")
    for part in (config, config.get("text_config", config)):
        part["dtype"] = "bfloat16"
        part.pop("torch_dtype", None)
        if form == "mxfp4":
            part["quantization_config"] = packer.declaration()
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return {"rule": packer.rule, "relative_error": packer.errors} if form == "mxfp4" else {}
