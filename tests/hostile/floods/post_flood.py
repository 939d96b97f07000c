"""Attacks that post a body over HTTP again and again."""

from __future__ import annotations

import http.client
import time
from typing import TYPE_CHECKING, ClassVar

from tests.hostile.floods.request_flood import Answer, RequestFlood

if TYPE_CHECKING:
    from tests.hostile.attack import Target

__all__ = ["PostFlood"]

_PAUSE_S = 0.02
_PATIENCE_S = 3.0
"""How long a client waits for an answer at least; a long attack waits for its whole time."""


class PostFlood(RequestFlood):
    """Requests to one path."""

    path: ClassVar[str] = "/v1/completions"
    allowed = frozenset(("400", "413", "429"))

    def next_body(self, body: bytes) -> bytes:
        """Return what the next request sends, given what `body` returned."""
        return body

    def send_until(self, end_s: float, target: Target, body: bytes) -> list[Answer]:
        """Post on one connection, and return the statuses."""
        answers: list[Answer] = []
        headers = {"Authorization": f"Bearer {target.key}", "Content-Type": "application/json"}
        timeout_s = max(_PATIENCE_S, end_s - time.monotonic())
        connection = http.client.HTTPConnection("127.0.0.1", target.http_port, timeout=timeout_s)
        while time.monotonic() < end_s:
            started_s = time.monotonic()
            try:
                connection.request("POST", self.path, self.next_body(body), headers)
                answer = connection.getresponse()
                answer.read()
            except (OSError, http.client.HTTPException):
                # The server closes a connection whose body it does not read; others wait too long.
                connection.close()
                time.sleep(_PAUSE_S)
                continue
            answers.append((str(answer.status), time.monotonic() - started_s))
        connection.close()
        return answers
