"""What an engine tells of itself at one moment."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.engine.duration_histogram import HistogramSnapshot
from cluster.scheduling.scheduler import SchedulerStats

__all__ = ["EngineStats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counts of a replica since it started, and its scheduler's counts of this moment."""

    scheduler: SchedulerStats
    num_steps: int
    last_step_s: float
    """From when it was sent, or else from the end of the step before it, to its output."""
    num_prompt_tokens: int
    num_generated_tokens: int
    attention_providers: dict[str, dict[str, int]]
    """Layers that each provider of attention kernels serves, by part of a step."""
    num_replacements: int = 0
    """Times that all ranks were replaced because one of them died."""
    step_times: HistogramSnapshot = field(default_factory=HistogramSnapshot)
