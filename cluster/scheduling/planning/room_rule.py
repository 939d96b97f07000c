"""How many blocks a sequence gets when it starts, and how many it must leave free."""

from cluster.scheduling.kv_manager import KvManager
from cluster.scheduling.sequence import Sequence
from cluster.scheduling.sequence_table import SequenceTable

__all__ = ["RoomRule"]

_SPARE_BLOCKS = 4
"""Blocks for each running sequence that those which pass another one leave free."""
_MAX_HEADROOM = 16
"""The most blocks that a preempted sequence gets for its next tokens when it starts again."""


class RoomRule:
    """Says what room a sequence needs to start."""

    __slots__ = ("_kv", "_table")

    def __init__(self, kv: KvManager, sequence_table: SequenceTable) -> None:
        self._kv = kv
        self._table = sequence_table

    def num_tokens_to_hold(self, sequence: Sequence) -> int:
        """Return the number of tokens that a sequence gets blocks for when it starts."""
        num_tokens = sequence.length
        if sequence.num_preemptions:
            # The more often it lost its blocks, the longer it runs before it needs another one.
            num_blocks = min(2**sequence.num_preemptions, _MAX_HEADROOM)
            num_tokens += num_blocks * self._kv.block_size
        # The last token is never computed.
        return max(min(num_tokens, sequence.max_length - 1), sequence.length)

    def num_spare_blocks(self, sequence: Sequence) -> int:
        """Return the blocks to leave free, so that a new sequence is not preempted at once."""
        num_rows = len(self._table.running) + len(self._table.arriving)
        is_passing = self._table.passing.claimant not in (None, sequence)
        return num_rows * (_SPARE_BLOCKS if is_passing else 1)

    def num_lacking(self, sequence: Sequence) -> int:
        """Return the blocks that a sequence lacks beyond those free or in transit."""
        return self._kv.num_lacking(
            sequence,
            num_tokens=self.num_tokens_to_hold(sequence),
            num_spare=self.num_spare_blocks(sequence),
        )
