"""A counter that one process increments and another reads, in a file mapped by both."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path
    from typing import ClassVar

__all__ = ["TokenCounter"]


class TokenCounter:
    """The number of tokens that clients have read; one process adds."""

    NUM_BYTES: ClassVar = 8
    """What its file needs."""

    def __init__(self, path: Path) -> None:
        """The file has NUM_BYTES."""
        with path.open("r+b") as file:
            # An aligned number of eight bytes is written atomically.
            self._numbers = memoryview(mmap.mmap(file.fileno(), self.NUM_BYTES)).cast("Q")

    @property
    def value(self) -> int:
        """The current number."""
        return self._numbers[0]

    def add(self, num_tokens: int) -> None:
        """Add tokens."""
        self._numbers[0] += num_tokens
