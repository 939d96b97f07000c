"""How long the process of a rank may take to start."""

from __future__ import annotations

__all__ = ["StartLimit"]

_FIRST_S = 300.0
"""Nothing is known of the first start, which may read everything from a slow disk."""
_LEAST_S = 10.0
_FACTOR = 5.0


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
