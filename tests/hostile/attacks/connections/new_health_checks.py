"""Health checks, each on a connection of its own."""

from __future__ import annotations

from tests.hostile.floods.http_flood import HttpFlood

__all__ = ["NewHealthChecks"]


class NewHealthChecks(HttpFlood):
    """Each is the first request of its connection, which the server closes."""

    name = "health checks, a connection each"
    num_connections = 200
    allowed = frozenset(("200", "429"))

    def request(self, key: str | None) -> bytes:
        """Return a request that needs no key."""
        return b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
