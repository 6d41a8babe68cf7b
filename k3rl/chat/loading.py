"""`load_renderer`: from a preset's name or a folder of tokenizer files to a renderer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from k3rl.chat import xtml_format as fmt
from k3rl.chat.renderer import Renderer
from k3rl.chat.template import TemplateRenderer
from k3rl.chat.tiktoken_vocabulary import TIKTOKEN_FILE, load_tiktoken
from k3rl.chat.vocabulary import FastVocabulary
from k3rl.chat.xtml import Convention, XtmlRenderer
from k3rl.errors import UserError, nearest

NANO_FOLDER = Path(__file__).parent / "nano"
PRESETS = {"k3-nano": NANO_FOLDER, "k3-mini": NANO_FOLDER}
"""Models that come with a tokenizer. k3-mini is small enough to share the nano one."""

_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def load_renderer(path: str | Path, convention: Convention = "channel") -> Renderer:
    """The renderer of a preset (``k3-nano``) or of a folder with ``tokenizer.json`` or ``tiktoken.model``.

    A tokenizer with K3's structure tokens speaks XTML, with ``convention`` as its generation prompt; any
    other needs a chat template. Raises `UserError` where files are missing or broken, or there is neither.
    """
    folder = PRESETS.get(str(path), Path(path))
    if not folder.is_dir():
        raise UserError(f"tokenizer '{path}' is neither a folder nor a preset{nearest(str(path), PRESETS)}")
    if (folder / "tokenizer.json").is_file():
        vocabulary = _fast_vocabulary(folder)
        if all(token in vocabulary.special_ids for token in fmt.MARKERS):
            return XtmlRenderer(vocabulary, str(path), convention)
        return _template_renderer(folder, vocabulary, str(path))
    if (folder / TIKTOKEN_FILE).is_file():
        config = _json(folder / "tokenizer_config.json")
        return XtmlRenderer(load_tiktoken(folder / TIKTOKEN_FILE, config), str(path), convention)
    raise UserError(f"folder '{path}' holds no tokenizer: neither tokenizer.json nor {TIKTOKEN_FILE}")


def _fast_vocabulary(folder: Path) -> FastVocabulary:
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exceptions for files that it cannot read
        raise UserError(f"{folder / 'tokenizer.json'} is not a tokenizer: {error}") from error
    return FastVocabulary(tokenizer)


def _template_renderer(folder: Path, vocabulary: FastVocabulary, name: str) -> TemplateRenderer:
    config = _json(folder / "tokenizer_config.json")
    template = _chat_template(folder, config)
    if template is None:
        lacking = [token for token in fmt.MARKERS if token not in vocabulary.special_ids]
        raise UserError(
            f"tokenizer '{name}' speaks no chat format: it lacks the structure tokens {', '.join(lacking)} "
            "and has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json)"
        )
    named = {**_json(folder / "special_tokens_map.json"), **config}
    variables = {key: text for key in _TOKEN_KEYS if (text := _token_text(named.get(key)))}
    stops = [i for file in ("generation_config.json", "config.json") for i in _eos_ids(_json(folder / file))]
    eos = vocabulary.special_ids.get(variables.get("eos_token", ""))
    stops += [eos] if eos is not None else []
    return TemplateRenderer(vocabulary, template, name, variables, stops)


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) and template else None


def _token_text(token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _eos_ids(config: dict[str, Any]) -> list[int]:
    eos = config.get("eos_token_id")
    return [i for i in (eos if isinstance(eos, list) else [eos]) if isinstance(i, int)]


def _json(file: Path) -> dict[str, Any]:
    """The mapping in `file`; empty where there is no such file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} holds a {type(content).__name__}, not a mapping")
    return content
