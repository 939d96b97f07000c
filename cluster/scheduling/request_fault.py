"""Which request was handled when an exception was raised."""

import traceback

from cluster.scheduling.sequence import Sequence

__all__ = ["request_at_fault"]


def request_at_fault(error: Exception) -> str | None:
    """Return the id of the request whose sequence the failed code handled, or None.

    It is the local variable `sequence` of the innermost function that has one. Passing it along
    would cost every step what only a defect needs.
    """
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        sequence = frame.f_locals.get("sequence")
        if isinstance(sequence, Sequence):
            return sequence.request_id
    return None
