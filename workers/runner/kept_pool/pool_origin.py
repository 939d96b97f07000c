"""Digests of what the content of a CPU pool depends on.

If two digests are equal, the same bytes mean the same keys and values.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pagedray.config import EngineConfig

__all__ = ["PoolOrigin"]


class PoolOrigin:
    """What a CPU pool was computed from: the rank's part of the model, and its weights.

    Weights count as the same if their files have the same names, sizes and times.
    """

    def __init__(self, config: EngineConfig, *, rank: int) -> None:
        """Make it before the weights are loaded: a file that is replaced later is another one."""
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
        # One that cannot be read is none of the weights, or these cannot be loaded.
        with suppress(OSError):
            status = path.stat()
            files.append((path.name, status.st_size, status.st_mtime_ns))
    return tuple(files)
