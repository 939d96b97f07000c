"""The log of a rank's process, which its controller writes to its own.

Ray stores the standard error of each rank in a file that users rarely find.
"""

from __future__ import annotations

import logging
from collections import deque

from pagedray.batch import RankLogLine

__all__ = ["RankLog", "capture_log"]

_PACKAGES = ("attention", "pagedray", "workers")
_MAX_LINES = 1000


class RankLog(logging.Handler):
    """Keeps the log records of a rank until its controller takes them."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: deque[RankLogLine] = deque(maxlen=_MAX_LINES)

    @property
    def has_lines(self) -> bool:
        """Whether anything was logged since the last call of `take_lines`."""
        return bool(self._lines)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record, in place of the oldest record if there are too many."""
        self._lines.append(RankLogLine(record.levelno, self.format(record)))

    def take_lines(self) -> list[RankLogLine]:
        """Return the lines logged since the last call."""
        # Other threads may log meanwhile.
        return [self._lines.popleft() for _ in range(len(self._lines))]


def capture_log() -> RankLog:
    """Return the log of this process from now on; warnings also go to standard error.

    That is all that is left of a rank that dies.
    """
    log = RankLog()
    for name in _PACKAGES:
        package = logging.getLogger(name)
        package.setLevel(logging.INFO)
        package.addHandler(log)
        if logging.lastResort is not None:
            package.addHandler(logging.lastResort)
    return log
