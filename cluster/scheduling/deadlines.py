"""The deadlines of open requests."""

import heapq
from collections.abc import Mapping

from cluster.scheduling.sequence import ActiveRequest
from pagedray.request import Request

__all__ = ["Deadlines"]

_FEW = 64
"""Entries of ended requests that are kept without a search for them."""


class Deadlines:
    """The deadlines of open requests, the earliest first."""

    def __init__(self, requests: Mapping[str, ActiveRequest]) -> None:
        """`requests` has the open requests by id; it is read whenever a deadline is."""
        self._requests = requests
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        """Return the number of kept deadlines, including those of ended requests."""
        return len(self._heap)

    def add_request(self, request: Request) -> None:
        """Note the deadline of an open request, if it has one."""
        if request.deadline_s is None:
            return
        heapq.heappush(self._heap, (request.deadline_s, request.id))
        if len(self._heap) > 2 * len(self._requests) + _FEW:
            self._heap = [entry for entry in self._heap if self._is_open(*entry)]
            heapq.heapify(self._heap)

    def take_due(self, now_s: float) -> list[str]:
        """Return the ids of the open requests whose deadline has passed, and forget them."""
        due: list[str] = []
        while self._heap and self._heap[0][0] <= now_s:
            deadline_s, request_id = heapq.heappop(self._heap)
            if self._is_open(deadline_s, request_id):
                due.append(request_id)
        return due

    def _is_open(self, deadline_s: float, request_id: str) -> bool:
        # An id may be used again, with another deadline.
        active = self._requests.get(request_id)
        return active is not None and active.request.deadline_s == deadline_s
