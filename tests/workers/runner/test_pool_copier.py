"""Copies between the pools by one call for many blocks, and what replaces it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch

from attention.cpu.torch_sdpa import TorchSDPABackend
from pagedray.batch import BlockCopy
from workers.runner.host_pool import HostPool
from workers.runner.kv_cache import PoolCopier

SHAPE = 2, 2, 4, 1, 4


class HostCopies:
    """Does what the driver does, on the host, and records the sizes of copies."""

    def __init__(self, *, fails: bool = False) -> None:
        self.sizes: list[int] = []
        self._fails = fails

    def launch(
        self,
        *,
        sources: npt.NDArray[np.uint64],
        targets: npt.NDArray[np.uint64],
        sizes: npt.NDArray[np.uint64],
    ) -> None:
        if self._fails:
            raise RuntimeError("cuMemcpyBatchAsync returned 801 at copy 0")
        self.sizes += sizes.tolist()
        for source, target, size in zip(sources, targets, sizes, strict=True):
            ctypes.memmove(int(target), int(source), int(size))


class PinnedPool(HostPool):
    """Eight blocks in chunks of three, of which some seem to be pinned."""

    def __init__(self, num_pinned: int) -> None:
        super().__init__(8, SHAPE, torch.float32, pinner=None)
        self.blocks_per_chunk = 3
        self._num_pinned = num_pinned
        self.blocks.copy_(torch.randn(8, *SHAPE))

    @property
    def num_pinned_blocks(self) -> int:
        return self._num_pinned


def make_copier(
    batched: HostCopies, *, num_pinned: int, backend: type[TorchSDPABackend] = TorchSDPABackend
) -> tuple[PoolCopier, PinnedPool]:
    device_blocks = torch.randn(9, *SHAPE)
    pool = PinnedPool(num_pinned)
    copier = PoolCopier(backend, device_blocks, pool, batched=batched)  # type: ignore[arg-type]
    return copier, pool


@pytest.mark.parametrize("num_pinned", [0, 3, 8])
@pytest.mark.parametrize("fails", [False, True])
def test_blocks_arrive_whether_pinned_or_not(num_pinned: int, *, fails: bool) -> None:
    copier, pool = make_copier(HostCopies(fails=fails), num_pinned=num_pinned)
    device, host = copier._device_blocks, pool.blocks
    before = device.clone()
    out = [BlockCopy(8, 0), BlockCopy(2, 4), BlockCopy(3, 5), BlockCopy(4, 6)]
    copier.copy_out(out)
    assert torch.equal(host[[0, 4, 5, 6]], before[[8, 2, 3, 4]])
    content = host.clone()
    copier.copy_in([BlockCopy(7, 1), BlockCopy(5, 3), BlockCopy(4, 2)])
    assert torch.equal(device[[1, 3, 2]], content[[7, 5, 4]])
    assert torch.equal(device[[0, 4, 5, 6, 7, 8]], before[[0, 4, 5, 6, 7, 8]])


def test_adjacent_blocks_are_one_copy_within_a_chunk() -> None:
    batched = HostCopies()
    copier, pool = make_copier(batched, num_pinned=8)
    copier.copy_out([BlockCopy(block, block) for block in (5, 3, 1, 2, 4)] + [BlockCopy(8, 7)])
    block_bytes = pool.blocks[0].nbytes
    # Blocks 0 to 2, 3 to 5, 6 and 7 are chunks.
    assert batched.sizes == [2 * block_bytes, 3 * block_bytes, block_bytes]


def recording_backend(calls: list[Sequence[object]]) -> type[TorchSDPABackend]:
    """Return a backend that adds the pairs of each call of `swap_blocks` to `calls`."""

    class RecordingBackend(TorchSDPABackend):
        @staticmethod
        def swap_blocks(
            source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]
        ) -> None:
            calls.append(pairs)
            TorchSDPABackend.swap_blocks(source, target, pairs)

    return RecordingBackend


def test_only_pinned_blocks_are_copied_in_one_call_and_others_chunk_by_chunk() -> None:
    batched = HostCopies()
    calls: list[Sequence[object]] = []
    copier, pool = make_copier(batched, num_pinned=3, backend=recording_backend(calls))
    copier.copy_out([BlockCopy(block, block) for block in (7, 3, 2, 6, 5)])
    assert batched.sizes == [pool.blocks[0].nbytes]
    assert calls == [[[3, 3], [5, 5]], [[6, 6], [7, 7]]]


def test_no_copies_are_no_error() -> None:
    batched = HostCopies()
    copier, _ = make_copier(batched, num_pinned=8)
    copier.copy_out([])
    assert batched.sizes == []


def test_a_driver_that_fails_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    copier, _ = make_copier(HostCopies(fails=True), num_pinned=8)
    for _ in range(3):
        copier.copy_out([BlockCopy(0, 0)])
    assert len(caplog.messages) == 1
    assert "cuMemcpyBatchAsync returned 801" in caplog.messages[0]
