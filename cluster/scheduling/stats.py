"""The scheduler's numbers at one moment."""

import msgspec

__all__ = ["SchedulerStats"]


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges of the moment and counters since the start."""

    num_running: int
    """Sequences that have a row and all their blocks."""
    num_waiting: int
    """Sequences that have neither row nor blocks."""
    num_swapped: int
    """Sequences whose blocks are in the CPU pool, or on their way there or back."""
    num_queued_requests: int
    """Requests of which no sequence has started."""
    num_queued_tokens: int = 0
    """Prompt tokens of these."""

    num_blocks: int
    num_free_blocks: int
    """Blocks to be had at once, the cached ones among them."""
    num_cached_blocks: int
    """Free blocks whose content the prefix cache still knows."""
    num_transit_blocks: int
    """Blocks without an owner that a copy still reads or writes."""
    num_cpu_blocks: int
    num_free_cpu_blocks: int
    num_transit_cpu_blocks: int

    num_queried_tokens: int
    """Tokens that were looked up in the prefix cache."""
    num_hit_tokens: int
    """Tokens among them that were found."""
    num_swap_preemptions: int
    num_recompute_preemptions: int
    num_scheduled_tokens: int
    num_steps: int
    num_swapped_out_blocks: int = 0
    """Blocks copied to the CPU pool, and back in the next field."""
    num_swapped_in_blocks: int = 0
