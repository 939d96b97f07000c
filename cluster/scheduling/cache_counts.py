"""The scheduler's statistics about blocks, in the device pool and in each tier."""

from cluster.scheduling.kv_manager import KvManager

__all__ = ["cache_counts"]


def cache_counts(kv: KvManager) -> dict[str, int]:
    """Return the fields of `SchedulerStats` that count blocks and cached tokens, by name."""
    pool, cpu_pool = kv.pool, kv.cpu_pool
    counts = {
        "num_blocks": pool.num_blocks,
        "num_free_blocks": pool.num_free,
        "num_cached_blocks": pool.num_idle,
        "num_transit_blocks": pool.num_in_transit,
        "num_cpu_blocks": cpu_pool.num_blocks,
        "num_free_cpu_blocks": cpu_pool.num_free,
        "num_cached_cpu_blocks": cpu_pool.num_idle,
        "num_transit_cpu_blocks": cpu_pool.num_in_transit,
        "num_queried_tokens": kv.num_queried_tokens,
        "num_hit_tokens": kv.num_hit_tokens,
    }
    if (cpu_cache := kv.cpu_cache) is not None:
        counts |= {
            "num_saved_blocks": cpu_cache.num_saved_blocks,
            "num_restored_blocks": cpu_cache.num_restored_blocks,
            "num_cpu_hit_tokens": cpu_cache.num_restored_blocks * kv.block_size,
            "num_kept_cpu_blocks": cpu_cache.num_kept_blocks,
            "num_kept_hit_tokens": cpu_cache.num_kept_hit_blocks * kv.block_size,
            "num_damaged_cpu_blocks": cpu_cache.num_damaged_blocks,
        }
    if (disk_cache := kv.disk_cache) is not None:
        counts |= {
            "num_disk_blocks": disk_cache.pool.num_blocks,
            "num_cached_disk_blocks": disk_cache.pool.num_idle,
            "num_disk_hit_tokens": disk_cache.num_read_blocks * kv.block_size,
            "num_written_blocks": disk_cache.num_written_blocks,
            "num_read_blocks": disk_cache.num_read_blocks,
            "num_failed_writes": disk_cache.num_failed_writes,
            "num_failed_reads": disk_cache.num_failed_reads,
        }
    return counts
