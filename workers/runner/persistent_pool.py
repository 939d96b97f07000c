"""Maps the memory for the CPU pool of a rank, or logs why it cannot."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import math
import mmap
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from pagedray.node_memory import MemoryAddress, open_memory

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

    from attention.params import StateTensor
    from pagedray.config import EngineConfig
    from pagedray.layout import CacheLayout

__all__ = ["MappedPool", "PoolMapper", "PoolOrigin"]

logger = logging.getLogger(__name__)

_LOCK_TIMEOUT_S = 5.0
"""How long a process that was killed may take to end."""
_LOCK_POLL_S = 0.02


class PoolMapper:
    """The memory of one rank's CPU pool, which outlives it."""

    def __init__(self, config: EngineConfig, address: MemoryAddress, *, rank: int) -> None:
        """Make it before the weights are loaded, which the pool's content depends on."""
        self._address = address
        self._rank = rank
        self._origin = PoolOrigin(config, rank=rank)

    def map_pool(
        self,
        num_blocks: int,
        block_shape: Sequence[int],
        dtype: torch.dtype,
        *,
        groups: CacheLayout | None,
        states: tuple[tuple[StateTensor, ...], ...],
    ) -> MappedPool | None:
        """Return the memory of a pool, or None if that has to be private.

        `groups` are the groups of layers, each with blocks of its own, if there are several, and
        `states` the states of recurrent layers.
        """
        layout = num_blocks, tuple(block_shape), dtype, groups, states
        try:
            return MappedPool(
                self._address,
                num_bytes=num_blocks * math.prod(block_shape) * dtype.itemsize,
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


class MappedPool:
    """The memory of one CPU pool in this process."""

    def __init__(
        self,
        address: MemoryAddress,
        *,
        num_bytes: int,
        origin: bytes,
        timeout_s: float = _LOCK_TIMEOUT_S,
    ) -> None:
        """Map `num_bytes` of blocks that depend on `origin`, 32 bytes.

        Raises OSError if the memory is not available, or another process does not release it.
        """
        assert len(origin) == 32
        self._origin = origin
        self._start = start = _round_up(num_bytes)
        size = start + _round_up(len(origin))
        descriptor = open_memory(address)
        try:
            _lock(descriptor, timeout_s)
            has_size = os.fstat(descriptor).st_size == size
            self.is_former = has_size and os.pread(descriptor, len(origin), start) == origin
            """Whether another process wrote and confirmed the content."""
            if not self.is_former:
                os.ftruncate(descriptor, 0)
                os.ftruncate(descriptor, size)
            self.memory = mmap.mmap(descriptor, size)
            """Its copy of the descriptor has the lock, which ends with it."""
        finally:
            os.close(descriptor)

    def confirm(self) -> None:
        """Let the next process find the content, instead of mistaking it for an older pool."""
        self.memory[self._start : self._start + len(self._origin)] = self._origin


def _lock(descriptor: int, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise TimeoutError("another process still uses the memory") from None
        time.sleep(_LOCK_POLL_S)


def _round_up(num_bytes: int) -> int:
    """Return the bytes of whole pages."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
