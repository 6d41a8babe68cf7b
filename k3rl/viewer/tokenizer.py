"""The tokenizer of a run, without what trains: the viewer starts in a second and stays small, for it imports no torch.

`rewards.stored` has the same for those who score again; importing it brings the models along.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from k3rl.chat import Renderer, load_renderer
from k3rl.errors import UserError
from k3rl.viewer.sources import Source

_known: dict[Path, Renderer | None] = {}
_lock = threading.Lock()


def tokenizer_of(source: Source) -> Renderer | None:
    """That of the run's model, or of its newest checkpoint; None where there is none: ids stand for themselves."""
    with _lock:
        if source.path not in _known:
            _known[source.path] = _load(source)
        return _known[source.path]


def _load(source: Source) -> Renderer | None:
    try:
        config = source.config()
    except UserError:  # every page says so already
        return None
    saved = sorted(source.path.glob("checkpoints/*/trainer/model"))[-1:]
    for place in [*_models(config), *map(str, saved)]:
        try:
            return load_renderer(place)
        except UserError:
            continue  # the next place may have it
    return None


def _models(config: dict[str, Any]) -> list[str]:
    models = [config["model"]] if "model" in config else config.get("models", {})
    if isinstance(models, dict):
        models = list(models.values())
    paths = [m.get("path") if isinstance(m, dict) else m for m in models if m]
    return [p for p in paths if isinstance(p, str)]
