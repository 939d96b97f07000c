"""The headers of a request that Ray Serve reads itself, in its encoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["decodable_headers"]

_READ_BY_SERVE = frozenset(
    {
        b"serve_multiplexed_model_id",
        b"traceparent",
        b"x_request_disconnect_disabled",
        b"x_request_id",
        b"x_request_timeout_seconds",
        b"x_session_id",
    }
)
"""Their names, in which Serve takes `-` and `_` for the same."""


def decodable_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers with values that Serve can decode, which it does as UTF-8 only."""
    return [
        (name, _as_utf8(text) if name.replace(b"-", b"_") in _READ_BY_SERVE else text)
        for name, text in headers
    ]


def _as_utf8(text: bytes) -> bytes:
    try:
        text.decode()
    except UnicodeDecodeError:
        return text.decode("latin-1").encode()
    return text
