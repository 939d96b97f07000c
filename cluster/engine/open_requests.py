"""The requests that a replica has accepted and not yet ended, and the deaths each was part of.

They live in the controller's process, outside every rank, and are served again after the death of
a group. The tokens of each are in the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cluster.scheduling.event import TokenEvent
    from pagedray.request import Request

__all__ = ["OpenRequests"]

_MAX_DEATHS = 2
"""Deaths of a group that a request may have been part of before it is suspected."""


@dataclass(slots=True)
class _Entry:
    """One accepted request."""

    num_unfinished: int
    num_deaths: int = 0


class OpenRequests:
    """Counts the unfinished sequences and the deaths of each open request."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add_request(self, request: Request) -> None:
        self._entries[request.id] = _Entry(len(request.open_indices))

    def note_event(self, event: TokenEvent) -> None:
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
        """Count a death for each request that had started; return those with too many.

        A request that kills its group each time would otherwise do so forever.
        """
        for request_id in started_ids:
            self._entries[request_id].num_deaths += 1
        return [
            request_id
            for request_id, entry in self._entries.items()
            if entry.num_deaths > _MAX_DEATHS
        ]

    def clear(self) -> None:
        self._entries.clear()
