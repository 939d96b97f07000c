"""All-reduces of rows between the GPUs of one node, by our own kernel instead of NCCL's."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pagedray.rank_progress import Phase
from workers.parallel.peer_memory import PeerMemory, PeerMemoryError
from workers.parallel.peer_sums import PeerSums

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import Store

    from pagedray.rank_progress import ProgressWord
    from workers.parallel.pending_sum import PendingSum
    from workers.parallel.row_shape import RowShape

__all__ = ["OneShotAllReduce"]

logger = logging.getLogger(__name__)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MAX_BYTES_OF_TWO = 64 * 2**20
"""Maximum bytes that each of two ranks sends in one launch; inboxes take twice this memory."""
_MAX_BYTES = 2 * 2**20
"""Maximum bytes that each of more ranks sends; beyond it, a ring of NCCL sends fewer."""
_MAX_ROWS = 8192
_TRIAL_TIMEOUT_S = 30.0
_POLL_S = 1e-3


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
        from attention.kernels.triton.sums.one_shot_all_reduce import (
            PROGRAMS_PER_SM,
            Inboxes,
            inbox_bytes,
        )

        max_rows = _max_rows(shape, size)
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
        return shape.row_bytes % 4 == 0 and _max_rows(shape, size) > 0

    def connect(self, store: Store, agree: Callable[[bool], bool]) -> bool:
        """Find the other ranks through a store that is new; return whether all ranks can.

        `agree` returns whether it is called with True on all ranks.
        """
        from attention.kernels.triton.sums.one_shot_all_reduce import EMPTY_BYTE

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
        from attention.kernels.triton.sums.one_shot_all_reduce import all_reduce_rows

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

        All are `[num_rows, width]`. The norm is that of `ResidualNorm`.
        """
        from attention.kernels.triton.sums.one_shot_all_reduce import all_reduce_add_norm

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


def _max_rows(shape: RowShape, size: int) -> int:
    """Return the most rows that one launch sums over `size` ranks."""
    max_bytes = _MAX_BYTES_OF_TWO if size == 2 else _MAX_BYTES
    return min(_MAX_ROWS, max_bytes // (shape.row_bytes * (size - 1)))


def _key(rank: int) -> str:
    return f"inbox{rank}"
