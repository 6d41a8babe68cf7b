"""Loading renderers: what is found, what is refused, and by what two processes know that they agree."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tiny_tokenizers import CHATML, THINKER, byte_level, sentencepiece_like, write_folder
from tokenizers import Tokenizer, decoders, models

from k3rl.chat import XtmlRenderer, load_renderer
from k3rl.chat.build_nano_tokenizer import NANO_FOLDER
from k3rl.chat.template import TemplateRenderer
from k3rl.errors import UserError


def test_a_preset_and_its_folder_are_the_same() -> None:
    by_name, by_folder = load_renderer("k3-nano"), load_renderer(NANO_FOLDER)
    assert isinstance(by_name, XtmlRenderer)
    assert by_name.fingerprint() == by_folder.fingerprint()
    assert by_name.name == "k3-nano"


def test_a_tokenizer_saved_by_transformers_is_the_same(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(NANO_FOLDER).save_pretrained(tmp_path)
    saved, preset = load_renderer(tmp_path), load_renderer("k3-nano")
    messages = [{"role": "user", "content": "What is 12+34?\n\n<|sep|>"}]
    assert saved.encode_prompt(messages, effort="low") == preset.encode_prompt(messages, effort="low")
    assert saved.fingerprint() == preset.fingerprint()


def test_the_kind_of_renderer_follows_from_the_tokenizer(tmp_path: Path) -> None:
    chatml = load_renderer(write_folder(tmp_path / "a", byte_level(), CHATML, "<|im_end|>"))
    assert isinstance(chatml, TemplateRenderer)
    assert [chatml.decode([i]) for i in chatml.stop_token_ids] == ["<|im_end|>"]


def test_all_ends_that_the_files_name_are_stop_tokens(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(), CHATML, "<|endoftext|>")
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [ids("</s>"), ids("<|im_end|>")]})
    )
    (folder / "config.json").write_text(json.dumps({"eos_token_id": ids("<s>")}))
    renderer = load_renderer(folder)
    expected = ["<|im_end|>", "</s>", "<s>", "<|endoftext|>"]
    assert [renderer.decode([i]) for i in renderer.stop_token_ids] == expected


def test_templates_in_the_config_are_found(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(), None, "<|im_end|>")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    prompts = []
    for template in (CHATML, [{"name": "rag", "template": "x"}, {"name": "default", "template": CHATML}]):
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
        prompts.append(load_renderer(folder).encode_prompt([{"role": "user", "content": "Hi"}]))
    assert prompts[0] == prompts[1]


def _swapped(folder: Path, a: str, b: str) -> None:
    file = folder / "tokenizer.json"
    spec = json.loads(file.read_text())
    vocabulary = spec["model"]["vocab"]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    file.write_text(json.dumps(spec))


def test_fingerprints_tell_vocabularies_of_one_size_apart(tmp_path: Path) -> None:
    """A teacher with other ids for the same words gives plausible, meaningless scores (trl#4562)."""
    shutil.copytree(NANO_FOLDER, tmp_path / "swapped")
    _swapped(tmp_path / "swapped", "a", "b")
    prints = [
        load_renderer("k3-nano").fingerprint(),
        load_renderer(tmp_path / "swapped").fingerprint(),
        load_renderer("k3-nano", convention="message").fingerprint(),
        load_renderer(write_folder(tmp_path / "c", byte_level(), CHATML, "<|im_end|>")).fingerprint(),
        load_renderer(write_folder(tmp_path / "t", byte_level(), THINKER, "<|im_end|>")).fingerprint(),
        load_renderer(write_folder(tmp_path / "n", byte_level(False), CHATML, "<|im_end|>")).fingerprint(),
    ]
    assert len(set(prints)) == len(prints)
    assert load_renderer(tmp_path / "c").fingerprint() == prints[3]


def test_what_cannot_be_loaded_is_said_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'k3-nan' is neither a folder nor a preset; did you mean 'k3-nano'"):
        load_renderer("k3-nan")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"holds no tokenizer: neither tokenizer\.json nor tiktoken\.model"):
        load_renderer(tmp_path / "empty")
    folder = write_folder(tmp_path / "bare", byte_level(), None, "<|im_end|>")
    with pytest.raises(
        UserError, match=r"lacks the structure tokens <\|end_of_msg\|>.*and has no chat template"
    ):
        load_renderer(folder)
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(UserError, match=r"chat template of .* refuses the conversation"):
        load_renderer(folder)
    (folder / "chat_template.jinja").write_text("nothing said")
    with pytest.raises(UserError, match="drops what the assistant says"):
        load_renderer(folder)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config\.json is not JSON"):
        load_renderer(folder)
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(UserError, match="holds a list, not a mapping"):
        load_renderer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json is not a tokenizer"):
        load_renderer(folder)


def test_half_the_structure_tokens_are_not_enough(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|open|>", "<|sep|>"])
    with pytest.raises(UserError, match=r"lacks the structure tokens <\|end_of_msg\|>, <\|close\|> and"):
        load_renderer(write_folder(tmp_path, tokenizer, None, "<|im_end|>"))


def test_structure_tokens_in_a_vocabulary_that_is_not_byte_level_are_refused(tmp_path: Path) -> None:
    tokenizer = sentencepiece_like()
    tokenizer.add_special_tokens(["<|open|>", "<|sep|>", "<|close|>", "<|end_of_msg|>"])
    with pytest.raises(UserError, match="not byte-level"):
        load_renderer(write_folder(tmp_path, tokenizer, None, "</s>"))


def test_a_template_without_any_end_of_turn_is_refused(tmp_path: Path) -> None:
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(UserError, match="has no end-of-turn token"):
        load_renderer(write_folder(tmp_path, byte_level(), plain, "none"))


def test_a_tokenizer_that_cannot_be_reproduced_in_pieces_is_refused(tmp_path: Path) -> None:
    """A special token that counts only as a whole word: ids in pieces would not be the tokenizer's own."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "hello": 1}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<|im_end|>"])
    from tokenizers import AddedToken

    tokenizer.add_special_tokens([AddedToken("Hello", special=True, single_word=True)])
    template = "{% for m in messages %}Hellos {{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(UserError, match="text in pieces gets other ids"):
        load_renderer(write_folder(tmp_path, tokenizer, template, "<|im_end|>"))


def test_an_unknown_convention_is_refused() -> None:
    with pytest.raises(UserError, match="'chanel' is neither"):
        load_renderer("k3-nano", convention="chanel")  # type: ignore[arg-type]
