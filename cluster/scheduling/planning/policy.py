"""The choice of the sequence that loses its row or blocks.

Sequences are ordered by priority, arrival and index. One that needs a block takes those of a
sequence behind it: the last one of the most served tenant. A sequence that was preempted
`MAX_PREEMPTIONS` times is protected: it is only chosen if all others behind are protected too.
"""

from cluster.scheduling.sequence import Sequence
from cluster.scheduling.sequence_queue import SequenceQueue

__all__ = ["MAX_PREEMPTIONS", "choose_displaced", "choose_victim"]

MAX_PREEMPTIONS = 3
"""Preemptions after which a sequence is protected."""


def choose_victim(running: SequenceQueue, needy: Sequence) -> Sequence | None:
    """Return the sequence to preempt for `needy`, or None if there is none behind it."""
    victim: Sequence | None = None
    last_protected: Sequence | None = None
    for sequence in reversed(running):
        if sequence is needy:
            break
        if sequence.is_ending:
            continue
        if sequence.num_preemptions >= MAX_PREEMPTIONS:
            last_protected = last_protected or sequence
        elif victim is None or sequence.share.time > victim.share.time:
            victim = sequence
    return victim or last_protected


def choose_displaced(running: SequenceQueue, head: Sequence, *, num_own: int) -> Sequence | None:
    """Return the sequence whose row a waiting one may take, or None.

    It is one of its own tenant with lower priority that is not protected, or the last one of the
    most served tenant that has at least two rows more than the `num_own` of the waiting one's
    tenant. Hence the first sequence of a tenant keeps its row.
    """
    share, victim = head.share, None
    for sequence in reversed(running):
        if sequence.is_ending:
            continue
        if sequence.share is share:
            if sequence.priority > head.priority and sequence.num_preemptions < MAX_PREEMPTIONS:
                return sequence
        elif (
            sequence.share.num_rows >= num_own + 2
            and sequence.share.time > share.time
            and (victim is None or sequence.share.time > victim.share.time)
        ):
            victim = sequence
    return victim
