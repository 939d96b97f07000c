"""Memory of large requests is returned to the system after they have ended."""

from __future__ import annotations

import asyncio
import platform

import psutil
import pytest

from cluster.serving.buffers import BufferLimits, MemoryTrimmer, OutputBuffers

MIB = 2**20
DELAY_S = 0.05
NUM_TRIES = 5
"""A server of other tests in this process may trim memory too, a second after they have ended."""


def rss() -> int:
    return int(psutil.Process().memory_info().rss)


def leave_gaps(num_mib: int) -> list[bytes]:
    """Make the allocator keep about so much memory; what is returned lies between the gaps."""
    blocks = [bytes(100_000) for _ in range(10 * num_mib)]
    # Of the same size as the others, so that all of them come from one place.
    return blocks[::8]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators do not trim")
async def test_memory_is_returned_after_large_requests() -> None:
    for _ in range(NUM_TRIES):
        pins = leave_gaps(64)
        held = rss()
        trimmer = MemoryTrimmer(delay_s=DELAY_S)
        for _ in range(64):
            trimmer.note_freed(MIB)
        await asyncio.sleep(0)
        if is_kept_first := held - rss() < 8 * MIB:
            break
    assert is_kept_first
    async with asyncio.timeout(60):
        while held - rss() < 32 * MIB:
            await asyncio.sleep(DELAY_S)
    assert len(pins) == 80


@pytest.mark.parametrize(("num_requests", "num_bytes"), [(8, MIB), (100_000, 2**10)])
async def test_memory_of_few_or_small_requests_is_kept(num_requests: int, num_bytes: int) -> None:
    for _ in range(NUM_TRIES):
        pins = leave_gaps(64)
        held = rss()
        trimmer = MemoryTrimmer(delay_s=0.0)
        for _ in range(num_requests):
            trimmer.note_freed(num_bytes)
        await asyncio.sleep(DELAY_S)
        is_kept = held - rss() < 8 * MIB
        assert len(pins) == 80
        if is_kept:
            return
    pytest.fail("Memory was returned each time.")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators do not trim")
async def test_memory_is_returned_even_if_large_requests_go_on() -> None:
    pins = leave_gaps(64)
    held = rss()
    trimmer = MemoryTrimmer(delay_s=DELAY_S)
    async with asyncio.timeout(60):
        while held - rss() < 32 * MIB:
            trimmer.note_freed(16 * MIB)
            await asyncio.sleep(DELAY_S / 10)
    assert len(pins) == 80


async def test_large_responses_are_noted_as_freed() -> None:
    noted: list[int] = []
    buffers = OutputBuffers(BufferLimits(), note_freed=noted.append)
    buffer = buffers.open_buffer("ann")
    buffer.collect(3 * MIB)
    buffer.clear()
    buffer.clear()
    assert noted == [3 * MIB]
