"""Lets sequences pass one that finds no room, and gives it back what they took.

A sequence that finds too few free blocks does not stop those behind it: they start in the room that
it cannot use. Of these, the ones that arrived after it borrow. Once the borrowers hold what it
lacks, it is due: no other sequence passes, and `GRACE_STEPS` later it takes the room from them.
Hence it waits for the sequences that ran when it found too few blocks and for those that arrived
before it, as if none had passed, and for a bounded number of steps more.
"""

from cluster.scheduling.sequence import Sequence, SequenceState
from cluster.scheduling.sequence_queue import SequenceQueue

__all__ = ["GRACE_STEPS", "MAX_PASSED", "Passing"]

MAX_PASSED = 4
"""Sequences that may be passed in one step, which bounds the time to find one that has room."""
GRACE_STEPS = 16
"""Steps for which borrowers may continue, since many end by themselves."""


class Passing:
    """The sequence that has lacked room for the longest time, and those that borrow its room."""

    __slots__ = ("_due_step", "_num_starts", "_running", "claimant")

    def __init__(self, running: SequenceQueue) -> None:
        self._running = running
        self._num_starts = 0
        self._due_step = -1
        self.claimant: Sequence | None = None
        """The sequence that has lacked room for the longest time."""

    @property
    def is_due(self) -> bool:
        """Whether no sequence may pass the claimant."""
        return self._due_step >= 0

    def note_shortage(self, sequence: Sequence) -> None:
        """Note that a sequence found too few free blocks."""
        if sequence.shortage_number < 0:
            sequence.shortage_number = self._num_starts
        if self.claimant is None:
            self.claimant = sequence

    def note_start(self, sequence: Sequence) -> None:
        """Note that a sequence got a row and blocks."""
        self._num_starts += 1
        sequence.start_number = self._num_starts
        sequence.shortage_number = -1
        if sequence is self.claimant:
            self.clear()

    def find_claimant(self) -> Sequence | None:
        """Return the claimant, which is forgotten if it has ended or may not run."""
        claimant = self.claimant
        if claimant is None or claimant.state in (SequenceState.WAITING, SequenceState.SWAPPED):
            return claimant
        self.clear()
        return None

    def borrowers(self, claimant: Sequence) -> list[Sequence]:
        """Return the running sequences that passed the claimant, those to preempt first first."""
        return [
            sequence
            for sequence in reversed(self._running)
            if sequence.start_number > claimant.shortage_number
            and sequence.order > claimant.order
            and not sequence.is_ending
        ]

    def note_due(self, step: int, *, is_due: bool) -> bool:
        """Note whether borrowers hold what the claimant lacks; return whether it may take that."""
        if not is_due:
            self._due_step = -1
        elif self._due_step < 0:
            self._due_step = step
        return is_due and step - self._due_step >= GRACE_STEPS

    def clear(self) -> None:
        """Forget the claimant."""
        self.claimant = None
        self._due_step = -1
