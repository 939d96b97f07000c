"""Blocks of prefixes in the CPU pool and on the disk."""

from __future__ import annotations

from array import array

from cluster.scheduling.costs import TierPolicy
from cluster.scheduling.device_tier import BlockKey, DeviceTier
from cluster.scheduling.tiers import CpuTier, DiskTier
from pagedray.batch import BlockCopy, DiskReport

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


KEYS = [key_of(number, number) for number in range(12)]


def make_caches(*, num_cpu_blocks: int, num_disk_blocks: int) -> tuple[CpuTier, DiskTier]:
    cpu_cache = make_cpu_cache(num_cpu_blocks)
    return cpu_cache, DiskTier(num_disk_blocks, cpu_cache)


def keys_of(cpu_cache: CpuTier, copies: list[BlockCopy]) -> list[BlockKey | None]:
    """Return the keys of the CPU blocks that are written."""
    return [cpu_cache.key_of(copy.source) for copy in copies]


def write(disk_cache: DiskTier, step: int) -> list[BlockCopy]:
    """Take writes and report them as made."""
    copies = disk_cache.take_writes(step)
    if copies:
        disk_cache.note_report(DiskReport(step, is_read=False))
    return copies


def test_blocks_that_are_evicted_next_are_written_once_their_pool_is_full() -> None:
    cpu_cache, disk_cache = make_caches(num_cpu_blocks=8, num_disk_blocks=9)
    save(cpu_cache, 0, *KEYS[:6])
    # A quarter of the pool is unused.
    assert disk_cache.take_writes(0) == []
    save(cpu_cache, 1, *KEYS[6:8])
    copies = disk_cache.take_writes(1)
    assert keys_of(cpu_cache, copies) == KEYS[:2]
    assert disk_cache.take_writes(2) == []
    assert disk_cache.find_block(KEYS[0]) is None
    disk_cache.note_report(DiskReport(1, is_read=False))
    assert [disk_cache.find_block(key) for key in KEYS[:2]] == [copy.target for copy in copies]
    assert disk_cache.take_writes(2) == []
    # They are evicted first, although they were used for the write.
    save(cpu_cache, 3, *KEYS[8:10])
    assert [cpu_cache.find_block(key) is None for key in KEYS[:3]] == [True, True, False]
    assert keys_of(cpu_cache, write(disk_cache, 3)) == KEYS[2:4]
    assert disk_cache.num_written_blocks == 4


def test_a_block_that_is_read_is_found_on_the_cpu_once_all_ranks_have_it() -> None:
    cpu_cache, disk_cache = make_caches(num_cpu_blocks=4, num_disk_blocks=9)
    save(cpu_cache, 0, *KEYS[:4])
    write(disk_cache, 0)
    save(cpu_cache, 1, KEYS[4])
    assert cpu_cache.find_block(KEYS[0]) is None
    disk_cache.read_blocks(KEYS[:1], 2)
    (copy,) = disk_cache.take_reads(2)
    assert copy.source == disk_cache.find_block(KEYS[0])
    assert (cpu_cache.find_block(KEYS[0]), disk_cache.step_of_read(KEYS[0])) == (None, 2)
    disk_cache.note_report(DiskReport(2, is_read=True))
    assert cpu_cache.find_block(KEYS[0]) == copy.target
    assert (disk_cache.read_step, disk_cache.step_of_read(KEYS[0])) == (2, None)
    # It is on the disk still, and not written again.
    assert KEYS[0] not in keys_of(cpu_cache, write(disk_cache, 3))


def test_a_block_that_cannot_be_read_is_in_neither_pool() -> None:
    cpu_cache, disk_cache = make_caches(num_cpu_blocks=8, num_disk_blocks=9)
    save(cpu_cache, 0, *KEYS[:8])
    write(disk_cache, 0)
    save(cpu_cache, 1, *KEYS[8:10])
    disk_cache.read_blocks(KEYS[:2], 2)
    copies = disk_cache.take_reads(2)
    disk_cache.note_report(DiskReport(2, is_read=True, failed=[copies[0].source]))
    assert [cpu_cache.find_block(key) for key in KEYS[:2]] == [None, copies[1].target]
    assert [disk_cache.find_block(key) for key in KEYS[:2]] == [None, copies[1].source]
    assert (disk_cache.num_failed_reads, disk_cache.num_read_blocks) == (1, 1)
    assert disk_cache.pool.num_in_transit == cpu_cache.pool.num_in_transit == 0
    assert cpu_cache.pool.num_free == 8


