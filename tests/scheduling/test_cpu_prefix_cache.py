from array import array

from cluster.scheduling.costs import TierPolicy
from cluster.scheduling.device_tier import BlockKey, DeviceTier
from cluster.scheduling.tiers import CpuTier
from pagedray.batch import BlockCopy

PREFIXES = DeviceTier(b"key", num_blocks=0, is_enabled=True, save=lambda key, block: None)


def make_cpu_cache(num_blocks: int, *, max_saved: int = 100) -> CpuTier:
    """Return one for which every copy is worth it."""
    policy = TierPolicy(None, num_blocks=num_blocks, block_size=2)
    return CpuTier(num_blocks, policy=policy, max_saved=max_saved)


def key_of(*token_ids: int, tenant: str = "") -> BlockKey:
    return PREFIXES.key_after(PREFIXES.root(tenant), array("I", token_ids))


def save(cache: CpuTier, step: int, *keys: BlockKey) -> None:
    """Save blocks and take the copies as done."""
    for device_block, key in enumerate(keys):
        cache.save_block(key, device_block)
    cache.take_copies(step)
    cache.acknowledge(step)


def test_a_saved_block_is_found_once_its_copy_is_acknowledged() -> None:
    cache = make_cpu_cache(4)
    cache.save_block(key_of(1, 2), 7)
    (copy,) = cache.take_copies(3)
    assert copy == BlockCopy(7, copy.target)
    assert cache.find_block(key_of(1, 2)) is None
    cache.acknowledge(2)
    assert (cache.find_block(key_of(1, 2)), cache.pool.num_in_transit) == (None, 1)
    cache.acknowledge(3)
    assert cache.find_block(key_of(1, 2)) == copy.target
    assert (cache.pool.num_free, cache.pool.num_idle) == (4, 1)


def test_a_block_of_another_tenant_is_not_found() -> None:
    cache = make_cpu_cache(4)
    save(cache, 0, key_of(1, 2))
    assert cache.find_block(key_of(1, 2, tenant="other")) is None


def test_a_block_that_is_saved_already_is_not_copied_again() -> None:
    cache = make_cpu_cache(4)
    save(cache, 0, key_of(1, 2))
    cache.save_block(key_of(1, 2), 5)
    assert cache.take_copies(1) == []
    assert cache.num_saved_blocks == 1


def test_the_block_that_was_evicted_from_the_device_first_loses_its_place_first() -> None:
    cache = make_cpu_cache(2)
    save(cache, 0, key_of(1, 2), key_of(3, 4))
    # Its copy on the device was used in between.
    cache.save_block(key_of(1, 2), 0)
    save(cache, 1, key_of(5, 6))
    assert cache.find_block(key_of(3, 4)) is None
    assert cache.find_block(key_of(1, 2)) is not None
    assert cache.find_block(key_of(5, 6)) is not None
    assert (len(cache), cache.num_evicted_blocks) == (2, 1)


def test_a_block_is_not_saved_while_all_others_are_in_use() -> None:
    cache = make_cpu_cache(1)
    cache.pool.allocate()
    save(cache, 0, key_of(1, 2))
    assert (len(cache), cache.num_saved_blocks) == (0, 0)


def test_a_forgotten_block_is_free_and_is_not_found() -> None:
    cache = make_cpu_cache(2)
    save(cache, 0, key_of(1, 2))
    cache.save_block(key_of(3, 4), 0)
    cache.take_copies(1)
    # One is still being copied.
    for key in (key_of(1, 2), key_of(3, 4), key_of(5, 6)):
        cache.forget_key(key)
    cache.acknowledge(1)
    assert (len(cache), cache.pool.num_free, cache.pool.num_idle) == (0, 2, 0)
    assert cache.find_block(key_of(3, 4)) is None


def test_nothing_is_found_in_the_memory_of_new_ranks() -> None:
    cache = make_cpu_cache(2)
    save(cache, 0, key_of(1, 2))
    cache.save_block(key_of(3, 4), 0)
    cache.take_copies(1)
    cache.clear()
    assert cache.find_block(key_of(1, 2)) is None
    assert (len(cache), cache.pool.num_free, cache.pool.num_in_transit) == (0, 2, 0)


def test_a_plan_saves_no_more_blocks_than_it_may() -> None:
    cache = make_cpu_cache(4, max_saved=1)
    save(cache, 0, key_of(1, 2), key_of(3, 4))
    save(cache, 1, key_of(5, 6))
    assert [cache.find_block(key_of(n, n + 1)) is None for n in (1, 3, 5)] == [False, True, False]
