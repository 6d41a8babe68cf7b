"""Checkpoint folders: sharded safetensors with an index, written and read strictly.

Source: spec/05 §2 (names), spec/04 §3 (packed experts).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from k3rl.errors import UserError
from k3rl.models.config import read_json
from k3rl.quant.mx import NAN_SCALE, unpack_mxfp4

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PACKED, SCALE = ".weight_packed", ".weight_scale"


def write_shards(folder: Path, weights: Iterable[tuple[str, Tensor]], shard_bytes: int = 4 << 30) -> None:
    """Write tensors as `model.safetensors`, or as numbered shards with an index where they exceed one shard.

    Files appear under their final names only when complete; an index is written last.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        nonlocal shard, size
        if shard:
            save_file(shard, folder / f"part-{len(shards):05d}.tmp", metadata={"format": "pt"})
            shards.append(list(shard))
            shard, size = {}, 0

    for name, tensor in weights:
        nbytes = tensor.numel() * tensor.element_size()
        if size and size + nbytes > shard_bytes:
            flush()
        # A copy: safetensors refuses tensors that share storage, and views of a stack do.
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += nbytes
        total += nbytes
    flush()
    _drop_old(folder)
    if len(shards) == 1:
        os.replace(folder / "part-00000.tmp", folder / SINGLE)
        return
    where: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        os.replace(folder / f"part-{i:05d}.tmp", folder / file)
        where |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    temporary = folder / f"{INDEX}.tmp"
    temporary.write_text(json.dumps(index, indent=1))
    os.replace(temporary, folder / INDEX)


def _drop_old(folder: Path) -> None:
    for file in folder.glob("model*.safetensors*"):
        file.unlink()


def weight_map(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor. UserError where the folder has no weights or the index names a missing shard."""
    if (folder / INDEX).exists():
        listed = read_json(folder / INDEX).get("weight_map")
        if not isinstance(listed, dict):
            raise UserError(f"{folder / INDEX}: has no weight_map")
        out = {}
        for name, file in listed.items():
            path = folder / str(file)
            if path.parent != folder:
                raise UserError(f"{folder / INDEX}: '{file}' points outside the folder")
            if not path.exists():
                raise UserError(f"{folder}: shard '{file}', named by the index, is missing")
            out[name] = path
        return out
    if (folder / SINGLE).exists():
        with _open(folder / SINGLE) as handle:
            return dict.fromkeys(handle.keys(), folder / SINGLE)
    raise UserError(f"{folder}: no {SINGLE} and no {INDEX}")


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error})") from None


def read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """All tensors, a file at a time. Packed MXFP4 experts come out as bfloat16 `.weight`; vision tensors are skipped.

    Whether a tensor is packed is read from the names on disk, not from the config's patterns (spec/04 §2 Traps).
    """
    where = weight_map(folder)
    by_file: dict[Path, list[str]] = {}
    for name, path in where.items():
        by_file.setdefault(path, []).append(name)
    halves: dict[str, dict[str, Tensor]] = {}
    for path, names in by_file.items():
        with _open(path) as handle:
            held = set(handle.keys())
            for name in names:
                if name not in held:
                    raise UserError(f"{path}: tensor '{name}', named by the index, is missing")
                if re.match(r"(vision_tower|mm_projector)\.", name):
                    continue
                base, dot, kind = name.rpartition(".")
                if dot + kind not in (PACKED, SCALE):
                    yield name, handle.get_tensor(name)
                    continue
                pair = halves.setdefault(base, {})
                pair[kind] = handle.get_tensor(name)
                if len(pair) == 2:
                    packed, scale = pair["weight_packed"], pair["weight_scale"]
                    if bool((scale == NAN_SCALE).any()):
                        raise UserError(f"{folder}: '{base}.weight_scale' holds 255, which is NaN")
                    yield f"{base}.weight", unpack_mxfp4(packed, scale, name=base)
                    del halves[base]
    if halves:
        raise UserError(f"{folder}: '{min(halves)}' has only one of weight_packed and weight_scale")
