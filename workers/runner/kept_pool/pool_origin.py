"""What the content of a CPU pool is of: the same bytes mean the same keys and values."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pagedray.config import EngineConfig

__all__ = ["pool_origin"]


def pool_origin(config: EngineConfig, *, layout: Sequence[object], rank: int) -> bytes:
    """Return a digest of the pool's layout, the rank's part of the model, and its weights.

    Weights count as the same if their files have the same names, sizes and times.
    """
    files = () if config.load_format == "dummy" else _weight_files(config.model.folder)
    parallel = config.parallel.tensor_parallel_size, config.parallel.enable_expert_parallel
    seed = config.load_format, config.load_seed
    text = repr((config.model, tuple(layout), rank, parallel, seed, files))
    return hashlib.sha256(text.encode()).digest()


def _weight_files(folder: Path) -> tuple[tuple[str, int, int], ...]:
    stats = [(path.name, path.stat()) for path in sorted(folder.glob("*.safetensors"))]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
