"""All-reduces of many rows over two GPUs of one node, which overlap with computation.

A copy engine writes a rank's rows and then a flag into the memory of the other rank, which keeps no
multiprocessor busy. A kernel on the stream of the step adds the rows that have arrived.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pagedray.rank_progress import Phase
from workers.parallel.pending_sum import PendingSum

if TYPE_CHECKING:
    from attention.kernels.triton.sums.received_rows import ReceivedRows
    from pagedray.rank_progress import ProgressWord
    from workers.parallel.peer_memory import PeerMemory
    from workers.parallel.row_shape import RowShape

__all__ = ["PeerSums"]

_MAX_BYTES = 64 * 2**20
"""Maximum bytes of one sum."""
_MAX_ROWS = 4096
_NUM_SLOTS = 4
"""Places for sums, used in turn. Four suffice: a rank sends sum n + 4 after it has finished sum
n + 2, which the other rank had sent after it had finished sum n."""
_FLAG_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Slot:
    """A place for the rows of a sum, with the events before and after its copy."""

    rows: torch.Tensor
    """`[max_rows, width]`, which the other rank writes."""
    rows_byte: int
    """Where the rows of each rank are, from the first byte of all slots on."""
    flag: torch.Tensor
    flag_byte: int
    number: torch.Tensor
    """int32 `[1]`, how many sums were finished here."""
    ready: torch.cuda.Event
    copied: torch.cuda.Event


class PeerSums:
    """Sums rows over two ranks, from the view of one of them."""

    def __init__(
        self,
        memory: PeerMemory,
        first_byte: int,
        shape: RowShape,
        max_begun_rows: int,
        *,
        device: torch.device,
        progress: ProgressWord,
        abort: torch.Tensor,
    ) -> None:
        """Use `num_bytes` of the memory; its flags are -1 when ranks connect.

        `max_begun_rows` is a limit of the group, `abort` belongs to `ReceivedRows`.
        """
        max_rows = _max_rows(shape, max_begun_rows)
        self._memory = memory
        self._first_byte = first_byte
        self._shape = shape
        self._max_rows = max_rows
        self._progress = progress
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._device_index = self._stream.device_index
        # An int32 each, with the same distance as between flags.
        self._numbers = torch.zeros(_NUM_SLOTS, _FLAG_BYTES // 4, dtype=torch.int32, device=device)
        self._abort = abort
        self._slots: list[_Slot] = []
        for index in range(_NUM_SLOTS):
            flag_byte = index * _FLAG_BYTES
            rows_byte = _NUM_SLOTS * _FLAG_BYTES + index * max_rows * shape.row_bytes
            self._slots.append(
                _Slot(
                    rows=memory.view(first_byte + rows_byte, (max_rows, shape.width), shape.dtype),
                    rows_byte=rows_byte,
                    flag=memory.view(first_byte + flag_byte, (1,), torch.int32),
                    flag_byte=flag_byte,
                    number=self._numbers[index, :1],
                    ready=torch.cuda.Event(),
                    copied=torch.cuda.Event(),
                )
            )
        self._peer_address = 0
        self._num_begun = 0

    @staticmethod
    def num_bytes(shape: RowShape, max_begun_rows: int) -> int:
        """Return the size of the memory that sums of up to this many rows need."""
        return _NUM_SLOTS * (_FLAG_BYTES + _max_rows(shape, max_begun_rows) * shape.row_bytes)

    def connect(self, peer_address: int) -> None:
        """Send to the other rank, with memory at `peer_address`, from the first sum on."""
        self._peer_address = peer_address + self._first_byte
        self._num_begun = 0
        self._numbers.zero_()

    def takes(self, rows: torch.Tensor) -> bool:
        """Return whether this sums `[num_rows, width]`."""
        return (
            0 < len(rows) <= self._max_rows
            and rows.shape[1] == self._shape.width
            and rows.dtype == self._shape.dtype
            and rows.is_contiguous()
        )

    def begin(self, rows: torch.Tensor) -> PendingSum:
        """Begin to sum rows that `takes` accepts, once the current stream has computed them."""
        self._progress.begin_collective(Phase.ALL_REDUCE)
        slot = self._slots[self._num_begun % _NUM_SLOTS]
        self._num_begun += 1
        slot.ready.record(torch.cuda.current_stream(self._device_index))
        self._stream.wait_event(slot.ready)
        copy, peer, number = self._memory.copy, self._peer_address, slot.number
        copy(peer + slot.rows_byte, rows.data_ptr(), rows.nbytes, self._stream)
        copy(peer + slot.flag_byte, number.data_ptr(), number.nbytes, self._stream)
        slot.copied.record(self._stream)
        self._progress.end_collective()
        return _PeerSum(rows, slot, self._abort, self._device_index)


class _PeerSum(PendingSum):
    """A sum with rows from the other rank, sent or still to come."""

    def __init__(
        self, rows: torch.Tensor, slot: _Slot, abort: torch.Tensor, device_index: int
    ) -> None:
        self._rows = rows
        self._slot = slot
        self._abort = abort
        self._device_index = device_index

    def finish(self) -> torch.Tensor:
        from attention.kernels.triton.sums.received_rows import add_received

        add_received(self._rows, self._received())
        return self._rows

    def add_norm(
        self,
        stream: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
        *,
        is_centered: bool,
    ) -> torch.Tensor:
        from attention.kernels.triton.sums.received_rows import add_received_norm

        return add_received_norm(
            stream, self._rows, self._received(), weight, bias, eps, is_centered=is_centered
        )

    def _received(self) -> ReceivedRows:
        from attention.kernels.triton.sums.received_rows import ReceivedRows

        slot = self._slot
        # The rows may be overwritten, or freed and used again, once the sum is finished.
        torch.cuda.current_stream(self._device_index).wait_event(slot.copied)
        return ReceivedRows(rows=slot.rows, flag=slot.flag, number=slot.number, abort=self._abort)


def _max_rows(shape: RowShape, max_begun_rows: int) -> int:
    return min(max_begun_rows, _MAX_ROWS, _MAX_BYTES // shape.row_bytes)
