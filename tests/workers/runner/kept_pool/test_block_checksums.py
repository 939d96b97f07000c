"""Checksums of blocks, from rank to rank."""

import zlib

import pytest
import torch

from workers.runner.checksum_jobs import BYTES_PER_BLOCK, BlockChecksums


@pytest.fixture
def blocks() -> torch.Tensor:
    return torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def memory() -> memoryview:
    return memoryview(bytearray(4 * BYTES_PER_BLOCK))


def test_only_blocks_that_are_as_they_were_are_not_damaged(
    blocks: torch.Tensor, memory: memoryview, caplog: pytest.LogCaptureFixture
) -> None:
    checksums = BlockChecksums(blocks, memory)
    for block in (0, 1, 3):
        checksums.note_block(block)
    blocks[1, 1, 2] += 1.0
    # As the next rank sees it.
    assert BlockChecksums(blocks, memory).damaged_blocks() == (1, 2)
    assert caplog.messages == [
        "Dropping 1 of 3 blocks in the CPU pool of a rank that has ended: their contents have "
        "changed."
    ]


def test_a_block_without_a_checksum_is_damaged(
    blocks: torch.Tensor, memory: memoryview, caplog: pytest.LogCaptureFixture
) -> None:
    checksums = BlockChecksums(blocks, memory)
    assert checksums.damaged_blocks() == (0, 1, 2, 3)
    # Most of them were never used.
    assert caplog.messages == []
    for block in range(4):
        checksums.note_block(block)
    checksums.forget_blocks([2, 0])
    assert checksums.damaged_blocks() == (0, 2)


def test_a_checksum_of_zero_is_one() -> None:
    content = bytes.fromhex("9d0ad96d")
    assert zlib.crc32(content) == 0
    blocks = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(1, 4)
    checksums = BlockChecksums(blocks, memoryview(bytearray(BYTES_PER_BLOCK)))
    checksums.note_block(0)
    assert checksums.damaged_blocks() == ()
