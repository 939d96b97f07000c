"""A snapshot of the scheduler's gauges and counters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from cluster.scheduling.kv_manager import KvManager

__all__ = ["SchedulerStats", "SpeculationStats", "cache_counts"]


class SpeculationStats(msgspec.Struct, frozen=True):
    """Counters of drafts."""

    num_chains: int = 0
    """Times that a step verified drafts of a sequence; the next field counts these drafts."""
    num_draft_tokens: int = 0
    num_accepted_at: tuple[int, ...] = ()
    """Drafts that were right, by their place among the drafts of a sequence."""
    answer_bytes: int = 0
    """Size of the past answers in which drafts are looked for, with their index."""
    num_dropped: int = 0
    """Drafts behind the ends of sequences, which no other field counts."""

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts that were right."""
        return sum(self.num_accepted_at)

    @property
    def by_position(self) -> dict[str, int]:
        """Drafts that were right, by their place from 0 on as text."""
        return {str(place): number for place, number in enumerate(self.num_accepted_at)}

    @property
    def num_refused_tokens(self) -> int:
        """Drafts that were not right."""
        return self.num_draft_tokens - self.num_accepted_tokens


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """The gauges of a scheduler, and its counters since the start; encoders have no blocks."""

    max_num_seqs: int = 0
    """Sequences that can run at once."""
    max_num_batched_tokens: int = 0
    """Tokens that a step can have."""
    num_running: int
    """Sequences that have a row and all their blocks."""
    num_waiting: int
    """Sequences that have neither row nor blocks."""
    num_swapped: int = 0
    """Sequences with blocks in the CPU pool, or on their way there or back."""
    num_queued_requests: int
    """Requests of which no sequence has started."""
    num_queued_tokens: int = 0
    """Number of prompt tokens of the queued requests."""

    num_blocks: int = 0
    num_free_blocks: int = 0
    """Blocks that can be allocated, including cached blocks."""
    num_cached_blocks: int = 0
    """Free blocks that the prefix cache still knows."""
    num_transit_blocks: int = 0
    """Blocks without an owner that a copy still reads or writes."""
    num_cpu_blocks: int = 0
    num_free_cpu_blocks: int = 0
    """Blocks that can be allocated, including cached blocks."""
    num_cached_cpu_blocks: int = 0
    """Free blocks that hold blocks evicted from the device pool."""
    num_transit_cpu_blocks: int = 0

    num_queried_tokens: int = 0
    """Tokens that were looked up in the prefix cache."""
    num_hit_tokens: int = 0
    """Tokens of these that were found, in either pool."""
    num_cpu_hit_tokens: int = 0
    """Tokens of these that were found in the CPU pool and copied back."""
    num_disk_hit_tokens: int = 0
    """Tokens that were found on the disk and read into the CPU pool."""
    num_saved_blocks: int = 0
    """Evicted blocks that were copied to the CPU pool."""
    num_restored_blocks: int = 0
    """Copies of these blocks back to the device."""
    num_kept_cpu_blocks: int = 0
    """Blocks with prefixes in the CPU pool that outlived a rank, each time."""
    num_kept_hit_tokens: int = 0
    """Tokens that were found in such blocks and copied back."""
    num_disk_blocks: int = 0
    """Maximum number of blocks on the disk; the next field counts blocks on it."""
    num_cached_disk_blocks: int = 0
    num_written_blocks: int = 0
    """Blocks of the CPU pool that were written to the disk."""
    num_read_blocks: int = 0
    """Reads of these blocks from the disk."""
    num_failed_writes: int = 0
    """Blocks that a rank could not write."""
    num_failed_reads: int = 0
    num_saved_states: int = 0
    """Snapshots of recurrent states that were made; the next field counts snapshots reused."""
    num_loaded_states: int = 0
    num_skipped_states: int = 0
    """Snapshots that were not made, since too few blocks were free."""
    num_unreused_tokens: int = 0
    """Tokens that were found and computed again, since no state was kept after them."""
    num_swap_preemptions: int = 0
    num_recompute_preemptions: int = 0
    num_scheduled_tokens: int
    num_steps: int
    num_nonfinite_sequences: int = 0
    """Sequences that ended because their logits were not finite."""
    num_swapped_out_blocks: int = 0
    """Blocks of preempted sequences copied to the CPU pool; the next field counts copies back."""
    num_swapped_in_blocks: int = 0
    speculation: SpeculationStats = SpeculationStats()


def cache_counts(kv: KvManager) -> dict[str, int]:
    """Return the fields of `SchedulerStats` that count blocks and cached tokens, by name."""
    pool, cpu_pool, cpu = kv.pool, kv.cpu_pool, kv.cpu
    # An estimate if there are windows.
    block_tokens = kv.block_size / kv.groups.num_groups
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
        "num_saved_blocks": cpu.num_saved_blocks,
        "num_restored_blocks": cpu.num_loaded_blocks,
        "num_cpu_hit_tokens": cpu.num_loaded_entries * kv.block_size,
        "num_kept_cpu_blocks": cpu.num_kept_blocks,
        "num_kept_hit_tokens": int(cpu.num_kept_hit_blocks * block_tokens),
    }
    if (states := kv.states) is not None:
        counts |= {
            "num_saved_states": states.num_saved,
            "num_loaded_states": states.num_loaded,
            "num_skipped_states": states.num_skipped,
            "num_unreused_tokens": states.num_unreused_tokens,
        }
    if (disk := kv.disk) is not None:
        counts |= {
            "num_disk_blocks": disk.pool.num_blocks,
            "num_cached_disk_blocks": disk.pool.num_idle,
            "num_disk_hit_tokens": int(disk.num_read_blocks * block_tokens),
            "num_written_blocks": disk.num_written_blocks,
            "num_read_blocks": disk.num_read_blocks,
            "num_failed_writes": disk.num_failed_writes,
            "num_failed_reads": disk.num_failed_reads,
        }
    return counts
