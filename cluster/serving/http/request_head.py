"""The head of a request: its size, and whether another parser might read it differently."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException

if TYPE_CHECKING:
    from starlette.types import Scope

__all__ = ["MAX_HEADERS", "MAX_HEAD_BYTES", "check_head", "head_without_upgrade"]

MAX_HEADERS = 128
MAX_HEAD_BYTES = 2**16
"""The limit of a head, and of the chunk extensions and trailers around the chunks of a body."""

_Headers = list[tuple[bytes, bytes]]
"""Names in lower case, and values."""

_VERSIONS = ("1.0", "1.1")


def check_head(scope: Scope) -> None:
    """Raise HTTPException for a head that is too large, or that a proxy might read differently."""
    headers = scope["headers"]
    if len(headers) > MAX_HEADERS:
        raise HTTPException(431, f"A request may have at most {MAX_HEADERS} headers.")
    url = scope.get("raw_path", b"") + scope.get("query_string", b"")
    if len(url) + sum(len(name) + len(value) + 4 for name, value in headers) > MAX_HEAD_BYTES:
        raise HTTPException(431, f"The head of the request exceeds {MAX_HEAD_BYTES} bytes.")
    # Requests that did not come over a connection, such as requests of a batch, have no version.
    if "http_version" in scope and _is_ambiguous(scope["http_version"], headers):
        raise HTTPException(400, "The request is not valid HTTP.", {"connection": "close"})


def _is_ambiguous(version: str, headers: _Headers) -> bool:
    """Return whether a proxy might take another host for the request's, or another body."""
    names = [name for name, _ in headers]
    num_hosts = names.count(b"host")
    if version not in _VERSIONS or num_hosts > 1 or (version == "1.1" and not num_hosts):
        return True
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if not codings:
        return False
    # HTTP/1.0 has no chunks, so a proxy may take all bytes after the head for the body.
    return version == "1.0" or len(codings) > 1 or codings[0].lower() != b"chunked"


def head_without_upgrade(method: bytes, url: bytes, version: str, headers: _Headers) -> bytes:
    """Return a head that requests no other protocol."""
    lines = [b"%b %b HTTP/%b" % (method, url, version.encode())]
    lines += [b"%b: %b" % (name, value) for name, value in headers if name != b"upgrade"]
    return b"\r\n".join((*lines, b"", b""))
