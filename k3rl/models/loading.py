"""From a `ModelConfig` to a model, and from a model to a checkpoint folder."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from k3rl.errors import UserError, nearest
from k3rl.models.base import LanguageModel
from k3rl.models.checkpoint import read_tensors, weight_map, write_shards
from k3rl.models.config import PRESETS, K3Config, ModelConfig, parse_k3_config, preset, read_json
from k3rl.models.k3.model import K3Model
from k3rl.models.smollm2 import NAME as SMOLLM2
from k3rl.models.smollm2 import smollm2_folder
from k3rl.quant.qat import prepare

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "vocab.json",
    "merges.txt", "tokenizer.model", "tiktoken.model", "added_tokens.json", "generation_config.json",
)  # fmt: skip


def load_model(
    config: ModelConfig, device: torch.device | str = "cpu", dtype: torch.dtype | None = None, seed: int = 0
) -> LanguageModel:
    """The model that a config names. A preset has no weights and is initialised from ``seed``.

    ``dtype`` overrides the config's. Raises UserError, before anything large is allocated, for a path that is no
    model, an unknown or contradictory config field, a missing shard or tensor, a wrong shape, another model's
    checkpoint, or too little memory.
    """
    dtype = dtype or getattr(torch, config.dtype)
    if config.path in PRESETS:
        return build_model(config, seed, device, dtype)
    folder = model_folder(config.path)
    if config.overrides:
        raise UserError(
            f"model.overrides: {config.path} is a trained checkpoint; its architecture cannot be changed"
        )
    raw = read_json(folder / "config.json")
    if raw.get("model_type") in ("kimi_k3", "kimi_linear") and "attn_res_block_size" in raw.get(
        "text_config", raw
    ):
        model: LanguageModel = _load_k3(folder, raw, torch.device(device), dtype)
    else:
        model = _load_hf(folder, raw, torch.device(device), dtype)
    return _ready(model, config)


def build_model(
    config: ModelConfig, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> LanguageModel:
    """A randomly initialised model of the named architecture: the same for a seed on every device."""
    dtype = dtype or getattr(torch, config.dtype)
    if config.path in PRESETS:
        k3 = preset(config.path, **config.overrides)
        check_memory(parameter_count(k3), dtype, torch.device(device), f"model '{config.path}'")
        model: LanguageModel = K3Model(k3, dtype, device)
        model.reset_parameters(seed)
    else:
        folder = model_folder(config.path)
        raw = read_json(folder / "config.json")
        if "attn_res_block_size" in raw.get("text_config", raw):
            text = {**raw.get("text_config", raw), **config.overrides}
            model = K3Model(parse_k3_config(text, str(folder / "config.json")), dtype, device)
            model.reset_parameters(seed)
        else:
            model = _build_hf(folder, config.overrides, seed, torch.device(device), dtype)
    return _ready(model, config)


def _ready(model: LanguageModel, config: ModelConfig) -> LanguageModel:
    model.activation_checkpointing = config.activation_checkpointing
    if config.qat is not None:
        prepare(model, config.qat)
    return model.eval()


def model_folder(path: str) -> Path:
    """The folder with `config.json` behind a `ModelConfig.path` that is no preset."""
    if path == SMOLLM2:
        return smollm2_folder()
    folder = Path(path).expanduser()
    if path.startswith("@"):
        raise UserError(
            f"model.path: '{path}' refers to a pipeline's job, and this job is not part of a pipeline"
        )
    if not folder.is_dir():
        raise UserError(
            f"model.path: '{path}' is neither a folder nor a preset{nearest(path, [*PRESETS, SMOLLM2])}"
        )
    if not (folder / "config.json").exists():
        raise UserError(f"model.path: {folder} has no config.json")
    return folder


def save_model(
    model: LanguageModel,
    folder: Path | str,
    tokenizer_dir: Path | str | None = None,
    weights: Any = None,
    shard_bytes: int = 4 << 30,
) -> None:
    """Write safetensors and config.json, and the tokenizer's files where a folder with them is given.

    ``weights`` replaces `model.named_weights()`, for a trainer whose live tensors are sharded. The config is written
    last, so that a folder with a config is complete.
    """
    folder = Path(folder)
    write_shards(folder, model.named_weights() if weights is None else weights, shard_bytes)
    for name in TOKENIZER_FILES if tokenizer_dir is not None else ():
        source = Path(tokenizer_dir) / name
        if source.exists() and source.resolve() != (folder / name).resolve():
            shutil.copyfile(source, folder / name)
    temporary = folder / "config.json.tmp"
    temporary.write_text(json.dumps(model.config_dict(), indent=2) + "\n")
    os.replace(temporary, folder / "config.json")


def parameter_count(config: K3Config) -> int:
    """Parameters of a K3 model, without building it."""
    with torch.device("meta"):
        return sum(p.numel() for p in K3Model(config, torch.bfloat16, "meta").parameters())


def check_memory(
    parameters: int, dtype: torch.dtype, device: torch.device, what: str, bytes_per_parameter: int = 0
) -> None:
    """UserError where the weights, or ``bytes_per_parameter`` of each, exceed the device's free memory."""
    training = bytes_per_parameter > dtype.itemsize
    needed = parameters * (bytes_per_parameter if training else dtype.itemsize)
    free = free_memory(device)
    if free is not None and needed > free:
        raise UserError(
            f"{what} needs {needed / 2**30:.1f} GiB for its weights in {str(dtype).removeprefix('torch.')}"
            f"{', their gradients and the optimiser' if training else ''} and "
            f"{device.type} has {free / 2**30:.1f} GiB free"
        )


