"""What runs after a fault: only some requests, and none until the scheduler is repaired.

It does not know the plans in flight: the scheduler says when a repair can begin.
"""

import logging
import traceback
from collections.abc import Callable

from cluster.scheduling.sequence import ActiveRequest, Sequence
from cluster.scheduling.sequence_table import SequenceTable

__all__ = ["FaultRecovery"]

logger = logging.getLogger(__name__)


class FaultRecovery:
    """Bars requests that are suspected of a fault, and finds those with which code failed."""

    __slots__ = ("_may_run", "_table", "faulty_ids", "needs_repair")

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        self._may_run: Callable[[str], bool] | None = None
        """None if every request may run."""
        self.faulty_ids: list[str] = []
        """Requests with which a method of the scheduler failed, until the repair."""
        self.needs_repair = False
        """Whether a method of the scheduler failed; there are no plans before the repair."""

    def restrict(self, may_run: Callable[[str], bool]) -> None:
        """Run only the requests whose ids satisfy `may_run`, until the next call.

        Others lose their rows and blocks; their tokens in flight still arrive.
        """
        self._may_run = may_run
        for request_id, active in self._table.requests.items():
            if active.is_barred and may_run(request_id):
                self._table.readmit_request(active)
            elif not active.is_barred and not may_run(request_id):
                self._table.bar_request(active)

    def bar_new_request(self, active: ActiveRequest) -> None:
        """Bar a request, which is not in the table yet, if it may not run."""
        active.is_barred = self._may_run is not None and not self._may_run(active.request.id)

    def note_fault(self, error: Exception) -> None:
        """Note an exception of a method of the scheduler; raise it if it concerns no request."""
        request_id = _request_at_fault(error)
        if request_id is None:
            raise error
        logger.error(
            "Request %s will end with an error after an internal error.", request_id, exc_info=error
        )
        self.faulty_ids.append(request_id)
        self.needs_repair = True

    def repair(self) -> list[Sequence]:
        """Let every sequence be recomputed; return those of the requests at fault, to be ended.

        No step may be in flight, on any rank.
        """
        # The exception may have left any state behind.
        self._table.reset_sequences()
        faulty, self.faulty_ids = self.faulty_ids, []
        self.needs_repair = False
        return [
            sequence for request_id in faulty for sequence in self._table.unfinished(request_id)
        ]


def _request_at_fault(error: Exception) -> str | None:
    """Return the id of the request whose sequence the failed code handled, or None.

    It is the local variable `sequence` of the innermost function that has one. Passing it along
    would cost every step what only a defect needs.
    """
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        sequence = frame.f_locals.get("sequence")
        if isinstance(sequence, Sequence):
            return sequence.request_id
    return None
