"""HTTP requests with thousands of headers of a few bytes each."""

from __future__ import annotations

from tests.hostile.floods.http_flood import HttpFlood

__all__ = ["ManyHeaders"]

_NUM_HEADERS = 12_900


class ManyHeaders(HttpFlood):
    """Heads of just less than 64 KiB, without a key."""

    name = "12 900 headers, without a key"
    allowed = frozenset(("431",))

    def request(self, key: str | None) -> bytes:
        """Return a request of an endpoint that needs a key."""
        return b"GET /loads HTTP/1.1\r\nHost: x\r\n%b\r\n" % (b"a:\r\n" * _NUM_HEADERS)
