"""The KV cache of one rank: a device pool and a CPU pool of equal layout.

Both are block-major, `[num_blocks, *AttentionSpec.block_shape]`, so that a block of all layers of a
group is contiguous and a swap is one copy per block. The scheduler assigns blocks. The state of
each row is whole blocks behind the device pool, which block copies read and write as any other.
"""

from __future__ import annotations

import ctypes
import logging
from typing import TYPE_CHECKING

import numpy as np
import torch

from attention.params import storage_dtype
from workers.runner.host_pool import CudaPinner, HostPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy.typing as npt

    from attention.abstract import AttentionBackend, AttentionSpec
    from pagedray.batch import BlockCopy
    from workers.runner.persistent_pool import PoolMapper

__all__ = [
    "KVCache",
    "PoolCopier",
    "find_batched_copies",
    "make_host_pool",
    "num_staging_blocks",
]

logger = logging.getLogger(__name__)

_MAX_STAGING_BYTES = 2**30
_MAX_STAGING_PART = 32
"""Staging blocks are at most 1 / `_MAX_STAGING_PART` of the device pool."""

_DRIVER = "libcuda.so.1"
_VERSION = 12080
"""Its signature is that of this version of CUDA, also in later drivers."""
_IN_STREAM_ORDER = 1
"""`CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`: sources are read after earlier work on the stream."""


