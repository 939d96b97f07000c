"""HTTP requests without a key, on each connection as soon as the one before is rejected."""

from __future__ import annotations

from tests.hostile.floods.http_flood import HttpFlood

__all__ = ["KeylessRequests"]


class KeylessRequests(HttpFlood):
    """The shortest requests that the server reads."""

    name = "HTTP requests without a key"
    num_connections = 200
    allowed = frozenset(("401",))

    def request(self, key: str | None) -> bytes:
        """Return a request of an endpoint that needs a key."""
        return b"GET /loads HTTP/1.1\r\nHost: x\r\n\r\n"
