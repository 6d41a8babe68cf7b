"""MXFP4 and vLLM: which values an engine loads of a publication, and which folders this build of vLLM can serve.

vLLM runs MXFP4 codes where it has a kernel for them (0.32: CUDA from SM80 by Marlin, ROCm, XPU; none on CPUs). An
engine that was started from packed weights takes packed names as they come, through layer-wise reload. One that holds
whole matrices gets their exact values: codes are unpacked, and what a trainer fake-quantises is rounded by the same
function.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from k3rl.errors import UserError
from k3rl.quant.config import QatConfig
from k3rl.quant.export import is_target
from k3rl.quant.mx import E2M1, fake_quantise, unpack_mxfp4

PARTS = ("weight_packed", "weight_scale")


def served(
    weights: Iterable[tuple[str, Tensor]],
    expected: Container[str],
    dtype: torch.dtype,
    qat: QatConfig | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Weights under the names of an engine that holds ``expected``, with the values that the trainer computes with.

    Raises `ValueError` where one of codes and scales came without the other.
    """
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights:
        base, _, kind = name.rpartition(".")
        if kind in PARTS and name not in expected:
            pair = halves.setdefault(base, {})
            pair[kind] = tensor
            if len(pair) == len(PARTS):
                del halves[base]
                yield f"{base}.weight", unpack_mxfp4(*(pair[part] for part in PARTS), dtype, name=base)
        elif qat is not None and kind == "weight" and tensor.dim() == 2 and is_target(base, qat.targets):
            yield name, fake_quantise(tensor, E2M1, qat.rule)
        else:
            yield name, tensor
    if halves:
        raise ValueError(f"'{min(halves)}' came with only one of {' and '.join(PARTS)}")


def read_folder(folder: Path, dtypes: dict[str, torch.dtype | None]) -> Iterator[tuple[str, Tensor]]:
    """A folder's tensors, in the types in which an engine takes them (None: as they are)."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name).to(dtypes[name])


def check_scheme(folder: Path, qat: QatConfig | None) -> None:
    """Raises `UserError` for what this build of vLLM would not compute as the trainer does."""
    if qat is not None and qat.activations != "none":
        raise UserError(
            f"model.qat.activations: vLLM does not round activations to {qat.activations}; "
            "set them to 'none', or choose engine 'native'"
        )
    config = json.loads((folder / "config.json").read_text())
    declared = (
        config.get("quantization_config") or config.get("text_config", {}).get("quantization_config") or {}
    )
    if declared.get("format") != "mxfp4-pack-quantized":
        return
    from vllm.platforms import current_platform

    try:
        from vllm.model_executor.kernels.linear import init_mxfp4_linear_kernel
    except ImportError:  # an older vLLM, which chooses elsewhere: its own message has to do
        return
    try:
        init_mxfp4_linear_kernel()
    except Exception as error:
        raise UserError(
            f"{folder} holds MXFP4 codes, and this build of vLLM has no kernel for them on "
            f"{current_platform.device_type}; export with `--format bf16`, or choose engine 'native'"
        ) from error
