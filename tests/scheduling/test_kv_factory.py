"""Which tiers the prefix cache has, by options."""

import pytest

from cluster.scheduling.kv_manager import KvManager, KvOptions


@pytest.mark.parametrize(
    ("is_enabled", "has_cpu_tier", "num_cpu_blocks", "num_disk_blocks", "tiers"),
    [
        (True, True, 8, 16, (True, True, True)),
        (True, True, 8, 0, (True, True, False)),
        (True, True, 0, 16, (True, False, False)),
        (True, False, 8, 16, (True, False, False)),
        (False, True, 8, 16, (False, False, False)),
    ],
)
def test_a_tier_needs_the_one_above_it(
    is_enabled: bool,
    has_cpu_tier: bool,
    num_cpu_blocks: int,
    num_disk_blocks: int,
    tiers: tuple[bool, bool, bool],
) -> None:
    kv = KvManager(
        KvOptions(
            block_size=4,
            num_blocks=8,
            num_cpu_blocks=num_cpu_blocks,
            num_disk_blocks=num_disk_blocks,
            enable_prefix_cache=is_enabled,
            enable_cpu_prefix_cache=has_cpu_tier,
        ),
        costs=None,
        max_num_tokens=100,
    )
    assert (kv.device.is_enabled, kv.cpu.is_enabled, kv.disk is not None) == tiers
    # Sequences may be swapped out without a cache.
    assert kv.cpu_pool.num_blocks == num_cpu_blocks
