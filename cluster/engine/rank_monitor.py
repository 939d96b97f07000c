"""Observes the ranks of a group, and describes ranks that hang.

It knows the plans of the ranks and the limits of each phase and device; `RankWatch` decides.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from cluster.engine.executor import RankHealth
from pagedray.batch import StepPlan
from pagedray.errors import HungRankError
from pagedray.rank_progress import Phase, RankReport

if TYPE_CHECKING:
    from collections.abc import Container, Hashable, Sequence

    from pagedray.batch import StepMasks

__all__ = ["RankMonitor", "RankWatch", "StartLimit", "WatchLimits", "WorkInFlight"]

_MAX_TICK_S = 0.5
"""The longest time that one observation can add."""
_FADING = 0.9
"""Factor of the longest interval at each new word: single slow steps are soon forgotten."""

_FIRST_S = 300.0
"""Nothing is known of the first start, which may read everything from a slow disk."""
_LEAST_S = 10.0
_FACTOR = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchLimits:
    """How long a rank may be silent."""

    beat_s: float = 6.0
    """Limit without a heartbeat, which comes twice a second."""
    start_s: float = 60.0
    """Limit until the first heartbeat."""
    stopped_s: float = 6.0
    """Limit without a heartbeat from when the process is first seen to be stopped."""
    word_s: float = 6.0
    """The lowest limit without a new word."""
    factor: float = 4.0
    """Limit without a new word, as a multiple of the longest time between words of such steps."""
    first_s: float = 60.0
    """Limit without a new word during the first step of a kind, which may compile."""
    compiling_s: float = 600.0
    """Limit without a new word while a compiler runs."""
    copying_s: float = 30.0
    """Limit from the end of a step to that of its block copies, which take seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stand:
    """The last observed state of a rank, and for how long it has lasted."""

    report: RankReport
    word_s: float = 0.0
    """Observed time since its word changed."""
    alive_s: float = 0.0
    """The part of it with heartbeats: not even a stopped process computes for longer."""
    beat_s: float = 0.0
    """Observed time since its heartbeat."""
    stopped_s: float = 0.0
    """The part of it in which the process was always seen to be stopped."""
    copy_s: float = 0.0
    """Observed time since it waits for the block copies of the same step."""


class WorkInFlight:
    """The plans that ranks have not finished. One thread adds plans, another one observes."""

    def __init__(self) -> None:
        self._kinds: deque[tuple[int, Hashable]] = deque()
        self.num_plans = 0
        """Plans sent, including finished plans."""

    def add_plan(self, step: int, kind: Hashable) -> None:
        """Note that a plan was sent; plans of one kind take about the same time."""
        self._kinds.append((step, kind))
        self.num_plans = step + 1

    def take_finished(self, num_finished: int) -> list[Hashable]:
        """Return and forget the kinds of finished plans."""
        finished = []
        while self._kinds and self._kinds[0][0] < num_finished:
            finished.append(self._kinds.popleft()[1])
        return finished

    def kinds(self) -> list[Hashable]:
        """Return the kinds of unfinished plans."""
        return [kind for _, kind in self._kinds.copy()]


