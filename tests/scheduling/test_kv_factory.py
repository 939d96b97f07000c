"""Which tiers the prefix cache has, by options."""

import pytest

from cluster.scheduling.kv_manager import KvOptions, make_kv_manager
from cluster.scheduling.step_times import StepTimes
from cluster.scheduling.swap_costs import SwapCosts
from pagedray.config import SchedulerConfig


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
    kv = make_kv_manager(
        SchedulerConfig(),
        SwapCosts(StepTimes()),
        KvOptions(
            block_size=4,
            num_blocks=8,
            num_cpu_blocks=num_cpu_blocks,
            num_disk_blocks=num_disk_blocks,
            enable_prefix_cache=is_enabled,
            enable_cpu_prefix_cache=has_cpu_tier,
        ),
    )
    caches = kv.prefix_cache, kv.cpu_cache, kv.disk_cache
    assert (caches[0].is_enabled, caches[1] is not None, caches[2] is not None) == tiers
    # Sequences may be swapped out without a cache.
    assert kv.cpu_pool.num_blocks == num_cpu_blocks
