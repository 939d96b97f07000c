"""Attributes faults to sequences, and restricts which requests run after a fault.

The module does not know the plans in flight: the scheduler says when a repair can begin.
"""

import logging
from collections.abc import Callable
from types import TracebackType

from cluster.scheduling.sequence import ActiveRequest, Sequence
from cluster.scheduling.sequence_table import SequenceTable

__all__ = ["Blame", "BlamedError", "FaultRecovery"]

logger = logging.getLogger(__name__)


class BlamedError(Exception):
    """An exception of code that handled one sequence; `__cause__` is the original exception."""

    def __init__(self, sequence: Sequence) -> None:
        super().__init__(f"Request {sequence.request_id} met an internal error.")
        self.sequence = sequence


class Blame:
    """Context manager that turns exceptions of its block into the `BlamedError` of a sequence.

    Of nested blocks, the innermost block counts.
    """

    __slots__ = ("_sequence",)

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, BlamedError):
            raise BlamedError(self._sequence) from error


class FaultRecovery:
    """Bars requests that are suspected of a fault, and ends the requests that code failed with."""

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
        """Run only requests with ids that satisfy `may_run`, until the next call.

        Others lose their rows and blocks; their tokens in flight still arrive.
        """
        self._may_run = may_run
        for request_id, active in self._table.requests.items():
            if active.is_quarantined and may_run(request_id):
                self._table.readmit_request(active)
            elif not active.is_quarantined and not may_run(request_id):
                self._table.quarantine_request(active)

    def quarantine_new_request(self, active: ActiveRequest) -> None:
        """Bar a request, which is not in the table yet, if it may not run."""
        active.is_quarantined = self._may_run is not None and not self._may_run(active.request.id)

    def note_fault(self, sequence: Sequence, error: BaseException | None) -> None:
        """Note an exception that code raised while it handled a sequence."""
        request_id = sequence.request_id
        logger.error(
            "Request %s will end with an error after an internal error.", request_id, exc_info=error
        )
        self.faulty_ids.append(request_id)
        self.needs_repair = True

    def repair(self) -> list[Sequence]:
        """Let every sequence be recomputed; return the sequences of requests at fault, to be ended.

        No step may be in flight, on any rank.
        """
        # The exception may have left any state behind.
        self._table.reset_sequences()
        faulty, self.faulty_ids = self.faulty_ids, []
        self.needs_repair = False
        return [
            sequence for request_id in faulty for sequence in self._table.unfinished(request_id)
        ]
