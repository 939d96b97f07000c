"""An HTTP server that prints no traceback when a client leaves before its answer.

The thread of such a client may write after its test, to the standard error of another one.
"""

from __future__ import annotations

import sys
from http.server import ThreadingHTTPServer
from typing import Any


class QuietServer(ThreadingHTTPServer):
    """A server with a thread for each connection."""

    # Any: a socket.
    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)
