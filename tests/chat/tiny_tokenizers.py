"""Tiny Hugging Face tokenizers with chat templates of known behaviour, made on the spot."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Plain ChatML: knows no tools and no thinking."""

THINKER = """\
{%- if tools %}<|im_start|>system
{%- if messages[0].role == 'system' %}
{{ messages[0].content + '\\n' }}
{%- endif %}
Tools:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}
{%- set thought = m.reasoning_content if m.reasoning_content is string else '' %}
{%- set said = m.content %}
{%- if '</think>' in said %}{% set thought = said.split('</think>')[0].split('<think>')[-1] %}
{%- set said = said.split('</think>')[-1].lstrip('\\n') %}{% endif %}<|im_start|>assistant
{% if loop.index0 > ns.last and (loop.last or thought) %}<think>
{{ thought.strip('\\n') }}
</think>

{% endif %}{{ said }}
{%- for call in m.tool_calls or [] %}
{%- if not loop.first or said %}{{ '\\n' }}{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson
 if call.function.arguments is not string else call.function.arguments }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
"""Behaves as Qwen3's: drops thinking of turns before the last question, groups results in a user turn."""

OPENER = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
"""The prompt opens the thinking itself, and the template never writes any."""

STRICT = """\
{{- bos_token }}
{%- for m in messages %}
{%- if m.role not in ('user', 'assistant') %}{{ raise_exception('only users and assistants') }}{% endif %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- ('[INST] ' + m.content + ' [/INST]') if m.role == 'user' else (' ' + m.content + eos_token) }}
{%- endfor %}"""
"""Knows no system role, insists on alternation, has no generation prompt."""

SENTENCES = [
    "What is the sum of 12 and 34? The answer is 46.",
    "Think step by step, then call the tool with its arguments.",
    '{"name": "add", "arguments": {"a": 1, "b": [2, 3]}}\n',
    "user assistant system tool think response\n\n",
]


def byte_level(tags_are_tokens: bool = True, special_entries: bool = False) -> Tokenizer:
    """A byte-level BPE of some 340 ids. ``special_entries``: special tokens are entries of the model too."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"), "isolated"
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=special if special_entries else [],
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES * 5, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    if tags_are_tokens:
        tags = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
        tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in tags])
    return tokenizer


def sentencepiece_like(prepend: str = "first") -> Tokenizer:
    """Blanks as ▁, bytes for unknown characters, specials among the model's entries, as Mistral has it."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=prepend, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[*special, *(f"<0x{b:02X}>" for b in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator([s + " [INST] [/INST]" for s in SENTENCES] * 5, trainer)
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] in special]
    return Tokenizer.from_str(json.dumps(spec))


def write_folder(
    folder: Path, tokenizer: Tokenizer, template: str | None, eos: str, bos: str = "<s>"
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    token = {"__type": "AddedToken", "content": bos, "lstrip": False, "rstrip": False, "normalized": False}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "bos_token": token}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
