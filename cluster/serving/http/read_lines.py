"""The queues in which data from clients waits for its turn on the event loop: see `ReadTurns`."""

from __future__ import annotations

__all__ = ["MAX_CHECK_BYTES", "read_line"]

MAX_CHECK_BYTES = 2**10


def read_line(host: str, data: bytes, *, is_first: bool) -> str:
    """Return the line of a read, which waits only for others of its line.

    A health check on a connection of its own does not wait for other requests of its host.
    """
    may_check = is_first and data.startswith(b"GET ") and len(data) <= MAX_CHECK_BYTES
    return f"checks of {host}" if may_check else host
