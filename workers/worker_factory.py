"""Chooses the worker of a model: generation, or embedding and scoring."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.decoder_worker import DecoderWorker
from workers.embedding_worker import EmbeddingWorker

if TYPE_CHECKING:
    import torch

    from pagedray.config import EngineConfig
    from workers.parallel.group import ParallelGroup
    from workers.worker import Worker

__all__ = ["make_worker"]


def make_worker(
    config: EngineConfig, group: ParallelGroup, device: torch.device | None = None
) -> Worker:
    """Return the worker of one rank. Raises StartupError."""
    kind = EmbeddingWorker if config.model.pools else DecoderWorker
    return kind(config, group, device)
