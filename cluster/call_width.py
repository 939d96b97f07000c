"""The order in which the requests of a call begin, and how many of them run at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CallWidth", "longest_first"]

_NUM_LEAST = 256
"""Requests that may always run: up to this many, a GPU spends most of a step reading weights."""
_EXTRA_SHARE = 16
"""The share of the requests that would end with the longest one is a sixteenth larger, since
requests that begin later also have prompts."""
_GROUP_SHARE = 8
"""Requests begin in groups of an eighth of those that run, since a step with prompts takes longer
to launch."""


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Return the indices of `lengths` from the largest to the smallest; equal ones keep order."""
    return sorted(range(len(lengths)), key=lambda index: -lengths[index])


class CallWidth:
    """Limits how many requests of a call run at once, so that short ones are left for its end.

    Every step reads all weights, however few sequences it has. If all requests began together, only
    the longest ones would be left at the end, in steps that take nearly as long as full ones. The
    longest therefore begin first, and the others follow when requests have ended (the longest
    processing time rule; Graham, "Bounds on Multiprocessing Timing Anomalies", 1969). As many run
    at once as let all of them end with the longest one: all of them if they are equally long.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        """The requests generate at most this many tokens each, the longest first."""
        self._lengths = lengths
        self._num_tokens = sum(lengths)
        self._is_ended = bytearray(len(lengths))
        self._first = 0
        """The index of the longest request that has not ended."""
        self._num_most = _NUM_LEAST
        self._widen()

    def end(self, index: int) -> None:
        """Note that the request of this index has ended."""
        self._is_ended[index] = True
        self._num_tokens -= self._lengths[index]
        if index == self._first:
            self._first = self._is_ended.find(0, index)
            self._widen()

    def num_to_begin(self, *, num_waiting: int, num_running: int) -> int:
        """Return how many of the waiting requests may begin, which are none or a group of them."""
        num_free = min(self._num_most - num_running, num_waiting)
        num_grouped = min(max(self._num_most // _GROUP_SHARE, 1), num_waiting)
        return num_free if num_free >= num_grouped else 0

    def _widen(self) -> None:
        """Let more requests run if those that are left are shorter than expected."""
        if self._num_tokens:
            num_most = -(-self._num_tokens // self._lengths[self._first])
            self._num_most = max(self._num_most, num_most + num_most // _EXTRA_SHARE)
