"""Which tensors a model folder's weights consist of: what an update must bring, each exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

Spec = tuple[tuple[int, ...], torch.dtype | None]


def expected_weights(folder: Path, dtype: torch.dtype) -> dict[str, Spec]:
    """Shape and dtype by checkpoint name, from the headers of the folder's safetensors files.

    The type that most of the checkpoint has stands for the engine's own ``dtype``; tensors that deviate in
    the checkpoint, such as float32 router biases, keep theirs. Packed integer tensors have no dtype to
    compare.
    """
    headers: dict[str, tuple[tuple[int, ...], str]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                view = file.get_slice(name)
                headers[name] = (tuple(view.get_shape()), view.get_dtype())
    if not headers:
        raise ValueError(f"{folder} has no safetensors files")
    main = Counter(kind for _, kind in headers.values() if kind in _DTYPES).most_common(1)[0][0]
    return {
        name: (shape, dtype if kind == main else _DTYPES.get(kind)) for name, (shape, kind) in headers.items()
    }


def collect(
    weights: Iterable[tuple[str, torch.Tensor]], expected: dict[str, Spec]
) -> dict[str, torch.Tensor]:
    """All of ``weights`` by name. Raises `ValueError` unless they are exactly the expected ones."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        if name not in expected:
            raise ValueError(f"weight '{name}' is not one of this model's {len(expected)}")
        if name in out:
            raise ValueError(f"weight '{name}' came twice")
        shape, dtype = expected[name]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"weight '{name}' has shape {tuple(tensor.shape)}, expected {shape}")
        if dtype is not None and tensor.dtype != dtype:
            raise ValueError(f"weight '{name}' is {tensor.dtype}, expected {dtype}")
        out[name] = tensor
    missing = expected.keys() - out.keys()
    if missing:
        raise ValueError(f"{len(missing)} weights did not come, among them '{min(missing)}'")
    return out
