"""The modules of a sentence-transformers checkpoint, and the limits that they set.

Its `modules.json` lists the modules that run after the tokenizer, and `sentence_bert_config.json`
has the settings of the tokenizer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedray.presence import has_file
from workers.models.config_json.config_file import ConfigFile

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["check_modules", "longest_text"]

_SUPPORTED = ("Transformer", "Pooling", "Normalize")
_MAX_TOKENS = 2**26


def check_modules(folder: Path) -> None:
    """Raise CheckpointError for a module that would change vectors and is not supported."""
    path = folder / "modules.json"
    if not has_file(path):
        return
    for module in ConfigFile.read_list(path):
        kind = module.word("type").rpartition(".")[2]
        if kind not in _SUPPORTED:
            raise module.rejection(
                "type",
                f"names the module {kind[:40]!r}; supported modules are {', '.join(_SUPPORTED)}",
            )


def longest_text(folder: Path, context: int) -> int:
    """Return the maximum number of tokens of a text. Raises CheckpointError."""
    path = folder / "sentence_bert_config.json"
    if not has_file(path):
        return context
    file = ConfigFile.read(path)
    file.reject_unless("do_lower_case", False)
    return min(context, file.integer("max_seq_length", context, most=_MAX_TOKENS))
