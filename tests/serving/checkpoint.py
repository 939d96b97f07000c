"""A small tokenizer, made for the tests."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["SPECIAL_TOKENS", "TEMPLATE", "TEXT", "write_tokenizer"]

TEXT = "The quick brown fox says h\u00e9llo \u4f60\u597d \U0001f642 to everyone. "
SPECIAL_TOKENS = ("<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('The system speaks first.') }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write_tokenizer(
    folder: Path,
    *,
    vocab_size: int = 300,
    special_tokens: Sequence[str] = (),
    template: str | None = None,
) -> None:
    """Write a byte-level tokenizer with few merges, whose characters span tokens.

    `special_tokens` follow those of every test; `template` is that of its own file.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["The quick brown fox says to everyone. "] * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.add_special_tokens(list(special_tokens))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "lstrip": False},
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
