"""All-reduces of rows between the GPUs of one node, by our own kernel instead of NCCL's."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pagedray.rank_progress import Phase, ProgressWord
from workers.parallel.peer_memory import PeerMemory, PeerMemoryError, RowShape
from workers.parallel.pending_sum import PendingSum

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import Store

    from attention.kernels.triton.received_rows import ReceivedRows

__all__ = ["MAX_BYTES", "MAX_BYTES_OF_TWO", "OneShotAllReduce", "PeerSums", "most_rows"]

logger = logging.getLogger(__name__)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MAX_BYTES_OF_TWO = 64 * 2**20
"""Maximum bytes that each of two ranks sends in one launch; inboxes take twice this memory."""
MAX_BYTES = 2 * 2**20
"""Maximum bytes that each of more ranks sends; beyond it, a ring of NCCL sends fewer."""
_MAX_ROWS = 8192
_TRIAL_TIMEOUT_S = 30.0
_POLL_S = 1e-3

_MAX_PENDING_BYTES = 64 * 2**20
"""Maximum bytes of one sum."""
_MAX_PENDING_ROWS = 4096
_NUM_SLOTS = 4
"""Places for sums, used in turn. Four suffice: a rank sends sum n + 4 after it has finished sum
n + 2, which the other rank had sent after it had finished sum n."""
_FLAG_BYTES = 16


class OneShotAllReduce:
    """Sums rows over the ranks of a node, from the view of one of them.

    Every rank calls the same methods in the same order, as with the collectives of a group.
    """

    def __init__(
        self,
        shape: RowShape,
        rank: int,
        size: int,
        *,
        max_begun_rows: int,
        device: torch.device,
        progress: ProgressWord,
    ) -> None:
        """Allocate memory for other ranks to write to. Raises PeerMemoryError.

        `max_begun_rows` is that of the group.
        """
        from attention.kernels.triton.one_shot_all_reduce import (
            PROGRAMS_PER_SM,
            Inboxes,
            inbox_bytes,
        )

        max_rows = most_rows(shape, size)
        inbox_size = inbox_bytes(max_rows, shape.width, shape.dtype, size)
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._size = size
        self._progress = progress
        sums_size = 0
        if size == 2 and max_begun_rows > 0:
            sums_size = PeerSums.num_bytes(shape, max_begun_rows)
        self._memory = PeerMemory(inbox_size + sums_size)
        self._abort = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._inboxes = Inboxes(
            addresses=torch.zeros(size + 2, dtype=torch.int64, device=device),
            num_launches=torch.zeros(max_rows, dtype=torch.int32, device=device),
            rank=rank,
            size=size,
            max_programs=num_sms * PROGRAMS_PER_SM,
            width=shape.width,
            dtype=shape.dtype,
        )
        self._sums = None
        if sums_size:
            self._sums = PeerSums(
                self._memory,
                inbox_size,
                shape,
                max_begun_rows,
                device=device,
                progress=progress,
                abort=self._inboxes.addresses[size : size + 1],
            )

    @staticmethod
    def can_sum(shape: RowShape, size: int) -> bool:
        """Return whether rows of this shape can be summed over `size` ranks."""
        return shape.row_bytes % 4 == 0 and most_rows(shape, size) > 0

    def connect(self, store: Store, agree: Callable[[bool], bool]) -> bool:
        """Find the other ranks through a store that is new; return whether all ranks can.

        `agree` returns whether it is called with True on all ranks.
        """
        from attention.kernels.triton.one_shot_all_reduce import EMPTY_BYTE

        inboxes = self._inboxes
        self._abort.zero_()
        inboxes.num_launches.zero_()
        # No kernel of an earlier epoch writes to it, since every rank ended its own before joining.
        self._memory.fill(EMPTY_BYTE)
        reason = self._open_peers(store)
        if not agree(reason is None):
            return self._disconnected(reason)
        reason = self._try()
        if not agree(reason is None):
            return self._disconnected(reason)
        return True

    def takes(self, tensor: torch.Tensor) -> bool:
        """Return whether this sums `[num_rows, size]`; if not, NCCL must."""
        inboxes = self._inboxes
        return (
            tensor.ndim == 2
            and 0 < len(tensor) <= inboxes.max_rows
            and tensor.shape[1] == inboxes.width
            and tensor.dtype == inboxes.dtype
            and tensor.stride(1) == 1
        )

    def begin_sum(self, rows: torch.Tensor) -> PendingSum | None:
        """Begin to sum `[num_rows, width]` over two ranks; None if another group must sum.

        Implements `ParallelGroup.begin_all_reduce`.
        """
        if self._sums is None or not self._sums.takes(rows):
            return None
        return self._sums.begin(rows)

    def reduce_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Sum `[num_rows, width]` over the ranks, in place, and return it."""
        from attention.kernels.triton.one_shot_all_reduce import all_reduce_rows

        self._progress.begin_collective(Phase.ALL_REDUCE)
        all_reduce_rows(rows, self._inboxes)
        self._progress.end_collective()
        return rows

    def add_norm(
        self,
        stream: torch.Tensor,
        delta: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
        *,
        is_centered: bool,
    ) -> torch.Tensor:
        """Add the sum of `delta` over the ranks to the stream, in place; return the stream's norm.

        All are `[num_rows, width]`. The norm is that of `FusedNorm`.
        """
        from attention.kernels.triton.one_shot_all_reduce import all_reduce_add_norm

        self._progress.begin_collective(Phase.ALL_REDUCE)
        normed = all_reduce_add_norm(
            stream, delta, weight, bias, eps, is_centered=is_centered, inboxes=self._inboxes
        )
        self._progress.end_collective()
        return normed

    def abort(self) -> None:
        """End the kernels that wait for ranks that are gone. May be called on any thread."""
        self._abort.fill_(1)

    def disconnect(self) -> None:
        """Forget the other ranks. No kernel of this rank may be running."""
        self._memory.close_peers()

    def close(self) -> None:
        """Free the memory. No kernel of any rank may be running."""
        self._memory.close()

    def _open_peers(self, store: Store) -> str | None:
        """Open the other ranks' memory; return why that is impossible, or None."""
        inboxes = self._inboxes
        boot_id = _BOOT_ID.read_text().strip()
        try:
            handle = self._memory.handle()
        except PeerMemoryError as error:
            return self._cannot_share(store, str(error))
        store.set(_key(inboxes.rank), f"{boot_id} {handle.hex()} {inboxes.max_programs}")
        handles: list[bytes | None] = []
        max_programs = inboxes.max_programs
        for rank in range(self._size):
            node, *rest = bytes(store.get(_key(rank))).decode().split()
            if node != boot_id:
                return f"rank {rank} cannot share memory with rank {inboxes.rank}"
            handles.append(bytes.fromhex(rest[0]) if rank != inboxes.rank else None)
            max_programs = min(max_programs, int(rest[1]))
        try:
            addresses = self._memory.open_peers(handles)
        except PeerMemoryError as error:
            return str(error)
        self._inboxes = replace(inboxes, max_programs=max_programs)
        inboxes.addresses.copy_(torch.tensor([*addresses, self._abort.data_ptr(), 0]))
        if self._sums is not None:
            self._sums.connect(addresses[1 - inboxes.rank])
        return None

    def _cannot_share(self, store: Store, reason: str) -> str:
        # The other ranks wait for this one's handle.
        store.set(_key(self._inboxes.rank), "-")
        return reason

    def _try(self) -> str | None:
        """Sum a row over the ranks; return why its result is wrong, or None."""
        inboxes = self._inboxes
        shape, device = (1, inboxes.width), inboxes.addresses.device
        row = torch.full(shape, inboxes.rank + 1.0, dtype=inboxes.dtype, device=device)
        try:
            sums = [self.reduce_rows(row.clone())]
            pending = self.begin_sum(row)
            if pending is not None:
                sums.append(pending.finish())
        except PeerMemoryError as error:
            return str(error)
        # Compilers raise errors of many types. If the device has failed, NCCL raises, too.
        except Exception as error:
            first_line = next(iter(str(error).splitlines()), type(error).__name__)
            return f"a kernel of theirs does not compile: {first_line}"
        done = torch.cuda.Event()
        done.record()
        deadline_s = time.monotonic() + _TRIAL_TIMEOUT_S
        while not done.query():
            if time.monotonic() > deadline_s:
                self.abort()
                return f"nothing arrived within {_TRIAL_TIMEOUT_S:g} s"
            time.sleep(_POLL_S)
        total = self._size * (self._size + 1) / 2
        if not all(bool((one == total).all()) for one in sums):
            return "a test sum was wrong"
        return None

    def _disconnected(self, reason: str | None) -> bool:
        torch.cuda.synchronize(self._inboxes.addresses.device)
        self.disconnect()
        if reason is not None:
            logger.warning("Small all-reduces use NCCL: %s.", reason)
        return False


