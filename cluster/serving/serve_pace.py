"""How often a stream hands on what it has, so that a carrier of few messages is not flooded."""

from __future__ import annotations

__all__ = ["Pace"]


class Pace:
    """Spreads a number of messages a second over the streams that run."""

    def __init__(self, messages_per_s: float) -> None:
        self._messages_per_s = messages_per_s

    def pause_s(self, num_streams: int) -> float:
        """Return how long a stream is to wait after a message; a lone stream hardly waits."""
        return max(num_streams, 1) / self._messages_per_s
