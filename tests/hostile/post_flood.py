"""Attacks that post one body over HTTP again, on each connection as soon as it is answered."""

from __future__ import annotations

import http.client
import time
from abc import abstractmethod
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ClassVar

from tests.hostile.attack import Attack, Findings
from tests.load.report import times_ms

if TYPE_CHECKING:
    from tests.hostile.attack import Target

__all__ = ["PostFlood"]

_PAUSE_S = 0.02


class PostFlood(Attack):
    """Several connections with the attacker's key."""

    path: ClassVar[str] = "/v1/completions"
    num_connections: ClassVar[int] = 8
    allowed: ClassVar[frozenset[int]] = frozenset((400, 413, 429))
    """The statuses that the server may answer."""

    @abstractmethod
    def body(self) -> bytes:
        """Return what each request sends."""

    def run(self, target: Target, seconds: float) -> Findings:
        """Post on all connections."""
        body = self.body()
        end_s = time.monotonic() + seconds
        with ThreadPoolExecutor(self.num_connections) as threads:
            runs = [
                threads.submit(self._post_until, end_s, target, body)
                for _ in range(self.num_connections)
            ]
            answers = [answer for one in runs for answer in one.result()]
        statuses = Counter(status for status, _ in answers)
        return Findings(
            figures={
                "bytes": len(body),
                "answers": {str(status): number for status, number in statuses.items()},
                **times_ms([seconds for _, seconds in answers]),
            },
            broken=tuple(
                f"The server answered {status}."
                for status in sorted(statuses.keys() - self.allowed)
            ),
        )

    def _post_until(self, end_s: float, target: Target, body: bytes) -> list[tuple[int, float]]:
        """Return the statuses of requests and the seconds that each took."""
        answers: list[tuple[int, float]] = []
        headers = {"Authorization": f"Bearer {target.key}", "Content-Type": "application/json"}
        connection = http.client.HTTPConnection("127.0.0.1", target.http_port, timeout=30.0)
        while time.monotonic() < end_s:
            started_s = time.monotonic()
            try:
                connection.request("POST", self.path, body, headers)
                answer = connection.getresponse()
                answer.read()
            except (OSError, http.client.HTTPException):
                # The server closes a connection whose body it does not read.
                connection.close()
                time.sleep(_PAUSE_S)
                continue
            answers.append((answer.status, time.monotonic() - started_s))
        connection.close()
        return answers
