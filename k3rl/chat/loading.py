"""`load_renderer`: from a preset's name or a folder to a renderer."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from k3rl.chat import xtml_format as fmt
from k3rl.chat.renderer import Renderer
from k3rl.chat.vocabulary import FastVocabulary
from k3rl.chat.xtml import Convention, XtmlRenderer
from k3rl.errors import UserError

NANO_FOLDER = Path(__file__).parent / "nano"
PRESETS = {"k3-nano": NANO_FOLDER, "k3-mini": NANO_FOLDER}


def load_renderer(path: str | Path, convention: Convention = "channel") -> Renderer:
    """The renderer of a preset's name (``k3-nano``), or of a folder with ``tokenizer.json``."""
    folder = PRESETS.get(str(path), Path(path))
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise UserError(f"'{path}' has no tokenizer.json and is no preset; known: {', '.join(PRESETS)}")
    vocabulary = FastVocabulary(Tokenizer.from_file(str(file)))
    if all(token in vocabulary.special_ids for token in fmt.MARKERS):
        return XtmlRenderer(vocabulary, str(path), convention)
    raise UserError(f"tokenizer '{path}' lacks {', '.join(fmt.MARKERS)}")
