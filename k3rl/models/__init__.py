"""Language models: K3's family and any Hugging Face causal LM behind one contract (`LanguageModel`)."""

from k3rl.models.base import LanguageModel
from k3rl.models.cache import Cache
from k3rl.models.config import K3Config, ModelConfig
from k3rl.models.loading import build_model, load_model, save_model
from k3rl.models.packing import Layout

__all__ = [
    "Cache",
    "K3Config",
    "LanguageModel",
    "Layout",
    "ModelConfig",
    "build_model",
    "load_model",
    "save_model",
]
