"""Tokenizers of checkpoints without tokenizer.json, converted by transformers.

These are SentencePiece's tokenizer.model and Mistral's tekken.json. The libraries that read them
are optional dependencies.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING

import tokenizers

from pagedray.errors import CheckpointError
from pagedray.files import has_file

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["converted_tokenizer", "convertible_file"]

logger = logging.getLogger(__name__)

_LIBRARIES = {
    "tokenizer.model": ("transformers", "sentencepiece"),
    "tekken.json": ("transformers",),
}


def convertible_file(folder: Path) -> Path | None:
    """Return the file that holds the tokenizer in another format, if any."""
    paths = (folder / name for name in _LIBRARIES)
    return next(filter(has_file, paths), None)


def converted_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer of such a file. Raises CheckpointError."""
    missing = [name for name in _LIBRARIES[path.name] if importlib.util.find_spec(name) is None]
    if missing:
        raise CheckpointError(
            f"{path.parent} has no tokenizer.json, and its {path.name} cannot be converted without "
            f"{' and '.join(missing)}; run: pip install {' '.join(_LIBRARIES[path.name])}"
        )
    # The import takes seconds, which only these checkpoints need.
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(
            path.parent, local_files_only=True, trust_remote_code=False, use_fast=True
        )
        tokenizer = tokenizers.Tokenizer.from_str(loaded.backend_tokenizer.to_str())
    # Whatever the library raises for a file that it cannot read.
    except Exception as error:
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise CheckpointError(
            f"{path} cannot be converted by transformers: {reason or type(error).__name__}."
        ) from error
    logger.info("Converted the tokenizer of %s", path)
    return tokenizer
