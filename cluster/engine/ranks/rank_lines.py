"""Writes log lines of ranks to the log of the controller."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagedray.batch import RankLogLine

__all__ = ["log_rank_line"]

logger = logging.getLogger(__name__)


def log_rank_line(rank: int, line: RankLogLine) -> None:
    """Log a line of a rank at its level."""
    logger.log(line.level, "Rank %s: %s", rank, line.text)
