"""A small S3 on the loopback, with faults: the part of its API for downloads."""

from __future__ import annotations

import hashlib
import re
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Self
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.small_hub import Fault, Requested

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

__all__ = ["SmallS3"]

_BUCKET = "models"
_DATE = "2026-01-01T00:00:00.000Z"


class SmallS3:
    """Serves the objects of one bucket, `models`, from memory, as a context manager."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.listed_sizes: dict[str, int] = {}
        """Sizes that the list states instead of those of the objects."""
        self.requested: list[Requested] = []
        self.faults: list[Fault] = []
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def push(self, prefix: str, files: Mapping[str, bytes]) -> None:
        """Store files below a prefix."""
        self.objects.update({f"{prefix}/{name}": content for name, content in files.items()})

    def ranges_of(self, name: str) -> list[str]:
        """Return the ranges of an object that were asked for."""
        return [each.range or "" for each in self.requested if each.path.endswith(f"/{name}")]

    def note(self, requested: Requested) -> Fault | None:
        """Record a request; return its fault."""
        with self._lock:
            self.requested.append(requested)
            for fault in self.faults:
                if fault.times and fault.path in requested.path:
                    fault.times -= 1
                    return fault
        return None

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler_of(s3: SmallS3) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            path = unquote(url.path)
            fault = s3.note(
                Requested("GET", path, self.headers["Range"], self.headers["Authorization"])
            )
            if fault is not None and fault.status is not None:
                self._send(fault.status, {}, _error(fault.status))
                return
            key = path.strip("/").removeprefix(_BUCKET).strip("/")
            if not key:
                prefix = parse_qs(url.query).get("prefix", [""])[0]
                self._send(200, {"Content-Type": "application/xml"}, _listing(s3, prefix))
            elif key in s3.objects:
                self._send_object(s3.objects[key], fault)
            else:
                self._send(404, {}, _error(404))

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _send_object(self, content: bytes, fault: Fault | None) -> None:
            if self.headers["If-Match"] not in (None, _etag(content)):
                self._send(412, {}, _error(412))
                return
            headers = {"ETag": _etag(content), "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
            found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"] or "")
            if found is None:
                self._send(200, headers, content, fault)
                return
            first, last = int(found[1]), min(int(found[2]), len(content) - 1)
            if first >= len(content):
                self._send(416, {}, _error(416))
                return
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            self._send(206, headers, content[first : last + 1], fault)

        def _send(
            self,
            status: int,
            headers: Mapping[str, str],
            content: bytes,
            fault: Fault | None = None,
        ) -> None:
            self.send_response(status, HTTPStatus(status).phrase)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if fault is not None and fault.cut_after is not None:
                content, self.close_connection = content[: fault.cut_after], True
            self.wfile.write(content)

    return Handler


def _listing(s3: SmallS3, prefix: str) -> bytes:
    entries = "".join(
        f"<Contents><Key>{escape(key)}</Key><LastModified>{_DATE}</LastModified>"
        f"<ETag>{escape(_etag(content))}</ETag>"
        f"<Size>{s3.listed_sizes.get(key, len(content))}</Size></Contents>"
        for key, content in sorted(s3.objects.items())
        if key.startswith(prefix)
    )
    return (
        f"<ListBucketResult><Name>{_BUCKET}</Name><IsTruncated>false</IsTruncated>"
        f"{entries}</ListBucketResult>"
    ).encode()


def _error(status: int) -> bytes:
    return f"<Error><Code>{HTTPStatus(status).phrase}</Code></Error>".encode()


def _etag(content: bytes) -> str:
    return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'
