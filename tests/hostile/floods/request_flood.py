"""Attacks that send one request again and again, on each connection as soon as it is answered."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ClassVar

from tests.hostile.attack import Attack, Findings
from tests.load.report import times_ms

if TYPE_CHECKING:
    from tests.hostile.attack import Target

__all__ = ["Answer", "RequestFlood"]

Answer = tuple[str, float]
"""A status or code, and the seconds that it took."""


class RequestFlood(Attack):
    """Several connections with the attacker's key."""

    num_connections: ClassVar[int] = 8
    allowed: ClassVar[frozenset[str]]
    """What the server may answer."""

    @abstractmethod
    def body(self) -> bytes:
        """Return what each request sends."""

    @abstractmethod
    def send_until(self, end_s: float, target: Target, body: bytes) -> list[Answer]:
        """Send on one connection, and return the answers."""

    def run(self, target: Target, seconds: float) -> Findings:
        """Send on all connections."""
        body = self.body()
        end_s = time.monotonic() + seconds
        with ThreadPoolExecutor(self.num_connections) as threads:
            runs = [
                threads.submit(self.send_until, end_s, target, body)
                for _ in range(self.num_connections)
            ]
            answers = [answer for one in runs for answer in one.result()]
        numbers = Counter(what for what, _ in answers)
        return Findings(
            figures={
                "bytes": len(body),
                "answers": dict(numbers),
                **times_ms([seconds for _, seconds in answers]),
            },
            broken=tuple(
                f"The server answered {what}." for what in sorted(numbers.keys() - self.allowed)
            ),
        )
