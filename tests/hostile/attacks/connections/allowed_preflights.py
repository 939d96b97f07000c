"""Preflight requests of a page that may use the server, without a key."""

from __future__ import annotations

from tests.hostile.floods.http_flood import HttpFlood

__all__ = ["AllowedPreflights"]

_ORIGIN = "https://page.example"
_NUM_HEADERS = 512


class AllowedPreflights(HttpFlood):
    """Each is answered with as many of its headers as an answer repeats."""

    name = "preflights of an allowed page"
    arguments = (f"--allowed-origins={_ORIGIN}",)
    num_connections = 50
    allowed = frozenset(("204", "429"))

    def request(self, key: str | None) -> bytes:
        """Return a request that needs no key."""
        names = b",".join([b"x-a"] * _NUM_HEADERS)
        return (
            b"OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: x\r\nOrigin: %b\r\n"
            b"Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: %b\r\n\r\n"
            % (_ORIGIN.encode(), names)
        )
