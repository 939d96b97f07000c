"""A number that one process counts and another reads, in a file that both have mapped."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path
    from typing import ClassVar

__all__ = ["TokenCounter"]


class TokenCounter:
    """How many tokens clients have read. One process adds."""

    NUM_BYTES: ClassVar = 8
    """What its file needs."""

    def __init__(self, path: Path) -> None:
        """The file has NUM_BYTES."""
        with path.open("r+b") as file:
            # A number of eight bytes that lies on such a border is written at once.
            self._numbers = memoryview(mmap.mmap(file.fileno(), self.NUM_BYTES)).cast("Q")

    @property
    def value(self) -> int:
        """The number of this moment."""
        return self._numbers[0]

    def add(self, num_tokens: int) -> None:
        """Count some."""
        self._numbers[0] += num_tokens