def num_staging_blocks(spec: AttentionSpec, num_blocks: int) -> int:
    """Return the number of staging blocks, for evicted content, of a pool of `num_blocks`."""
    if spec.device.type == "cpu":
        return 0
    return min(num_blocks // _MAX_STAGING_PART, _MAX_STAGING_BYTES // spec.block_bytes)


def make_host_pool(
    spec: AttentionSpec,
    num_blocks: int,
    former: HostPool | None = None,
    *,
    mapper: PoolMapper | None = None,
    note_unpinned: Callable[[int], None] = lambda num_blocks: None,
) -> HostPool:
    """Return the former CPU pool if its size fits, or else a new pool.

    A new pool is in memory of the `mapper`, if it has any, and calls `note_unpinned` with the
    number of blocks that a GPU cannot pin. Raises OSError if the host does not have the memory.
    """
    layout = num_blocks, spec.block_shape, storage_dtype(spec.cache_dtype)
    if former is not None and former.has_layout(*layout):
        return former
    pinner = CudaPinner(spec.device) if spec.device.type == "cuda" else None
    mapped = None
    if mapper is not None and num_blocks:
        mapped = mapper.map_pool(*layout, groups=spec.layout, states=spec.states)
    return HostPool(*layout, pinner=pinner, mapped=mapped, note_unpinned=note_unpinned)


class KVCache:
    """The pools of one rank and the copies between them."""

    def __init__(
        self,
        backend: type[AttentionBackend],
        spec: AttentionSpec,
        *,
        num_blocks: int,
        host_pool: HostPool,
        num_staging: int = 0,
        num_states: int = 0,
        shares_states: bool = False,
    ) -> None:
        """The states of rows, spare states and `num_staging` blocks follow the device pool.

        With `shares_states`, all of them are a single state, which takes less memory.
        """
        num_stored = 1 if shares_states else num_states
        self.first_staging = num_blocks + num_stored * spec.state_blocks
        """The index of the first staging block."""
        shape = self.first_staging + num_staging, *spec.block_shape
        dtype = storage_dtype(spec.cache_dtype)
        self._backend = backend
        # Zeros, since masked scores still multiply values: NaN in unused slots would spread.
        if spec.device.type == "cpu":
            self._device_blocks = _untouched_zeros(shape, dtype)
        else:
            self._device_blocks = torch.zeros(shape, dtype=dtype, device=spec.device)
        self.device_pool = self._device_blocks[:num_blocks]
        self.host_pool = host_pool
        live = self._device_blocks[num_blocks : self.first_staging].view(torch.uint8)
        state_bytes = spec.state_blocks * spec.block_bytes
        self._live_states = live.view(num_stored, state_bytes).expand(num_states, -1)
        """The bytes of the state of each row, then spare states, `[num_states, num_bytes]`."""
        self.states = spec.state_views(self._live_states)
        """The states of all rows, then spare states, by recurrent layer."""
        batched = find_batched_copies() if spec.device.type == "cuda" else None
        self._copier = PoolCopier(backend, self._device_blocks, host_pool, batched=batched)

    @property
    def num_staging(self) -> int:
        """Device blocks behind the pool and the states."""
        return len(self._device_blocks) - self.first_staging

    def swap_out(self, copies: Sequence[BlockCopy]) -> None:
        """Copy device blocks, staging blocks included, to CPU blocks, on the current stream."""
        self._copier.copy_out(copies)

    def swap_in(self, copies: Sequence[BlockCopy]) -> None:
        """Copy CPU blocks to device blocks, on the current stream."""
        self._copier.copy_in(copies)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks within the device, staging blocks included."""
        if copies:
            # Sorted, so that adjacent blocks become one copy.
            pairs = sorted((copy.source, copy.target) for copy in copies)
            self._backend.copy_blocks(self._device_blocks, pairs)

    def clear_states(self, rows: Iterable[int]) -> None:
        """Set the states of rows to zero, as they are before the first token of a sequence."""
        for row in rows:
            self._live_states[row].zero_()


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros that take no memory before they are written; torch would write them."""
    # Integers of the same size, since NumPy lacks some of torch's types.
    return torch.from_numpy(np.zeros(shape, dtype=f"i{dtype.itemsize}")).view(dtype)


class PoolCopier:
    """Copies many blocks by one call if the driver can, or by one for each run of blocks."""

    def __init__(
        self,
        backend: type[AttentionBackend],
        device_blocks: torch.Tensor,
        host_pool: HostPool,
        *,
        batched: BatchedCopies | None,
    ) -> None:
        """Without `batched`, there is one call for each run of blocks."""
        self._backend = backend
        self._device_blocks = device_blocks
        self._host_pool = host_pool
        self._batched = batched

    def copy_out(self, copies: Sequence[BlockCopy]) -> None:
        """Copy device blocks to CPU blocks."""
        self._copy(self._device_blocks, self._host_pool.blocks, copies, host_column=1)

    def copy_in(self, copies: Sequence[BlockCopy]) -> None:
        """Copy CPU blocks to device blocks."""
        self._copy(self._host_pool.blocks, self._device_blocks, copies, host_column=0)

    def _copy(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        copies: Sequence[BlockCopy],
        *,
        host_column: int,
    ) -> None:
        if not copies:
            return
        pairs = np.array([(copy.source, copy.target) for copy in copies], dtype=np.int64)
        # Adjacent blocks become one copy.
        pairs = pairs[np.argsort(pairs[:, host_column])]
        if self._batched is not None:
            num_pinned = np.searchsorted(pairs[:, host_column], self._host_pool.num_pinned_blocks)
            if self._try_batch(source, target, pairs[:num_pinned], host_column=host_column):
                pairs = pairs[num_pinned:]
        chunks = pairs[:, host_column] // self._host_pool.blocks_per_chunk
        for part in np.split(pairs, np.flatnonzero(np.diff(chunks)) + 1):
            self._backend.swap_blocks(source, target, part.tolist())

    def _try_batch(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        pairs: npt.NDArray[np.int64],
        *,
        host_column: int,
    ) -> bool:
        """Copy pairs in one call, or return False if the driver cannot."""
        assert self._batched is not None
        if not len(pairs):
            return True
        assert pairs.min() >= 0
        assert pairs[:, 0].max() < len(source)
        assert pairs[:, 1].max() < len(target)
        chunks = pairs[:, host_column] // self._host_pool.blocks_per_chunk
        firsts, lengths = _runs(pairs, chunks)
        block_bytes = source[0].numel() * source.element_size()
        try:
            self._batched.launch(
                sources=np.uint64(source.data_ptr())
                + firsts[:, 0].astype(np.uint64) * np.uint64(block_bytes),
                targets=np.uint64(target.data_ptr())
                + firsts[:, 1].astype(np.uint64) * np.uint64(block_bytes),
                sizes=lengths.astype(np.uint64) * np.uint64(block_bytes),
            )
        except RuntimeError as error:
            logger.warning("Blocks are copied one by one, since the driver failed: %s.", error)
            self._batched = None
            return False
        return True


def _runs(
    pairs: npt.NDArray[np.int64], chunks: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the first pair of each run of adjacent pairs in a chunk, and the runs' lengths."""
    is_adjacent = (np.diff(pairs, axis=0) == 1).all(axis=1) & (np.diff(chunks) == 0)
    starts = np.concatenate(([0], np.flatnonzero(~is_adjacent) + 1))
    return pairs[starts], np.diff(np.append(starts, len(pairs)))


class _Location(ctypes.Structure):
    """`CUmemLocation`."""

    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """`CUmemcpyAttributes`."""

    _fields_ = (
        ("src_access_order", ctypes.c_uint),
        ("src_location_hint", _Location),
        ("dst_location_hint", _Location),
        ("flags", ctypes.c_uint),
    )


_Function = ctypes.CFUNCTYPE(
    ctypes.c_int,  # CUresult
    ctypes.c_void_p,  # destinations, uint64 [count]
    ctypes.c_void_p,  # sources, uint64 [count]
    ctypes.c_void_p,  # sizes, size_t [count]
    ctypes.c_size_t,  # count
    ctypes.c_void_p,  # attributes [num_attributes]
    ctypes.c_void_p,  # first copy that each attribute holds for, size_t [num_attributes]
    ctypes.c_size_t,  # num_attributes
    ctypes.c_void_p,  # index of a copy that is invalid, size_t
    ctypes.c_void_p,  # stream
)


class BatchedCopies:
    """Copies many blocks by the function of the driver."""

    def __init__(self, address: int) -> None:
        self._function = _Function(address)
        self._attributes = _Attributes(src_access_order=_IN_STREAM_ORDER)
        self._first = ctypes.c_size_t(0)

    def launch(
        self,
        *,
        sources: npt.NDArray[np.uint64],
        targets: npt.NDArray[np.uint64],
        sizes: npt.NDArray[np.uint64],
    ) -> None:
        """Copy `sizes[i]` bytes between addresses, in any order, on the current stream.

        Host memory must be pinned. Raises RuntimeError if the driver fails.
        """
        arrays = targets, sources, sizes
        assert all(one.dtype == np.uint64 and one.flags.c_contiguous for one in arrays)
        assert len(sources) == len(targets) == len(sizes)
        invalid = ctypes.c_size_t(0)
        result = self._function(
            *(one.ctypes.data for one in arrays),
            len(sources),
            ctypes.addressof(self._attributes),
            ctypes.addressof(self._first),
            1,
            ctypes.addressof(invalid),
            torch.cuda.current_stream().cuda_stream,
        )
        if result:
            raise RuntimeError(f"cuMemcpyBatchAsync returned {result} at copy {invalid.value}")


def find_batched_copies() -> BatchedCopies | None:
    """Return the driver's function, or None if it has none."""
    try:
        find = ctypes.CDLL(_DRIVER).cuGetProcAddress_v2
    except (OSError, AttributeError):
        return None
    address, status = ctypes.c_void_p(), ctypes.c_int()
    find.argtypes = (
        ctypes.c_char_p,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint64,
        ctypes.c_void_p,
    )
    result = find(
        b"cuMemcpyBatchAsync", ctypes.addressof(address), _VERSION, 0, ctypes.addressof(status)
    )
    return None if result or not address.value else BatchedCopies(address.value)
