"""The limits of a sentence-transformers checkpoint: `sentence_bert_config.json`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedray.files import has_file
from workers.models.config_json.config_file import ConfigFile

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["longest_text"]

_MAX_TOKENS = 2**26


def longest_text(folder: Path, context: int) -> int:
    """Return the maximum number of tokens of a text. Raises CheckpointError."""
    path = folder / "sentence_bert_config.json"
    if not has_file(path):
        return context
    file = ConfigFile.read(path)
    file.reject_unless("do_lower_case", False)
    return min(context, file.integer("max_seq_length", context, most=_MAX_TOKENS))
