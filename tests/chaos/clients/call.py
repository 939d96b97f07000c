"""A call as a client makes it."""

from __future__ import annotations

from dataclasses import dataclass

from tests.chaos.clients.call_record import CallRecord
from tests.chaos.clients.requests import Spec

__all__ = ["Call"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What one call sends, and the record of what it receives."""

    name: str
    """The request id."""
    spec: Spec
    record: CallRecord
    key: str
    """The API key."""
    aborts_after: int | None = None
    """Parts of the stream after which the client ends the call; None if it does not."""

    @property
    def authorization(self) -> str:
        """The value of the header, or of the metadata, that holds the key."""
        return f"Bearer {self.key}"

    @property
    def is_to_end(self) -> bool:
        """Whether so many parts have arrived that the client ends the call."""
        return self.aborts_after is not None and self.record.num_events >= self.aborts_after

    @property
    def cancels(self) -> bool:
        """Whether the client then cancels its stream, and does not ask the server to abort it."""
        return self.aborts_after is not None and self.aborts_after % 2 == 1
