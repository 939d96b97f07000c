"""HTTP bodies in chunks of one byte."""

from __future__ import annotations

from tests.hostile.floods.http_flood import HttpFlood

__all__ = ["SmallChunks"]

_NUM_CHUNKS = 200_000
_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


class SmallChunks(HttpFlood):
    """They arrive after the request was rejected, too."""

    name = "chunks of a byte, without a key"
    num_connections = 50
    allowed = frozenset(("400", "401"))

    def request(self, key: str | None) -> bytes:
        """Return a request without its end."""
        return _HEAD + b"1\r\nx\r\n" * _NUM_CHUNKS
