"""A snapshot of an engine's counters."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.engine.duration_histogram import HistogramSnapshot
from cluster.scheduling.scheduler import SchedulerStats
from pagedray.config import KernelReport

__all__ = ["EngineStats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters of a replica since it started, with its scheduler's gauges."""

    scheduler: SchedulerStats
    num_steps: int
    last_step_s: float
    """Time from when its plan was sent, or the previous step ended if later, to its output."""
    num_prompt_tokens: int
    num_generated_tokens: int
    block_bytes: int
    """Bytes of one KV block on all ranks together."""
    kernels: KernelReport
    replacements: dict[str, int] = field(default_factory=dict)
    """How often ranks were replaced, by cause: `death` or `hang`."""
    num_hangs: dict[str, int] = field(default_factory=dict)
    """Hangs that were found, by the party without progress: `rank` or `steps`."""
    num_lethal_requests: int = 0
    """Requests that ended because ranks died whenever they ran."""
    num_unpinned_blocks: int = 0
    """Blocks of the CPU pools that cannot be pinned, of all ranks."""
    num_uncaptured_graphs: int = 0
    """CUDA graphs that could not be captured; steps of their sizes run without them."""
    step_times: HistogramSnapshot = field(default_factory=HistogramSnapshot)

    @property
    def num_replacements(self) -> int:
        """Times that ranks were replaced, for any cause."""
        return sum(self.replacements.values())
