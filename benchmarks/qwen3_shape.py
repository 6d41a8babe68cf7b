"""The shape of Qwen3-0.6B: what benchmarks compute with where weights do not matter. Or a checkpoint of that shape with
random weights and k3rl's own small tokenizer, to train from nothing:

    python benchmarks/qwen3_shape.py runs/qwen3_shape
    python benchmarks/qwen3_shape.py runs/qwen3_shape --layers 2 --hidden 64       # for a look on a CPU
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from k3rl.models import ModelConfig, build_model, save_model

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "tie_word_embeddings": True, "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip


def write(folder: Path, dtype: str = "bfloat16", **changes: int) -> None:
    """A checkpoint with random weights of seed 0 at ``folder``."""
    with tempfile.TemporaryDirectory() as shape:
        (Path(shape) / "config.json").write_text(json.dumps({**QWEN3, **changes}))
        save_model(build_model(ModelConfig(path=shape, dtype=dtype), seed=0), folder, "k3rl/chat/nano")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=QWEN3["num_hidden_layers"])
    parser.add_argument("--hidden", type=int, default=QWEN3["hidden_size"])
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    write(args.folder, args.dtype, num_hidden_layers=args.layers, hidden_size=args.hidden)


if __name__ == "__main__":
    main()
