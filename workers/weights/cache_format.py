"""How a model keeps keys and values: the cache's dtype, and scales of the checkpoint for fp8."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from pagedray.errors import CheckpointError
from pagedray.weight_format import CacheScales
from workers.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from pagedray.config import EngineConfig
    from pagedray.model_config import ModelConfig

__all__ = ["with_cache_format"]

logger = logging.getLogger(__name__)


def with_cache_format(config: EngineConfig) -> EngineConfig:
    """Return the configuration of a model that knows its cache. Raises CheckpointError."""
    dtype = config.cache.kv_cache_dtype
    model = replace(config.model, kv_cache_dtype=dtype)
    has_scales = model.quantization is not None and model.quantization.has_cache_scales
    if has_scales and dtype == "auto":
        logger.info(
            "The checkpoint has scales for an fp8 cache, which --kv-cache-dtype fp8_e4m3 uses."
        )
    elif has_scales and config.load_format != "dummy":
        model = replace(model, cache_scales=_stored_scales(model))
    return replace(config, model=model)


def _stored_scales(model: ModelConfig) -> tuple[CacheScales, ...]:
    with Checkpoint(model.folder, model.text_tensors) as checkpoint:
        return tuple(
            CacheScales(*(_scale(checkpoint, name) for name in model.cache_scale_names(layer)))
            for layer in range(model.num_layers)
        )


def _scale(checkpoint: Checkpoint, name: str) -> float:
    if name not in checkpoint:
        raise CheckpointError(f"{checkpoint.folder}: tensor {name} is missing.")
    chunks = list(checkpoint.chunks(name)) if checkpoint.shape_of(name) == (1,) else []
    if not chunks:
        raise CheckpointError(
            f"{checkpoint.path_of(name)}: tensor {name} has shape "
            f"{list(checkpoint.shape_of(name))}, but a scale of an fp8 cache has [1]."
        )
    scale = float(chunks[0])
    if not 0 < scale < math.inf:
        raise CheckpointError(
            f"{checkpoint.path_of(name)}: tensor {name} is {scale}, but a scale of an fp8 cache "
            "must be positive and finite."
        )
    return scale
