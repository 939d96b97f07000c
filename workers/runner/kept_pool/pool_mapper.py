"""Maps the memory for the CPU pool of a rank, or logs why it cannot."""

from __future__ import annotations

import hashlib
import logging
import math
from contextlib import suppress
from typing import TYPE_CHECKING

from workers.runner.kept_pool.block_checksums import BYTES_PER_BLOCK
from workers.runner.kept_pool.mapped_pool import MappedPool

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

    from pagedray.config import EngineConfig
    from pagedray.node_memory import MemoryAddress

__all__ = ["PoolMapper", "PoolOrigin"]

logger = logging.getLogger(__name__)


class PoolMapper:
    """The memory of one rank's CPU pool, which outlives it."""

    def __init__(self, config: EngineConfig, address: MemoryAddress, *, rank: int) -> None:
        """Make it before the weights are loaded, which the pool's content depends on."""
        self._has_checksums = config.cache.cpu_pool_checksums
        self._address = address
        self._rank = rank
        self._origin = PoolOrigin(config, rank=rank)

    def map_pool(
        self, num_blocks: int, block_shape: Sequence[int], dtype: torch.dtype
    ) -> MappedPool | None:
        """Return the memory of a pool, or None if that has to be private."""
        layout = num_blocks, tuple(block_shape), dtype
        try:
            return MappedPool(
                self._address,
                num_bytes=num_blocks * math.prod(block_shape) * dtype.itemsize,
                num_extra_bytes=num_blocks * BYTES_PER_BLOCK if self._has_checksums else 0,
                origin=self._origin.digest(layout),
            )
        except OSError as error:
            reason = error.strerror or error
            logger.warning("The CPU pool of rank %s will not outlive it: %s.", self._rank, reason)
            return None


class PoolOrigin:
    """Origin of a CPU pool: the rank's part of the model, and its weights.

    Weights count as the same if their files have the same names, sizes and times.
    """

    def __init__(self, config: EngineConfig, *, rank: int) -> None:
        """Make it before the weights are loaded: a file that is replaced later differs."""
        files = () if config.load_format == "dummy" else _weight_files(config.model.folder)
        parallel = config.parallel.tensor_parallel_size, config.parallel.enable_expert_parallel
        seed = config.load_format, config.load_seed
        self._parts = config.model, rank, parallel, seed, files

    def digest(self, layout: Sequence[object]) -> bytes:
        """Return 32 bytes for a pool of this layout."""
        return hashlib.sha256(repr((self._parts, tuple(layout))).encode()).digest()


def _weight_files(folder: Path) -> tuple[tuple[str, int, int], ...]:
    files = []
    for path in sorted(folder.glob("*.safetensors")):
        # An unreadable file holds no weights, or the weights cannot be loaded.
        with suppress(OSError):
            status = path.stat()
            files.append((path.name, status.st_size, status.st_mtime_ns))
    return tuple(files)
