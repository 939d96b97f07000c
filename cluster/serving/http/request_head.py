"""The head of a request: its size, and whether another parser might read it differently."""

from __future__ import annotations

__all__ = ["head_without_upgrade", "is_ambiguous", "num_head_bytes"]

_Headers = list[tuple[bytes, bytes]]
"""Names in lower case, and values."""

_VERSIONS = ("1.0", "1.1")


def is_ambiguous(version: str, headers: _Headers) -> bool:
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


def num_head_bytes(url: bytes, headers: _Headers) -> int:
    """Return the approximate size of a head, including separators."""
    return len(url) + sum(len(name) + len(value) + 4 for name, value in headers)


def head_without_upgrade(method: bytes, url: bytes, version: str, headers: _Headers) -> bytes:
    """Return a head that requests no other protocol."""
    lines = [b"%b %b HTTP/%b" % (method, url, version.encode())]
    lines += [b"%b: %b" % (name, value) for name, value in headers if name != b"upgrade"]
    return b"\r\n".join((*lines, b"", b""))
