"""Preflight requests of web pages, without a key, with large headers."""

from __future__ import annotations

from tests.hostile.floods.http_flood import HttpFlood

__all__ = ["Preflights"]

_NUM_HEADERS = 4000


class Preflights(HttpFlood):
    """A list of thousands of headers that a page would like to send."""

    name = "preflights of 4000 headers"
    num_connections = 50
    allowed = frozenset(("200", "204", "400", "401", "403", "429"))

    def request(self, key: str | None) -> bytes:
        """Return a request that needs no key."""
        names = b",".join([b"x-a"] * _NUM_HEADERS)
        return (
            b"OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: x\r\nOrigin: https://evil.example\r\n"
            b"Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: %b\r\n\r\n"
            % names
        )
