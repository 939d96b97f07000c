"""A small S3 on the loopback, with faults: the part of its API for downloads."""

from __future__ import annotations

import hashlib
import re
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import parse_qs
from xml.sax.saxutils import escape

from tests.downloads.faulty_server import FaultyServer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.downloads.faulty_server import Exchange

__all__ = ["SmallS3"]

_BUCKET = "models"
_DATE = "2026-01-01T00:00:00.000Z"


class SmallS3(FaultyServer):
    """Serves the objects of one bucket, `models`, from memory, as a context manager."""

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, bytes] = {}
        self.listed_sizes: dict[str, int] = {}
        """Sizes that the list states instead of those of the objects."""
        self.listed_etags: dict[str, str] = {}
        """The same of ETags."""

    def push(self, prefix: str, files: Mapping[str, bytes]) -> None:
        """Store files below a prefix."""
        self.objects.update({f"{prefix}/{name}": content for name, content in files.items()})

    def ranges_of(self, name: str) -> list[str]:
        """Return the ranges of an object that were requested."""
        return [each.range or "" for each in self.requested if each.path.endswith(f"/{name}")]

    def error_body(self, status: int) -> bytes:
        return f"<Error><Code>{HTTPStatus(status).phrase}</Code></Error>".encode()

    def answer(self, exchange: Exchange, path: str, query: str) -> None:
        key = path.strip("/").removeprefix(_BUCKET).strip("/")
        if not key:
            prefix = parse_qs(query).get("prefix", [""])[0]
            exchange.send(200, {"Content-Type": "application/xml"}, _listing(self, prefix))
        elif key in self.objects:
            self._send_object(exchange, self.objects[key])
        else:
            self._reject(exchange, 404)

    def _send_object(self, exchange: Exchange, content: bytes) -> None:
        if exchange.headers["If-Match"] not in (None, _etag(content)):
            self._reject(exchange, 412)
            return
        headers = {"ETag": _etag(content), "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", exchange.headers["Range"] or "")
        if found is None:
            exchange.send(200, headers, content)
            return
        first, last = int(found[1]), min(int(found[2]), len(content) - 1)
        if first >= len(content):
            self._reject(exchange, 416)
            return
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        exchange.send(206, headers, content[first : last + 1])

    def _reject(self, exchange: Exchange, status: int) -> None:
        exchange.send(status, {}, self.error_body(status))


def _listing(s3: SmallS3, prefix: str) -> bytes:
    entries = "".join(
        f"<Contents><Key>{escape(key)}</Key><LastModified>{_DATE}</LastModified>"
        f"<ETag>{escape(s3.listed_etags.get(key, _etag(content)))}</ETag>"
        f"<Size>{s3.listed_sizes.get(key, len(content))}</Size></Contents>"
        for key, content in sorted(s3.objects.items())
        if key.startswith(prefix)
    )
    return (
        f"<ListBucketResult><Name>{_BUCKET}</Name><IsTruncated>false</IsTruncated>"
        f"{entries}</ListBucketResult>"
    ).encode()


def _etag(content: bytes) -> str:
    return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'
