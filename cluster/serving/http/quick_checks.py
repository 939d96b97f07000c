"""Health checks that are answered from an accepted socket.

Opening a connection, parsing a request and calling the application take twenty times as long, so
that a flood of checks would delay all other checks of its host.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from cluster.serving.http.endpoint import HEALTHY, json_response
from cluster.serving.http.read_lines import MAX_CHECK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["QuickChecks"]

_CHECK = re.compile(rb"GET (/[a-z]+) HTTP/1\.1\r\n((?:[A-Za-z-]+: [!-~](?:[ -~]*[!-~])?\r\n)+)\r\n")
_HEADERS = frozenset((b"accept", b"accept-encoding", b"connection", b"host", b"user-agent"))
"""Headers that a health check may have; apart from the host, none changes the response."""


class QuickChecks:
    """Answers requests for a health check that also ask to close the connection.

    Failing checks and every other request go to the application.
    """

    def __init__(
        self,
        passes: Callable[[str, str], bool],
        common_headers: Callable[[], list[tuple[bytes, bytes]]],
    ) -> None:
        """`passes` returns whether the health check of a path succeeds for a host.

        `common_headers` returns the first headers of each response.
        """
        self._passes = passes
        self._common_headers = common_headers
        response = json_response(HEALTHY)
        self._status_line = STATUS_LINE[response.status_code]
        self._headers = [*response.raw_headers, (b"connection", b"close")]
        self._body = bytes(response.body)

    def response_to(self, received: bytes) -> bytes | None:
        """Return the response to all that a connection has received, None to open it."""
        if len(received) > MAX_CHECK_BYTES:
            return None
        found = _CHECK.fullmatch(received)
        if found is None:
            return None
        lines = [line.split(b": ", 1) for line in found[2].split(b"\r\n")[:-1]]
        headers = {name.lower(): value for name, value in lines}
        if len(headers) < len(lines) or not headers.keys() <= _HEADERS or b"host" not in headers:
            return None
        if headers.get(b"connection", b"").lower() != b"close":
            return None
        if not self._passes(found[1].decode(), headers[b"host"].decode()):
            return None
        written = [b"%b: %b\r\n" % one for one in (*self._common_headers(), *self._headers)]
        return b"".join((self._status_line, *written, b"\r\n", self._body))