def check_fits(config: ModelConfig, device: str, bytes_per_parameter: int = 0) -> int:
    """Without building or reading it: the model exists and fits. Returns the size of its vocabulary.

    ``bytes_per_parameter``: what training keeps of each; 0: its weight alone. Raises UserError.
    """
    dtype = getattr(torch, config.dtype)
    if config.path in PRESETS:
        k3 = preset(config.path, **config.overrides)
        parameters, vocabulary = parameter_count(k3), k3.vocab_size
    else:
        folder = model_folder(config.path)
        raw = read_json(folder / "config.json")
        files = set(weight_map(folder).values())
        stored = getattr(torch, str(raw.get("dtype", raw.get("torch_dtype", "float32"))), dtype)
        parameters = sum(path.stat().st_size for path in files) // stored.itemsize
        vocabulary = int(raw.get("text_config", raw)["vocab_size"])
    needed = max(bytes_per_parameter, dtype.itemsize)
    check_memory(parameters, dtype, torch.device(device), f"model '{config.path}'", needed)
    return vocabulary


def float32_weights(folder: Path) -> set[str]:
    """Names of weights that stay float32 in a bfloat16 model of this kind (spec/05: decays, router biases)."""
    raw = read_json(folder / "config.json")
    if "attn_res_block_size" not in raw.get("text_config", raw):
        return set()
    model = K3Model(parse_k3_config(raw, str(folder / "config.json")), torch.bfloat16, "meta")
    return {name for name, tensor in model.named_weights() if tensor.dtype == torch.float32}


def free_memory(device: torch.device) -> int | None:
    """Free bytes, or None where that cannot be known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "cpu" and os.path.exists("/proc/meminfo"):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _load_k3(folder: Path, raw: dict[str, Any], device: torch.device, dtype: torch.dtype) -> K3Model:
    config = parse_k3_config(raw, str(folder / "config.json"))
    weight_map(folder)  # a missing shard is reported before memory is taken
    check_memory(parameter_count(config), dtype, device, str(folder))
    model = K3Model(config, dtype, device)
    own = dict(model.named_weights())
    seen: set[str] = set()
    with torch.no_grad():
        for name, tensor in read_tensors(folder):
            target = own.get(name)
            if target is None:
                raise UserError(f"{folder}: tensor '{name}' does not belong to the model in its config.json")
            if target.shape != tensor.shape:
                raise UserError(
                    f"{folder}: '{name}' is {list(tensor.shape)}, config.json asks for {list(target.shape)}"
                )
            if not tensor.is_floating_point():
                raise UserError(f"{folder}: '{name}' has type {tensor.dtype}, expected floating point")
            target.copy_(tensor)
            seen.add(name)
    missing = own.keys() - seen
    if missing:
        raise UserError(
            f"{folder}: {len(missing)} tensors of the model are missing, among them '{min(missing)}'"
        )
    return model


def _load_hf(folder: Path, raw: dict[str, Any], device: torch.device, dtype: torch.dtype) -> LanguageModel:
    from transformers import AutoModelForCausalLM

    from k3rl.models.hf import HFModel, quiet

    sizes = weight_map(folder)
    needed = sum(path.stat().st_size for path in set(sizes.values()))
    check_memory(
        needed // max(1, getattr(torch, str(raw.get("dtype", "float32")), dtype).itemsize),
        dtype,
        device,
        str(folder),
    )
    config = _hf_config(folder, {})
    try:
        with quiet():
            hf, info = AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=dtype, local_files_only=True, trust_remote_code=False,
                use_safetensors=True, output_loading_info=True, attn_implementation="eager",
                ignore_mismatched_sizes=True,
            )  # fmt: skip
    except (ValueError, OSError, KeyError) as error:
        raise UserError(f"{folder}: {str(error).splitlines()[0]}") from None
    for kind, words in (
        ("missing_keys", "lacks"),
        ("unexpected_keys", "has the foreign"),
        ("mismatched_keys", "has another shape of"),
    ):
        if info[kind]:
            first = sorted(str(k[0] if isinstance(k, tuple) else k) for k in info[kind])[0]
            raise UserError(
                f"{folder}: checkpoint of another model: {words} tensor '{first}' ({len(info[kind])} in all)"
            )
    return HFModel(hf.to(device))


def _hf_config(folder: Path, overrides: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        raise UserError(f"{folder / 'config.json'}: {str(error).splitlines()[0]}") from None
    for key, value in overrides.items():
        if not hasattr(config, key):
            raise UserError(f"model.overrides: unknown field '{key}'{nearest(key, config.to_dict())}")
        setattr(config, key, value)
    return config


def _build_hf(
    folder: Path, overrides: dict[str, Any], seed: int, device: torch.device, dtype: torch.dtype
) -> LanguageModel:
    from transformers import AutoModelForCausalLM

    from k3rl.models.hf import HFModel, quiet

    config = _hf_config(folder, overrides)
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(seed)
        hf = AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=False, attn_implementation="eager"
        )
    return HFModel(hf.to(device))