class RankWatch:
    """Observes the ranks of one epoch, several times a second."""

    def __init__(self, limits: WatchLimits) -> None:
        self._limits = limits
        self._stands: list[_Stand] = []
        self._observed_s: float | None = None
        self._longest_s: defaultdict[Hashable, float] = defaultdict(float)
        """The longest time between two words in steps of a kind."""
        self._known: set[Hashable] = set()
        """Kinds of steps that have finished at least once."""
        self.longest_start_s = 0.0
        """The longest time until the first heartbeat of a rank."""

    def hung_ranks(
        self,
        now_s: float,
        reports: Sequence[RankReport],
        work: WorkInFlight,
        stopped: Container[int] = (),
    ) -> list[int]:
        """Return the ranks that hang, or none. Ranks that wait for others are not named.

        `stopped` has the ranks with processes that are known to be stopped.
        """
        elapsed_s = 0.0
        if self._observed_s is not None:
            elapsed_s = min(max(now_s - self._observed_s, 0.0), _MAX_TICK_S)
        self._observed_s = now_s
        if not self._stands:
            self._stands = [_Stand(report=report) for report in reports]
        kinds = work.kinds()
        for rank, report in enumerate(reports):
            self._observe(rank, report, elapsed_s, kinds, work, is_stopped=rank in stopped)
        self._known.update(work.take_finished(min(report.num_finished for report in reports)))
        limits, limit_s = self._limits, self._word_limit_s(kinds)
        silent = [
            rank
            for rank, stand in enumerate(self._stands)
            if stand.word_s > (limits.compiling_s if stand.report.is_compiling else limit_s)
        ]
        beatless = [
            rank
            for rank, stand in enumerate(self._stands)
            if stand.beat_s > (limits.beat_s if stand.report.num_beats else limits.start_s)
            or stand.stopped_s > limits.stopped_s
        ]
        copying = [rank for rank, one in enumerate(self._stands) if one.copy_s > limits.copying_s]
        return beatless or self._culprits(silent) or copying

    def silence_s(self, rank: int) -> float:
        """Return for how long a rank has shown no sign of progress or life."""
        stand = self._stands[rank]
        return max(stand.word_s, stand.beat_s, stand.copy_s)

    def _observe(
        self,
        rank: int,
        report: RankReport,
        elapsed_s: float,
        kinds: list[Hashable],
        work: WorkInFlight,
        *,
        is_stopped: bool,
    ) -> None:
        before = self._stands[rank]
        has_beaten = report.num_beats != before.report.num_beats
        beat_s = 0.0 if has_beaten else before.beat_s + elapsed_s
        stopped_s = before.stopped_s + elapsed_s if is_stopped and not has_beaten else 0.0
        is_same = report.copying and report.copying == before.report.copying
        copy_s = before.copy_s if is_same else 0.0
        if is_same and report.phase in (Phase.IDLE, Phase.DEVICE):
            # In other phases, the rank does not look whether they have ended.
            copy_s += elapsed_s
        if has_beaten and not before.report.num_beats:
            self.longest_start_s = max(self.longest_start_s, before.beat_s + elapsed_s)
        if report.word != before.report.word:
            for kind in kinds:
                self._longest_s[kind] = max(self._longest_s[kind] * _FADING, before.alive_s)
            self._stands[rank] = _Stand(
                report=report, beat_s=beat_s, stopped_s=stopped_s, copy_s=copy_s
            )
            return
        word_s = before.word_s + elapsed_s
        if report.num_finished >= work.num_plans or report.phase.is_blameless:
            word_s = 0.0
        self._stands[rank] = _Stand(
            report=report,
            word_s=word_s,
            alive_s=word_s if has_beaten else before.alive_s,
            beat_s=beat_s,
            stopped_s=stopped_s,
            copy_s=copy_s,
        )

    def _word_limit_s(self, kinds: list[Hashable]) -> float:
        if not self._known.issuperset(kinds):
            return self._limits.first_s
        longest_s = max((self._longest_s[kind] for kind in kinds), default=0.0)
        return max(self._limits.word_s, self._limits.factor * longest_s)

    def _culprits(self, silent: list[int]) -> list[int]:
        """Return the silent ranks that the others wait for."""
        alone = [rank for rank in silent if not self._stands[rank].report.phase.is_collective]
        # A rank may wait for the device, and the device for another rank.
        on_host = [rank for rank in alone if self._stands[rank].report.phase is not Phase.DEVICE]
        return on_host or alone or silent


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
        """Return the unusual state of a rank's process, or an empty string."""

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

    def note_message(self, message: StepPlan | StepMasks) -> None:
        """Note a message sent to the ranks."""
        if isinstance(message, StepPlan):
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


def _kind(plan: StepPlan) -> tuple[int, int]:
    """Return the magnitudes of a step's tokens, and of the work of its prompts."""
    if plan.texts is not None:
        return plan.num_tokens.bit_length(), 0
    num_tokens = len(plan.chunks) + len(plan.decodes)
    work = 0
    for chunk in plan.chunks:
        # Sequences of several tokens come first.
        if chunk.num_tokens == 1:
            break
        num_tokens += chunk.num_tokens - 1
        work += chunk.num_tokens * (chunk.first_position + chunk.num_tokens)
    return num_tokens.bit_length(), work.bit_length()


class StartLimit:
    """The time until the first heartbeat of a process, learned from started processes."""

    def __init__(self) -> None:
        self.limit_s = _FIRST_S
        """Observed time without a heartbeat after which a new process counts as hung."""
        self._longest_s = 0.0

    def note_starts(self, longest_s: float) -> None:
        """Note that the processes of an epoch have started, and how long the slowest took."""
        self._longest_s = max(self._longest_s, longest_s)
        self.limit_s = max(_LEAST_S, _FACTOR * self._longest_s)

    def note_hang(self) -> None:
        """Note that a process did not start in time: it may only have been slower than others."""
        self.limit_s = min(2.0 * self.limit_s, _FIRST_S)