def test_after_a_write_failed_none_is_tried_for_a_while() -> None:
    cpu_cache, disk_cache = make_caches(num_cpu_blocks=4, num_disk_blocks=9)
    save(cpu_cache, 0, *KEYS[:4])
    (copy,) = disk_cache.take_writes(5)
    disk_cache.note_report(DiskReport(5, is_read=False, failed=[copy.target]))
    assert (disk_cache.find_block(KEYS[0]), disk_cache.num_failed_writes) == (None, 1)
    assert disk_cache.pool.num_free == 9
    assert disk_cache.take_writes(5 + 255) == []
    assert keys_of(cpu_cache, disk_cache.take_writes(5 + 256)) == KEYS[:1]


def test_the_disk_holds_no_more_blocks_than_it_may_and_loses_the_oldest() -> None:
    cpu_cache, disk_cache = make_caches(num_cpu_blocks=4, num_disk_blocks=2)
    for step in range(8):
        save(cpu_cache, step, KEYS[step])
        assert all(copy.target < 2 for copy in write(disk_cache, step))
    found = [number for number in range(8) if disk_cache.find_block(KEYS[number]) is not None]
    assert found == [3, 4]


def test_a_block_whose_values_are_bad_is_forgotten_while_it_is_copied() -> None:
    cpu_cache, disk_cache = make_caches(num_cpu_blocks=4, num_disk_blocks=9)
    save(cpu_cache, 0, *KEYS[:4])
    disk_cache.take_writes(0)
    disk_cache.forget_key(KEYS[0])
    cpu_cache.forget_key(KEYS[0])
    disk_cache.note_report(DiskReport(0, is_read=False))
    assert (disk_cache.find_block(KEYS[0]), len(disk_cache)) == (None, 0)
    assert (disk_cache.pool.num_free, disk_cache.pool.num_idle) == (9, 0)
    assert (cpu_cache.pool.num_free, cpu_cache.pool.num_idle) == (4, 3)


def test_reads_leave_half_of_the_cpu_pool_to_others() -> None:
    cpu_cache, disk_cache = make_caches(num_cpu_blocks=8, num_disk_blocks=9)
    save(cpu_cache, 0, *KEYS[:8])
    write(disk_cache, 0)
    save(cpu_cache, 1, *KEYS[8:10])
    assert disk_cache.num_readable(0) == 4
    assert disk_cache.num_readable(6) == 2
    disk_cache.read_blocks(KEYS[:2], 2)
    assert disk_cache.num_readable(0) == 2


def test_at_most_64_blocks_are_being_written() -> None:
    cpu_cache, disk_cache = make_caches(num_cpu_blocks=600, num_disk_blocks=600)
    for step in range(600):
        save(cpu_cache, step, key_of(step, step))
    first = disk_cache.take_writes(600)
    assert (len(first), len(disk_cache.take_writes(601))) == (64, 0)
    disk_cache.note_report(DiskReport(600, is_read=False))
    second = disk_cache.take_writes(602)
    assert len(second) == 64
    assert {copy.source for copy in first}.isdisjoint(copy.source for copy in second)


def test_reads_of_the_ranks_before_are_forgotten_with_their_files() -> None:
    cpu_cache, disk_cache = make_caches(num_cpu_blocks=8, num_disk_blocks=9)
    save(cpu_cache, 0, *KEYS[:8])
    write(disk_cache, 0)
    save(cpu_cache, 1, *KEYS[8:10])
    disk_cache.read_blocks(KEYS[:1], 2)
    disk_cache.take_reads(2)
    disk_cache.read_blocks(KEYS[1:2], 3)
    cpu_cache.clear()
    disk_cache.clear()
    assert disk_cache.take_reads(4) == []
    # Those of the new ranks are reported from the first one on.
    save(cpu_cache, 4, *KEYS[:8])
    write(disk_cache, 4)
    save(cpu_cache, 5, *KEYS[8:10])
    disk_cache.read_blocks(KEYS[:1], 6)
    assert len(disk_cache.take_reads(6)) == 1
    disk_cache.note_report(DiskReport(6, is_read=True))
    assert cpu_cache.find_block(KEYS[0]) is not None
