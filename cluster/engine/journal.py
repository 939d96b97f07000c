"""The journal of a replica: the requests it has accepted and not yet ended.

It lives in the controller's process, outside every rank, and says who must be served again
after the death of a group. The tokens of each are in the scheduler, which lives there too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cluster.scheduling.event import TokenEvent
    from pagedray.request import Request

__all__ = ["Journal"]

_MAX_DEATHS = 2
"""Deaths of a group that a request may have been part of before it is suspected."""


@dataclass(slots=True)
class _Entry:
    """One accepted request."""

    num_unfinished: int
    num_deaths: int = 0


class Journal:
    """The accepted requests that have not ended."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def accept(self, request: Request) -> None:
        """Note a request that was accepted."""
        self._entries[request.id] = _Entry(request.sampling.n)

    def note(self, event: TokenEvent) -> None:
        """Note that a sequence has ended, if it has."""
        if event.finish_reason is not None:
            self.end_sequence(event.request_id)

    def end_sequence(self, request_id: str) -> None:
        """Note the end of one sequence; a request ends with its last."""
        entry = self._entries.get(request_id)
        if entry is None:
            return
        entry.num_unfinished -= 1
        if entry.num_unfinished <= 0:
            del self._entries[request_id]

    def note_death(self, started_ids: Iterable[str]) -> list[str]:
        """Note that a group died under these requests; return those that have died too often.

        A request that ends its group each time would otherwise do so for ever.
        """
        for request_id in started_ids:
            self._entries[request_id].num_deaths += 1
        return [
            request_id
            for request_id, entry in self._entries.items()
            if entry.num_deaths > _MAX_DEATHS
        ]

    def clear(self) -> None:
        """Forget every request."""
        self._entries.clear()
