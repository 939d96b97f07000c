"""Estimates for drafts: the times of steps, the rates of right drafts, and when heads are tried."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from itertools import accumulate
from operator import mul
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.scheduling.sequence import SequenceDrafts

__all__ = ["DraftRates", "HeadFeeding", "RowTimes", "size_of"]

_FIRST_RATE = 0.6
"""How likely a draft is right as long as none was verified."""
_FIRST_WEIGHT = 0.2
"""Weight of the first draft in the rate of its place; the next is that of a draft after many."""
_COMMON_WEIGHT = 0.003
_LEAD_WEIGHT = 0.08
"""Weight of a draft in the lead of its sequence."""
_TRUST_WEIGHT = 0.05
"""How fast it is learned how much a lead says."""
_LEAST_RATE = 0.01
_NUM_FIRST = 2
"""Measurements after which an estimate is used."""
_TIME_WEIGHT = 0.05
"""Weight of a later measurement."""
_MOST_ERROR = 0.2
"""How much a later measurement counts at most, as a part of the expected time."""
_DRIFT_WEIGHT = 0.2
"""Weight of a step in the times of all sizes."""
_MOST_DRIFT = 0.02
"""How much a step changes the times of all sizes at most, before it is weighted, as a part."""
_DRIFT_ROWS = 64
"""Rows in addition to the rows of a step of which times change together."""
_LEAST_S = 1e-6
_NUM_STEPS_KEPT = 2000
"""Steps after which the time of a number of rows is measured again."""
_UNKNOWN_ROW = 0.003
"""The time that a row is assumed to add to a step as long as that is not measured, in steps."""
_FIRST_FORCED_RATE = 0.9
"""How likely a token of the only text that a grammar allows is right, as long as none was verified;
others are shorter tokens of that text."""
_LEAST_FORCED_RATE = 0.3
"""The least rate of these tokens, so that they are tried again."""
_FORCED_WEIGHT = 0.02
"""Weight of such a token in their rate."""
_FIRST_GAP_S = 0.0003
"""Gap behind a step with drafts of the controller, as long as no gap was measured."""
_NUM_GAPS = 8
"""Latest gaps of which the mean is predicted."""
_IDLE_WEIGHT = 0.2
"""Weight of a step in the time that ranks wait for plans that are made ahead."""
_GAP_DECAY = 0.0005
"""Part of the gap that is dropped in each step without it, so that it is measured again."""
_TRIAL = 128
"""Steps after which a draft head with guesses that do not pay reads no more tokens."""
_PAUSE = 2048
"""Steps without a draft head after which it reads the tokens of new sequences again."""
_TRY_PERIOD = 8
"""Steps from one try of guesses that do not pay to the next."""


class RowTimes:
    """The time of steps by number of rows, as measured.

    A straight line would not do: kernels take as long for a few rows as for the largest number of
    rows of the same launch. A step that `is_alone`, since its plan was made after the step before,
    takes longer: the device also waits for launches within the step.
    """

    def __init__(self, first_gap_s: float = _FIRST_GAP_S) -> None:
        self._ahead = _SizeTimes()
        self._alone = _SizeTimes()
        self._num_steps = 0
        self._idle_s = 0.0
        """How long ranks wait for plans that are made during the step before."""
        self._head = _Estimate()
        self._gap_s = first_gap_s
        self._gaps = deque((first_gap_s,), _NUM_GAPS)

    @property
    def gap_s(self) -> float:
        """How much longer ranks wait for a plan if it is made after the step before."""
        return self._gap_s

    @property
    def head_s(self) -> float | None:
        """The time that guesses of a draft head add to a step, if measured beside plain steps.

        The head makes as many guesses as it may, whatever their use.
        """
        return self._head.seconds if self._head.count else None

    def note_head(self, num_rows: int, seconds: float, *, is_alone: bool) -> None:
        """Note the duration of a step with guesses of a draft head, and without drafts."""
        head_s = max(seconds - self._forward_s(size_of(num_rows), is_alone=is_alone), 0.0)
        self._head.note(head_s)

    def note_idle(self, seconds: float, *, has_gap: bool) -> None:
        """Note how long ranks waited for a plan, which has a gap if it was made after the step."""
        if has_gap:
            self._gaps.append(max(seconds - self._idle_s, 0.0))
            # The longest may have any cause.
            self._gap_s = fmean(sorted(self._gaps)[:-1])
        else:
            idle_s = min(seconds, self._idle_s + _FIRST_GAP_S)
            self._idle_s += _IDLE_WEIGHT * (idle_s - self._idle_s)
            self._gap_s = max(self._gap_s * (1 - _GAP_DECAY), min(self._gap_s, _FIRST_GAP_S))

    def note(self, num_rows: int, seconds: float, *, is_alone: bool = False) -> None:
        """Note the duration of a step of decodes."""
        self._num_steps += 1
        kind, other = (self._alone, self._ahead) if is_alone else (self._ahead, self._alone)
        other.shift(kind.note(size_of(num_rows), seconds, step=self._num_steps))
        if self._num_steps % _NUM_STEPS_KEPT == 0:
            for times in (kind, other):
                times.forget(self._num_steps - _NUM_STEPS_KEPT)

    def has_run_ahead(self, num_rows: int) -> bool:
        """Return whether the time of steps that are planned ahead is known."""
        return self._ahead.is_known(size_of(num_rows))

    def has_measured(self, num_rows: int) -> bool:
        """Return whether steps of a number of rows were measured."""
        size = size_of(num_rows)
        return size in self._ahead.sizes or size in self._alone.sizes

    def time_of(self, num_rows: int, *, is_alone: bool = False) -> float:
        """Return the predicted duration of a step of decodes, in seconds; about 1 at first.

        That of a step that `is_alone` includes its gap. Sizes that were not measured often enough
        are assumed to be fast, so that they are tried.
        """
        seconds = self._forward_s(size_of(num_rows), is_alone=is_alone) + self._idle_s
        return seconds + self.gap_s if is_alone else seconds

    def _forward_s(self, size: int, *, is_alone: bool) -> float:
        kind, other = (self._alone, self._ahead) if is_alone else (self._ahead, self._alone)
        if kind.is_known(size) or not other.sizes:
            return kind.seconds_of(size)
        if other.is_known(size) or not kind.sizes:
            return min(other.seconds_of(size), kind.most_s(size))
        return kind.seconds_of(size)


class _SizeTimes:
    """The time of steps of one kind, by size. All times change together, as contexts grow."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        """Sizes that were measured, in ascending order."""
        self._drift_s = 0.0
        """By how much steps are slower than when they were measured, for each row and 64 more."""
        self._times: dict[int, _Estimate] = {}
        """Without the drift."""
        self._known: list[int] = []
        """Sizes that were measured often enough, in ascending order."""
        self._most: list[float] | None = None
        """The most that steps of each known size take; None if measurements have come since."""

    def is_known(self, size: int) -> bool:
        """Return whether a size was measured often enough."""
        known = self._times.get(size)
        return known is not None and known.is_settled

    def note(self, size: int, seconds: float, *, step: int) -> float:
        """Note the duration of a step, and return by how much the drift has changed."""
        known = self._times.get(size)
        if known is None:
            known = self._times[size] = _Estimate()
            insort(self.sizes, size)
        known.step, change_s = step, 0.0
        drift_s = self._drift_s * (size + _DRIFT_ROWS)
        if known.is_settled:
            # Contexts change slowly.
            expected_s = known.seconds + drift_s
            limit_s = _MOST_DRIFT * expected_s
            error_s = min(max(seconds - expected_s, -limit_s), limit_s)
            change_s = _DRIFT_WEIGHT * error_s / (size + _DRIFT_ROWS)
        self.shift(change_s)
        known.note(seconds - drift_s)
        if known.count == _NUM_FIRST:
            insort(self._known, size)
        return change_s

    def shift(self, change_s: float) -> None:
        """Change the drift."""
        self._drift_s += change_s
        self._most = None

    def forget(self, before: int) -> None:
        """Forget sizes that no step has measured since."""
        self._times = {size: one for size, one in self._times.items() if one.step > before}
        self.sizes = sorted(self._times)
        self._known = [size for size in self._known if size in self._times]
        self._most = None

    def seconds_of(self, size: int) -> float:
        """Return the time of a size, or how fast it may be if it was not measured often enough."""
        sizes = self._known or self.sizes
        index = bisect_left(sizes, size)
        most_s = self.most_s(size)
        if index < len(sizes) and sizes[index] == size:
            return most_s
        if not index:
            return min(most_s * size / sizes[0], most_s) if sizes else 1 + _UNKNOWN_ROW * size
        below = sizes[index - 1]
        least_s = self.most_s(below)
        if index < len(sizes):
            above = sizes[index]
            part = (size - below) / (above - below)
            return min(least_s + part * (self.most_s(above) - least_s), most_s)
        first, row_s = sizes[0], _UNKNOWN_ROW * least_s
        if first < below:
            # Sizes beyond are at least as fast as if rows took as long as so far.
            row_s = min(row_s, max(least_s - self.most_s(first), 0.0) / (below - first))
        return min(least_s + row_s * (size - below), most_s)

    def most_s(self, size: int) -> float:
        """Return the least time that was measured of a size, or of a larger known size.

        More rows take no less time; a size that seems to take more has had slow steps.
        """
        if self._most is None:
            times = [self._seconds(one) for one in reversed(self._known)]
            self._most = [*accumulate(times, min)][::-1]
        index = bisect_left(self._known, size)
        most_s = self._most[index] if index < len(self._most) else math.inf
        return min(most_s, self._seconds(size)) if size in self._times else most_s

    def _seconds(self, size: int) -> float:
        return max(self._times[size].seconds + self._drift_s * (size + _DRIFT_ROWS), _LEAST_S)


class _Estimate:
    """A usual time. A single step may take much longer, for example if it captures a graph."""

    __slots__ = ("count", "seconds", "step")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.count = 0
        """How often it was measured."""
        self.step = 0
        """The step that measured it last."""

    @property
    def is_settled(self) -> bool:
        """Whether it was measured often enough."""
        return self.count >= _NUM_FIRST

    def note(self, seconds: float) -> None:
        """Note a measurement, as if it differed little. Of the first, the least counts."""
        self.count += 1
        if self.count <= _NUM_FIRST:
            self.seconds = seconds if self.count == 1 else min(self.seconds, seconds)
        else:
            limit_s = _MOST_ERROR * self.seconds
            self.seconds += _TIME_WEIGHT * min(max(seconds - self.seconds, -limit_s), limit_s)


def size_of(num_rows: int) -> int:
    """Return the number of rows that is measured for a number of rows, as graphs are padded."""
    return num_rows if num_rows <= 8 else -(-num_rows // 8) * 8


class DraftRates:
    """How likely drafts are right, by their places in chains.

    The first drafts of a sequence may be right more or less often than those of all sequences,
    which is its lead. Of many sequences that are alike, some seem better, so a lead counts only as
    much as leads have predicted.
    """

    def __init__(self) -> None:
        self._rates = [_FIRST_RATE]
        """By place; later places are assumed to have the last rate."""
        self._forced_rate = _FIRST_FORCED_RATE
        self._weights = [_FIRST_WEIGHT]
        """The weight of the next draft in each rate."""
        self._trust = 0.5
        """How much of a lead counts."""

    def renew(self) -> None:
        """Let rates follow the next drafts as fast as they followed the first."""
        self._weights = [_FIRST_WEIGHT] * len(self._weights)

    def survivals(self, lead: float, num_drafts: int, num_forced: int = 0) -> list[float]:
        """Return how likely each of the first drafts of a chain is accepted.

        The first `num_forced` of them are forced by a grammar.
        """
        if num_forced:
            forced = [self._forced_rate ** (number + 1) for number in range(num_forced)]
            others = self.survivals(lead, num_drafts - num_forced)
            return forced + [forced[-1] * survival for survival in others]
        rates = self._rates[:num_drafts]
        rates += rates[-1:] * (num_drafts - len(rates))
        if rates:
            rates[0] = min(max(rates[0] + self._trust * lead, _LEAST_RATE), 1.0)
        return list(accumulate(rates, mul))

    def note_draft(
        self, drafts: SequenceDrafts, place: int, *, is_right: bool, num_forced: int = 0
    ) -> None:
        """Note whether a draft was right; the drafts before it were.

        The first `num_forced` drafts of its chain are forced by a grammar.
        """
        if place < num_forced:
            change = _FORCED_WEIGHT * (is_right - self._forced_rate)
            self._forced_rate = max(self._forced_rate + change, _LEAST_FORCED_RATE)
            return
        place -= num_forced
        if place == len(self._rates):
            self._rates.append(self._rates[-1])
            self._weights.append(_FIRST_WEIGHT)
        change = is_right - self._rates[place]
        if place == 0:
            # Only the better sequences reach later places.
            error = change - self._trust * drafts.lead
            trust = self._trust + _TRUST_WEIGHT * drafts.lead * error
            self._trust = min(max(trust, 0.0), 1.0)
            drafts.lead += _LEAD_WEIGHT * (change - drafts.lead)
        weight = self._weights[place]
        self._rates[place] += weight * change
        self._weights[place] = max(weight / (1.0 + weight), _COMMON_WEIGHT)


class HeadFeeding:
    """When a draft head reads tokens, and when its guesses are tried although they do not pay."""

    def __init__(self) -> None:
        self.is_on = True
        self.number = 0
        """How often it was begun again. Only sequences that have started since have guesses."""
        self._num_steps = 0
        """Steps since guesses paid, or since feeding began or ended."""

    @property
    def is_try(self) -> bool:
        """Whether guesses behind the next step are tried if they do not pay."""
        return self.is_on and self._num_steps % _TRY_PERIOD == 1

    @property
    def is_settled(self) -> bool:
        """Whether tokens are known that earlier tries have guessed."""
        return self.is_on and self._num_steps % _TRY_PERIOD == 0

    def advance(self, *, pays: bool, has_starts: bool) -> None:
        """Decide about the next step, which may have starts of sequences."""
        self._num_steps += 1
        if self.is_on and pays:
            self._num_steps = 0
        elif self.is_on and self._num_steps > _TRIAL:
            self.is_on, self._num_steps = False, 0
        elif not self.is_on and has_starts and (pays or self._num_steps > _PAUSE):
            self.is_on, self._num_steps = True, 0
            self.number += 1
