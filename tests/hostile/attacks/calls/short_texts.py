"""Texts to tokenize that are just short enough for the event loop."""

from __future__ import annotations

import json

from tests.hostile.floods.http_flood import HttpFlood

__all__ = ["ShortTexts"]

_TEXT = "a9$ Z~" * 341


class ShortTexts(HttpFlood):
    """Two kilobytes, which take milliseconds."""

    name = "200 connections with short texts"
    num_connections = 200
    allowed = frozenset(("200", "429"))

    def request(self, key: str | None) -> bytes:
        """Return a request of `/tokenize`."""
        body = json.dumps({"prompt": _TEXT}).encode()
        return (
            b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Authorization: Bearer %b\r\nContent-Length: %d\r\n\r\n%b"
            % ((key or "").encode(), len(body), body)
        )