def most_rows(shape: RowShape, size: int) -> int:
    """Return the most rows that one launch sums over `size` ranks."""
    max_bytes = MAX_BYTES_OF_TWO if size == 2 else MAX_BYTES
    return min(_MAX_ROWS, max_bytes // (shape.row_bytes * (size - 1)))


def _key(rank: int) -> str:
    return f"inbox{rank}"


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
        max_rows = _max_pending_rows(shape, max_begun_rows)
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
        return _NUM_SLOTS * (
            _FLAG_BYTES + _max_pending_rows(shape, max_begun_rows) * shape.row_bytes
        )

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
        from attention.kernels.triton.received_rows import add_received

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
        from attention.kernels.triton.received_rows import add_received_norm

        return add_received_norm(
            stream, self._rows, self._received(), weight, bias, eps, is_centered=is_centered
        )

    def _received(self) -> ReceivedRows:
        from attention.kernels.triton.received_rows import ReceivedRows

        slot = self._slot
        # The rows may be overwritten, or freed and used again, once the sum is finished.
        torch.cuda.current_stream(self._device_index).wait_event(slot.copied)
        return ReceivedRows(rows=slot.rows, flag=slot.flag, number=slot.number, abort=self._abort)


def _max_pending_rows(shape: RowShape, max_begun_rows: int) -> int:
    return min(max_begun_rows, _MAX_PENDING_ROWS, _MAX_PENDING_BYTES // shape.row_bytes)
