"""The captures of a rank by size, and the sizes without a capture.

Does not know the content of a capture, nor how to make it.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from typing import TYPE_CHECKING, Generic, TypeVar

from pagedray.rank_progress import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagedray.rank_progress import ProgressWord

__all__ = ["Captures"]

logger = logging.getLogger(__name__)

Capture = TypeVar("Capture")


class Captures(Generic[Capture]):
    """A capture for each of several sizes, made before the first step or later."""

    def __init__(
        self,
        sizes: list[int],
        capture: Callable[[int], Capture],
        *,
        progress: ProgressWord,
        may_lack: bool,
    ) -> None:
        """`sizes` are ascending. `may_lack` is true if later steps may run without a capture.

        Several ranks may not: their collectives would have other sizes on a rank without a capture.
        """
        self._sizes = sizes
        self._capture = capture
        self._progress = progress
        self._may_lack = may_lack
        self._made: dict[int, Capture] = {}
        self._has_failed = False

    @property
    def are_any(self) -> bool:
        """Whether a size is captured."""
        return bool(self._made)

    @property
    def missing_sizes(self) -> list[int]:
        """The sizes that are still to be captured, ascending."""
        return [] if self._has_failed else self._uncaptured()

    def capture_all(self, *, only_largest: bool) -> None:
        """Capture the missing sizes, or only the largest. Raises the errors of the capture."""
        # The largest first, since smaller captures reuse its memory pool.
        for size in self._sizes[-1:] if only_largest else reversed(self._sizes):
            if size not in self._made:
                self._add(size)

    def capture_next(self) -> None:
        """Capture the smallest missing size, as `find` does."""
        self._add_or_fail(self.missing_sizes[0])

    def find(self, num_tokens: int) -> tuple[int, Capture] | None:
        """Return the next larger size and its capture, or None if a step runs without a capture.

        A missing capture is made. If that fails, no other capture is made either: mostly, memory is
        short.
        """
        size = self._sizes[bisect_left(self._sizes, num_tokens)]
        if size not in self._made and not self._has_failed:
            # Every rank has the same plans, so that all capture at the same step.
            self._add_or_fail(size)
        capture = self._made.get(size)
        return None if capture is None else (size, capture)

    def _uncaptured(self) -> list[int]:
        return [size for size in self._sizes if size not in self._made]

    def _add(self, size: int) -> None:
        self._progress.enter(Phase.CAPTURING, size)
        self._made[size] = self._capture(size)

    def _add_or_fail(self, size: int) -> None:
        if not self._may_lack:
            self._add(size)
            return
        try:
            self._add(size)
        # A compiler raises other errors than CUDA does. If the device has failed, the next step
        # raises too.
        except Exception as error:
            self._has_failed = True
            num_lacking = len(self._uncaptured())
            logger.warning(
                "Could not capture the CUDA graph of size %s; steps of %s sizes run without graphs "
                "and are slower: %s",
                size,
                num_lacking,
                next(iter(str(error).splitlines()), type(error).__name__),
            )
            self._progress.add_uncaptured(num_lacking)
