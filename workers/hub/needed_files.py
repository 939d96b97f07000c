"""Which files of a repository belong to a model, besides its weights."""

from __future__ import annotations

import re

__all__ = ["is_side_file"]

_NAMES = frozenset(
    {
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "config.json",
        "config_sentence_transformers.json",
        "generation_config.json",
        "merges.txt",
        "model.safetensors.index.json",
        "modules.json",
        "sentence_bert_config.json",
        "special_tokens_map.json",
        "tekken.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
    }
)
# More templates, and the modules of sentence-transformers, such as 1_Pooling.
_PATTERN = re.compile(
    r"additional_chat_templates/[^/]+\.jinja|\d+_\w+/config\.json|\d+_Dense/model\.safetensors",
    re.ASCII,
)


def is_side_file(name: str) -> bool:
    """Return whether a file configures the model, its tokenizer or its chat template."""
    return name in _NAMES or _PATTERN.fullmatch(name) is not None
