"""Estimates for drafts: the times of steps, the rates of right drafts, and when heads are tried."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from itertools import accumulate
from operator import mul
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from cluster.scheduling.sequence import SequenceDrafts

__all__ = ["DraftRates", "HeadFeeding", "RowTimes", "size_of"]

_FIRST_RATE = 0.6
"""How likely a draft is right as long as none was verified."""
_FIRST_WEIGHT = 0.05
"""Weight of the first draft in the rate of its place; the next is that of a draft after many."""
_COMMON_WEIGHT = 0.003
_LEAD_WEIGHT = 0.08
"""Weight of a draft in the lead of its sequence."""
_TRUST_WEIGHT = 0.05
"""How fast it is learned how much a lead says."""
_LEAST_RATE = 0.01
_DRIFT_WEIGHT = 0.2
"""Weight of a step in the times of all sizes; the next is the least in the time of its size."""
_SIZE_WEIGHT = 0.05
_DRIFT_ROWS = 64
"""Rows in addition to the rows of a step of which times change together."""
_LEAST_S = 1e-6
_HEAD_WEIGHT = 0.3
"""Weight of a step in the time of a draft head."""
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
_EXCESS_WEIGHT = 0.1
"""Weight of a step in the time that steps take longer behind a gap."""
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
    rows of the same launch. The times of all sizes change together, as contexts grow.
    """

    def __init__(self, first_gap_s: float = _FIRST_GAP_S) -> None:
        self._times: dict[int, _StepTime] = {}
        self._sizes: list[int] = []
        """The sizes of these, in ascending order."""
        self._drift_s = 0.0
        """By how much steps are slower than when they were measured, for each row and 64 more."""
        self._num_steps = 0
        self.idle_s = 0.0
        """How long ranks wait for plans that are made during the step before."""
        self._head_s: float | None = None
        self._ahead: set[int] = set()
        """Sizes of steps that were planned ahead."""
        self._excess_s = 0.0
        """By how much steps take longer behind a gap."""
        self._gap_s = first_gap_s
        self._gaps = deque((first_gap_s,), _NUM_GAPS)

    @property
    def gap_s(self) -> float:
        """By how much longer a step takes if its plan is made after the step before."""
        return self._gap_s + max(self._excess_s, 0.0)

    @property
    def head_s(self) -> float | None:
        """The time that guesses of a draft head add to a step, if measured beside plain steps.

        The head makes as many guesses as it may, whatever their use.
        """
        return self._head_s

    def note_head(self, seconds: float) -> None:
        """Note the time that guesses of a draft head have added to a step."""
        known_s = seconds if self._head_s is None else self._head_s
        self._head_s = known_s + _HEAD_WEIGHT * (seconds - known_s)

    def note_idle(self, seconds: float, *, has_gap: bool) -> None:
        """Note how long ranks waited for a plan, which has a gap if it was made after the step."""
        if has_gap:
            self._gaps.append(max(seconds - self.idle_s, 0.0))
            # The longest may have any cause.
            self._gap_s = fmean(sorted(self._gaps)[:-1])
        else:
            idle_s = min(seconds, self.idle_s + _FIRST_GAP_S)
            self.idle_s += _IDLE_WEIGHT * (idle_s - self.idle_s)
            self._gap_s = max(self._gap_s * (1 - _GAP_DECAY), min(self._gap_s, _FIRST_GAP_S))

    def note(self, num_rows: int, seconds: float, *, is_alone: bool = False) -> None:
        """Note the duration of a step of decodes; it `is_alone` if a gap was before it.

        Then the device has waited for launches within the step, too.
        """
        size = size_of(num_rows)
        known = self._times.get(size)
        seconds = max(seconds, _LEAST_S)
        expected_s = self.time_of(size) if self._times else seconds
        if known is not None and self._num_steps - known.step >= _NUM_STEPS_KEPT:
            self._ahead.discard(size)
        if is_alone:
            if size in self._ahead:
                excess_s = min(seconds, 2 * expected_s) - expected_s
                self._excess_s += _EXCESS_WEIGHT * (excess_s - self._excess_s)
                self._num_steps += 1
                return
            seconds = max(seconds - max(self._excess_s, 0.0), _LEAST_S)
        elif size not in self._ahead:
            self._ahead.add(size)
            known = None if known is None else known._replace(num_measured=0)
        # A single step may take any time; the first of a size may capture a graph.
        limit_s = 2 * expected_s
        if known is None:
            index = bisect_left(self._sizes, size)
            for above in self._sizes[index : index + 1]:
                limit_s = max(limit_s, self._known_time(above))
            self._sizes.insert(index, size)
        error_s = min(seconds, limit_s) - expected_s
        count = 1 if known is None else known.num_measured + 1
        weight = max(2 / (count + 1), _SIZE_WEIGHT)
        drift_s = self._drift_s * (size + _DRIFT_ROWS)
        self._num_steps += 1
        self._times[size] = _StepTime(
            expected_s - drift_s + weight * error_s, count, self._num_steps
        )
        self._drift_s += _DRIFT_WEIGHT * (1 - weight) * error_s / (size + _DRIFT_ROWS)

    def has_run_ahead(self, num_rows: int) -> bool:
        """Return whether steps of a number of rows were planned ahead."""
        return size_of(num_rows) in self._ahead

    def has_measured(self, num_rows: int) -> bool:
        """Return whether steps of a number of rows were measured."""
        return size_of(num_rows) in self._times

    def time_of(self, num_rows: int) -> float:
        """Return the predicted duration of a step of decodes, in seconds; about 1 at first.

        Sizes that were not measured are assumed to be fast, so that they are tried.
        """
        size = size_of(num_rows)
        known = self._times.get(size)
        if known is not None and self._num_steps - known.step < _NUM_STEPS_KEPT:
            return self._known_time(size)
        index, end = bisect_left(self._sizes, size), bisect_right(self._sizes, size)
        below = self._sizes[index - 1] if index else 0
        above = self._sizes[end] if end < len(self._sizes) else 0
        if not below:
            return self._known_time(above) * size / above if above else 1 + _UNKNOWN_ROW * size
        least_s = self._known_time(below)
        if above:
            part = (size - below) / (above - below)
            return least_s + part * part * max(self._known_time(above) - least_s, 0.0)
        first, row_s = self._sizes[0], _UNKNOWN_ROW * least_s
        if first < below:
            # Sizes beyond are at least as fast as if rows took as long as so far.
            row_s = min(row_s, max(least_s - self._known_time(first), 0.0) / (below - first))
        return least_s + row_s * (size - below)

    def _known_time(self, size: int) -> float:
        seconds = self._times[size].seconds + self._drift_s * (size + _DRIFT_ROWS)
        return max(seconds, _LEAST_S)


class _StepTime(NamedTuple):
    """The time of steps of a size, as measured."""

    seconds: float
    """Without the drift."""
    num_measured: int
    """How often steps of the size were measured."""
    step: int
    """The step that measured it last."""


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
