from array import array
from collections.abc import Callable

import pytest

from cluster.scheduling.block_pool import BlockError, BlockPool


def state_of(pool: BlockPool) -> tuple[object, ...]:
    return (
        list(pool._free),
        list(pool._idle),
        list(pool._num_references),
        list(pool._num_pins),
        bytes(pool._is_kept),
        pool.num_in_transit,
    )


def kept_and_released(pool: BlockPool, num_blocks: int) -> list[int]:
    blocks = [pool.allocate() for _ in range(num_blocks)]
    for block in blocks:
        pool.keep(block)
        pool.release(block)
    return blocks


def test_allocated_blocks_differ_until_none_is_left() -> None:
    pool = BlockPool(3, on_evict=None)
    assert sorted(pool.allocate() for _ in range(3)) == [0, 1, 2]
    with pytest.raises(BlockError, match="None of the 3 blocks is free"):
        pool.allocate()


def test_shared_block_is_free_after_its_last_owner() -> None:
    pool = BlockPool(1, on_evict=None)
    block = pool.allocate()
    pool.share(block)
    pool.release(block)
    assert pool.num_free == 0
    pool.release(block)
    assert pool.num_free == 1


def test_idle_blocks_are_evicted_last_and_the_oldest_first() -> None:
    evicted: list[int] = []
    pool = BlockPool(3, on_evict=evicted.append)
    first, second = kept_and_released(pool, 2)
    pool.allocate()
    assert evicted == []
    assert [pool.allocate(), pool.allocate()] == [first, second]
    assert evicted == [first, second]


def test_idle_block_that_is_shared_again_is_evicted_after_the_others() -> None:
    pool = BlockPool(2, on_evict=None)
    first, second = kept_and_released(pool, 2)
    pool.share(first)
    pool.release(first)
    assert [pool.allocate(), pool.allocate()] == [second, first]


def test_evicted_block_is_free_after_its_release() -> None:
    pool = BlockPool(1, on_evict=None)
    kept_and_released(pool, 1)
    pool.release(pool.allocate())
    assert pool.num_idle == 0
    assert pool.num_free == 1


def test_discarded_idle_block_is_plainly_free() -> None:
    evicted: list[int] = []
    pool = BlockPool(1, on_evict=evicted.append)
    (block,) = kept_and_released(pool, 1)
    pool.discard(block)
    assert pool.allocate() == block
    assert evicted == []


@pytest.mark.parametrize("num_copies", [1, 2])
def test_released_block_is_in_transit_until_its_last_copy_lets_go(num_copies: int) -> None:
    pool = BlockPool(1, on_evict=None)
    block = pool.allocate()
    for _ in range(num_copies):
        pool.pin(block)
    pool.release(block)
    for _ in range(num_copies):
        assert (pool.num_free, pool.num_in_transit) == (0, 1)
        pool.unpin(block)
    assert (pool.num_free, pool.num_in_transit) == (1, 0)


def test_block_in_transit_can_be_shared() -> None:
    pool = BlockPool(1, on_evict=None)
    block = pool.allocate()
    pool.pin(block)
    pool.release(block)
    pool.share(block)
    pool.unpin(block)
    assert (pool.num_free, pool.num_in_transit) == (pool.num_blocks - 1, 0)


@pytest.mark.parametrize("block", [0, 1, 2, -1, 99])
@pytest.mark.parametrize(
    "misuse", [BlockPool.release, BlockPool.share, BlockPool.pin, BlockPool.unpin, BlockPool.keep]
)
def test_misuse_is_rejected_and_changes_nothing(
    misuse: Callable[[BlockPool, int], None], block: int
) -> None:
    pool = BlockPool(2, on_evict=None)
    pool.release(pool.allocate())
    before = state_of(pool)
    with pytest.raises(BlockError, match=f"Block {block} "):
        misuse(pool, block)
    assert state_of(pool) == before


def test_several_blocks_are_shared_and_released_together() -> None:
    pool = BlockPool(4, on_evict=None)
    blocks = array("i", (pool.allocate() for _ in range(3)))
    pool.keep(blocks[1])
    pool.share_owned(blocks[:2])
    pool.release_all(blocks)
    assert (pool.num_free, pool.num_idle) == (2, 0)
    pool.release_all(blocks[:2])
    assert (pool.num_free, pool.num_idle) == (4, 1)
    # The end of a table is free first.
    assert [pool.allocate() for _ in range(4)][-1] == blocks[1]
    pool.release(blocks[0])
    before = state_of(pool)
    with pytest.raises(BlockError, match=f"Block {blocks[0]} is released but has no owner"):
        pool.release_all(blocks)
    pool.release_all(array("i"))
    assert state_of(pool) == before
