"""Observes the ranks of a group, and describes those that hang.

It knows the plans that they have and the limits of each phase and device; `rank_watch` decides.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from cluster.engine.executor import RankHealth
from cluster.engine.faults.rank_watch import RankWatch, WatchLimits, WorkInFlight
from pagedray.batch import EmbedPlan, StepPlan
from pagedray.errors import HungRankError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.engine.faults.start_limit import StartLimit
    from pagedray.batch import StepMasks
    from pagedray.rank_progress import RankReport

__all__ = ["RankMonitor", "ReportSource"]

_TICK_S = 0.25
_START_LIMITS = WatchLimits(beat_s=60.0, first_s=300.0)
"""Imports may delay the heartbeat; a large tensor, a compiler or the network may delay words."""
_LIMITS = {"cpu": WatchLimits(), "cuda": WatchLimits(first_s=300.0)}
"""Limits by device; on a GPU, libraries compile kernels for the first step of a kind."""


class ReportSource(Protocol):
    """The source of the reports of ranks."""

    def read(self) -> Sequence[RankReport]:
        """Return the latest report of each rank; must not wait."""

    def process_state(self, rank: int) -> str:
        """Return what is unusual about the state of a rank's process, or an empty string."""

    def is_stopped(self, rank: int) -> bool:
        """Return whether a rank's process is known to be stopped."""


class RankMonitor:
    """Finds hung ranks of one epoch: first while they start, then while they run steps.

    One thread notes plans, another one observes.
    """

    def __init__(self, source: ReportSource, device: str, start_limit: StartLimit) -> None:
        self._source = source
        self._device = device
        self._start_limit = start_limit
        self._work = WorkInFlight()
        self._watch = RankWatch(replace(_START_LIMITS, start_s=start_limit.limit_s))
        self._observed_s = 0.0
        self.hung: list[int] = []
        """The ranks that hang."""
        self._work.add_plan(0, "start")

    def begin_steps(self) -> None:
        """Watch steps instead of the start of the ranks, which has ended."""
        self._start_limit.note_starts(self._watch.longest_start_s)
        self._work = WorkInFlight()
        self._watch = RankWatch(_LIMITS[self._device])

    def note_message(self, message: StepPlan | StepMasks | EmbedPlan) -> None:
        """Note what was sent to the ranks."""
        if isinstance(message, StepPlan | EmbedPlan):
            self._work.add_plan(message.step, _kind(message))

    def check_start(self) -> None:
        """Observe ranks that start; may be called at any rate. Raises HungRankError."""
        now_s = time.monotonic()
        if now_s - self._observed_s < _TICK_S:
            return
        self._observed_s = now_s
        health = self.observe(now_s)
        if health.hang:
            self._start_limit.note_hang()
            raise HungRankError(health.hang)

    def observe(self, now_s: float) -> RankHealth:
        """Return whether the ranks make progress; must be called several times a second."""
        reports = self._source.read()
        stopped = [rank for rank in range(len(reports)) if self._source.is_stopped(rank)]
        hung = self.hung = self._watch.hung_ranks(now_s, reports, self._work, stopped)
        is_busy = any(
            (report.num_finished < self._work.num_plans and not report.phase.is_blameless)
            or report.copying
            for report in reports
        )
        if not hung:
            return RankHealth(
                is_busy=is_busy,
                num_unpinned=sum(report.num_unpinned for report in reports),
                num_uncaptured=sum(report.num_uncaptured for report in reports),
            )
        return RankHealth(hang=self._sentence(hung, reports), is_busy=is_busy)

    def _sentence(self, hung: list[int], reports: Sequence[RankReport]) -> str:
        if len(hung) == len(reports) > 1:
            who = "All ranks have"
        else:
            who = f"{_ranks(hung)} {'has' if len(hung) == 1 else 'have'}"
        silence_s = max(self._watch.silence_s(rank) for rank in hung)
        places = "; ".join(self._place(rank, reports[rank]) for rank in range(len(reports)))
        return f"{who} made no progress for {silence_s:.1f} s ({places})."

    def _place(self, rank: int, report: RankReport) -> str:
        state = self._source.process_state(rank)
        if not report.num_beats:
            return f"rank {rank}: its process {state or 'has not started'}"
        return f"rank {rank}: {report.place}" + (f", and its process {state}" if state else "")


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"Rank {ranks[0]}"
    return f"Ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _kind(plan: StepPlan | EmbedPlan) -> tuple[int, int]:
    """Return the magnitudes of a step's tokens, and of the work of its prompts."""
    if isinstance(plan, EmbedPlan):
        return sum(map(len, plan.token_ids)).bit_length(), 0
    num_tokens = len(plan.chunks) + len(plan.decodes)
    work = 0
    for chunk in plan.chunks:
        # Those of several tokens come first.
        if chunk.num_tokens == 1:
            break
        num_tokens += chunk.num_tokens - 1
        work += chunk.num_tokens * (chunk.first_position + chunk.num_tokens)
    return num_tokens.bit_length(), work.bit_length()
