"""An HTTP server on the loopback that serves from memory, with faults."""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import unquote, urlsplit

from tests.quiet_server import QuietServer

if TYPE_CHECKING:
    pass

__all__ = ["Exchange", "Fault", "FaultyServer", "Requested"]


@dataclass(slots=True)
class Fault:
    """What goes wrong with the next requests whose path contains a text."""

    path: str
    times: int = 1
    method: str = "GET"
    status: int | None = None
    """Answer with this status instead."""
    headers: Mapping[str, str] = field(default_factory=dict)
    cut_after: int | None = None
    """Close the connection after so many bytes of the body."""
    flips_byte: bool = False
    """Change a byte of the body."""
    stalls: threading.Event | None = None
    """Wait for this event before the answer."""
    stalls_after: int | None = None
    """Wait for it after so many bytes of the body instead, and close the connection."""


@dataclass(frozen=True, slots=True)
class Requested:
    """A request that the server has received."""

    method: str
    path: str
    range: str | None
    token: str | None


class FaultyServer(ABC):
    """Answers GET and HEAD, as a context manager."""

    def __init__(self) -> None:
        self.requested: list[Requested] = []
        self.faults: list[Fault] = []
        self._lock = threading.Lock()
        self._server = QuietServer(("127.0.0.1", 0), functools.partial(Exchange, self))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @abstractmethod
    def answer(self, exchange: Exchange, path: str, query: str) -> None:
        """Send the response to a request."""

    def error_body(self, status: int) -> bytes:
        """Return the body of a response with the status of a fault."""
        return b""

    def note(self, requested: Requested) -> Fault | None:
        """Record a request; return its fault."""
        with self._lock:
            self.requested.append(requested)
            for fault in self.faults:
                if (
                    fault.times
                    and fault.method == requested.method
                    and fault.path in requested.path
                ):
                    fault.times -= 1
                    return fault
        return None

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class Exchange(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"

    # Any: what the library passes on.
    def __init__(self, server: FaultyServer, *args: Any) -> None:
        self._served_by = server
        self._fault: Fault | None = None
        super().__init__(*args)

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        requested = Requested(
            self.command, path, self.headers["Range"], self.headers["Authorization"]
        )
        fault = self._served_by.note(requested)
        if fault is not None and fault.stalls is not None and fault.stalls_after is None:
            fault.stalls.wait()
        self._fault = None
        if fault is not None and fault.status is not None:
            self.send(fault.status, fault.headers, self._served_by.error_body(fault.status))
            return
        self._fault = fault
        self._served_by.answer(self, path, url.query)

    def send(self, status: int, headers: Mapping[str, str], content: bytes = b"") -> None:
        """Send a response. The fault of the request, if any, befalls its body."""
        fault = self._fault
        self.send_response(status, HTTPStatus(status).phrase)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault is not None and fault.flips_byte:
            content = bytes([content[0] ^ 1]) + content[1:]
        if fault is not None and fault.cut_after is not None:
            content, self.close_connection = content[: fault.cut_after], True
        if fault is not None and fault.stalls is not None:
            self.wfile.write(content[: fault.stalls_after])
            fault.stalls.wait()
            self.close_connection = True
            return
        self.wfile.write(content)
