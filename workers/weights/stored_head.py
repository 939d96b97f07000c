"""The head of a checkpoint that stores a head although its configuration ties the embeddings."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from workers.weights.checkpoint import HEAD_NAME, Checkpoint

if TYPE_CHECKING:
    from pagedray.config import EngineConfig

__all__ = ["with_stored_head"]

logger = logging.getLogger(__name__)


def with_stored_head(config: EngineConfig) -> EngineConfig:
    """Return the configuration, untied if the checkpoint has a head that is not its embedding.

    Transformers 5 does the same. Raises CheckpointError.
    """
    model = config.model
    if not model.has_tied_embeddings or config.load_format == "dummy":
        return config
    embedding = f"{model.names.embedding}.weight"
    with Checkpoint(model.folder, model.text_tensors) as checkpoint:
        has_both = HEAD_NAME in checkpoint and embedding in checkpoint
        if not has_both or checkpoint.are_equal(HEAD_NAME, embedding):
            return config
    logger.warning(
        "config.json ties %s to the embedding, but the checkpoint stores different values, which "
        "are used; set tie_word_embeddings to false to silence this.",
        HEAD_NAME,
    )
    return replace(config, model=replace(model, has_tied_embeddings=False))
