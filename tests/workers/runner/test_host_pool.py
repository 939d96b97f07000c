"""The CPU pool's memory."""

from __future__ import annotations

import mmap
import threading

import pytest
import torch

from attention.abstract import AttentionSpec
from attention.params import AttentionParams
from workers.runner.host_pool import HostPool
from workers.runner.kv_cache import make_host_pool


class FakePinner:
    """Pins so many chunks, then fails."""

    def __init__(self, num_chunks: int) -> None:
        self._num_left = num_chunks
        self.pinned: dict[int, int] = {}
        """Bytes by address."""
        self.last_error = threading.local()
        """As CUDA keeps it: for the thread whose call failed."""

    def pin(self, address: int, num_bytes: int) -> int:
        if not self._num_left:
            self.last_error.code = 2
            return 2
        self._num_left -= 1
        assert all(
            address + num_bytes <= start or start + size <= address
            for start, size in self.pinned.items()
        )
        self.pinned[address] = num_bytes
        return 0

    def unpin(self, address: int) -> int:
        del self.pinned[address]
        return 0


@pytest.mark.parametrize("block_shape", [(3,), (2, 7, 5), (64, 1024), (2**24,), (2**25 + 1,)])
def test_chunks_end_at_pages_and_between_blocks(block_shape: tuple[int, ...]) -> None:
    pool = HostPool(2, block_shape, torch.float16, pinner=None)
    chunk_bytes = pool.blocks_per_chunk * pool.blocks[0].nbytes
    assert chunk_bytes % mmap.PAGESIZE == 0
    assert pool.blocks.data_ptr() % mmap.PAGESIZE == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_a_pool_has_zeros_and_nothing_pinned_without_a_gpu(dtype: torch.dtype) -> None:
    pool = HostPool(5, (2, 3), dtype, pinner=None)
    assert torch.equal(pool.blocks, torch.zeros(5, 2, 3, dtype=dtype))
    assert pool.num_pinned_blocks == 0
    assert pool.has_layout(5, [2, 3], dtype)
    assert not pool.has_layout(6, [2, 3], dtype)


def test_a_pool_may_be_empty() -> None:
    assert HostPool(0, (2, 3), torch.float32, pinner=None).blocks.shape == (0, 2, 3)


def test_a_pool_is_pinned_whole_when_asked_and_released_with_its_end() -> None:
    pinner = FakePinner(9)
    # A chunk has 64 blocks of a MiB.
    pool = HostPool(100, (2**20,), torch.uint8, pinner=pinner)
    pool.wait_until_pinned()
    assert pool.num_pinned_blocks == 0
    for _ in range(2):
        pool.start_pinning()
        pool.wait_until_pinned()
    assert pool.num_pinned_blocks == 100
    first = pool.blocks.data_ptr()
    assert pinner.pinned == {first: 64 * 2**20, first + 64 * 2**20: 36 * 2**20}
    del pool
    assert pinner.pinned == {}


def test_a_pool_is_pinned_in_parts_and_the_rest_by_a_thread() -> None:
    pinner = FakePinner(9)
    pool = HostPool(300, (2**20,), torch.uint8, pinner=pinner)
    assert [(pool.pin_next(), pool.num_pinned_blocks) for _ in range(2)] == [
        (True, 64),
        (True, 128),
    ]
    pool.start_pinning()
    # A thread pins, or has pinned, what is left.
    assert not pool.pin_next()
    pool.wait_until_pinned()
    assert pool.num_pinned_blocks == 300
    assert len(pinner.pinned) == 5


def test_parts_end_with_the_pool_or_the_first_that_cannot_be_pinned() -> None:
    unpinned: list[int] = []
    for num_chunks, expected in ((9, 100), (1, 64)):
        pool = HostPool(
            100,
            (2**20,),
            torch.uint8,
            pinner=FakePinner(num_chunks),
            note_unpinned=unpinned.append,
        )
        assert [pool.pin_next() for _ in range(4)] == [True, True, False, False]
        assert pool.num_pinned_blocks == expected
    assert unpinned == [36]


def test_a_failed_part_leaves_no_error_in_the_thread_that_asked_for_it() -> None:
    # It runs the steps, and torch would raise the error at its next kernel.
    pinner = FakePinner(0)
    pool = HostPool(100, (2**20,), torch.uint8, pinner=pinner)
    assert pool.pin_next()
    assert not pool.pin_next()
    assert not hasattr(pinner.last_error, "code")


def test_memory_that_cannot_be_pinned_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    unpinned: list[int] = []
    pinner = FakePinner(2)
    pool = HostPool(300, (2**20,), torch.uint8, pinner=pinner, note_unpinned=unpinned.append)
    pool.start_pinning()
    pool.wait_until_pinned()
    assert pool.num_pinned_blocks == 128
    assert unpinned == [172]
    assert caplog.messages == [
        "Only 128 of 300 blocks of the CPU pool are pinned, and copies of the others are slower: "
        "CUDA returned error 2."
    ]


def test_a_pool_of_another_size_or_dtype_is_not_kept() -> None:
    params = AttentionParams(num_heads=2, num_kv_heads=1, head_size=8, scale=1.0)
    specs = [
        AttentionSpec(layers=(params,), dtype=dtype, device=torch.device("cpu"), block_size=4)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    former = make_host_pool(specs[0], 6)
    assert make_host_pool(specs[0], 6, former) is former
    assert len(make_host_pool(specs[0], 7, former).blocks) == 7
    assert make_host_pool(specs[1], 6, former).blocks.dtype == torch.bfloat16
