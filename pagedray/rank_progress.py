"""The progress of a rank: a word in shared memory that it writes and its controller reads.

A rank stores a word whenever it enters a layer, a collective or another phase. The controller never
waits for it, and reads it even if the rank's process is stopped. A board belongs to one epoch, so
that a process that outlives its epoch writes to memory that is no longer read.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from pagedray.machine import start_ticks
from pagedray.node_memory import MemoryAddress, NodeMemory, open_memory

if TYPE_CHECKING:
    from collections.abc import Sequence


__all__ = [
    "MAX_INDEX",
    "LoadProgress",
    "Phase",
    "PoolReport",
    "ProgressBoard",
    "ProgressWord",
    "RankReport",
]

_CELL_BYTES = 8
_NUM_CELLS = 16
"""Cells of a rank: two cache lines, which no other rank writes."""
_WORD, _NUM_BEATS, _NUM_FINISHED, _IS_COMPILING, _PID, _START_TICKS = range(6)
_COPYING, _NUM_UNPINNED, _NUM_UNCAPTURED = 6, 7, 8
_NUM_COUNTS = 1 << 40
"""A word has a count of the words before it."""
_NO_INDEX = 0xFFFF
MAX_INDEX = _NO_INDEX - 1
"""The largest index that a word holds."""


class Phase(IntEnum):
    """The activity of a rank."""

    STARTING = 0
    JOINING = 1
    LOADING = 2
    PROFILING = 3
    CAPTURING = 4
    WARMING_UP = 5
    IDLE = 6
    PREPARING = 7
    LAYER = 8
    ALL_REDUCE = 9
    ALL_GATHER = 10
    GRAPH = 11
    LOGITS = 12
    SAMPLING = 13
    DEVICE = 14
    MASKS = 15
    SENDING = 16
    STARTED = 17
    DOWNLOADING = 18

    @property
    def is_blameless(self) -> bool:
        """Whether the rank waits for a party with limits of its own, such as its controller."""
        return self in (Phase.MASKS, Phase.STARTED, Phase.DOWNLOADING)

    @property
    def is_collective(self) -> bool:
        """Whether the rank waits for the other ranks."""
        return self in (Phase.JOINING, Phase.ALL_REDUCE, Phase.ALL_GATHER)


_TEXTS = {
    Phase.STARTING: "starting its process",
    Phase.JOINING: "joining its group",
    Phase.LOADING: "loading weights ({} tensors loaded)",
    Phase.PROFILING: "measuring the memory that steps need",
    Phase.CAPTURING: "capturing CUDA graphs of size {}",
    Phase.WARMING_UP: "compiling kernels",
    Phase.IDLE: "waiting for a plan",
    Phase.PREPARING: "preparing a step",
    Phase.LAYER: "layer {}",
    Phase.ALL_REDUCE: "the all-reduce of layer {}",
    Phase.ALL_GATHER: "an all-gather",
    Phase.GRAPH: "the CUDA graph of {} rows",
    Phase.LOGITS: "the output layer",
    Phase.SAMPLING: "sampling",
    Phase.DEVICE: "waiting for its device",
    Phase.MASKS: "waiting for masks",
    Phase.SENDING: "sending an output",
    Phase.STARTED: "waiting for the other ranks to start",
    Phase.DOWNLOADING: "downloading the model",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """The contents of a rank's cells."""

    word: int
    """Differs from the last 2**40 words of the rank."""
    num_beats: int
    """Heartbeats of its process; 0 before it has started."""
    num_finished: int
    """Steps of its epoch that it has finished."""
    is_compiling: bool
    """Whether it waits for a compiler in another process."""
    pid: int
    start_ticks: int = 0
    """When the process started, which distinguishes it from a later process with the same id."""
    num_unpinned: int = 0
    """Blocks of its CPU pool that cannot be pinned."""
    num_uncaptured: int = 0
    """Numbers of tokens of steps that have no CUDA graph since the capture failed."""
    copying: int = 0
    """The oldest step of which only block copies still run, plus 1; 0 if there is none."""

    @property
    def phase(self) -> Phase:
        """The phase that the rank is in."""
        return Phase(self.word & 0xFF)

    @property
    def place(self) -> str:
        """A description of the rank's phase, for log messages."""
        index = self.word >> 8 & 0xFFFF
        if index == _NO_INDEX and self.phase is Phase.ALL_REDUCE:
            return "an all-reduce outside the layers"
        copies = f", the block copies of step {self.copying - 1} under way" if self.copying else ""
        return _TEXTS[self.phase].format(index) + copies

    @classmethod
    def from_cells(cls, cells: Sequence[int]) -> RankReport:
        """Return the report of a rank's cells."""
        return cls(
            word=cells[_WORD],
            num_beats=cells[_NUM_BEATS],
            num_finished=cells[_NUM_FINISHED],
            is_compiling=bool(cells[_IS_COMPILING]),
            pid=cells[_PID],
            start_ticks=cells[_START_TICKS],
            num_unpinned=cells[_NUM_UNPINNED],
            num_uncaptured=cells[_NUM_UNCAPTURED],
            copying=cells[_COPYING],
        )


class ProgressWord:
    """Writes the cells of a rank: one thread writes the word, another thread the heartbeat."""

    def __init__(self) -> None:
        """Until `attach` is called, the cells are private to this process."""
        self._cells = _private_cells()
        self._count = 0
        """Words that were written, modulo `_NUM_COUNTS`."""
        self._num_unpinned = 0
        self._entered = 0
        """The phase and index that were entered last."""
        _write_process(self._cells)
        self.enter(Phase.STARTING)

    def attach(self, board: MemoryAddress, rank: int) -> None:
        """Write the cells of a rank on the board of a controller from now on.

        They are private if the controller is on another node, which then has to ask for them.
        """
        first = rank * _NUM_CELLS
        try:
            descriptor = open_memory(board)
            try:
                shared = memoryview(mmap.mmap(descriptor, 0)).cast("Q")
            finally:
                os.close(descriptor)
            cells = shared[first : first + _NUM_CELLS]
        except OSError:
            cells = _private_cells()
        _write_process(cells)
        self._cells = cells
        self.note_unpinned(self._num_unpinned)
        self.enter(Phase.STARTED)

    def enter(self, phase: Phase, index: int = _NO_INDEX) -> None:
        """Note that the rank enters a phase; `index` counts within the phase, such as layers."""
        self._entered = index << 8 | phase
        self._write(self._entered)

    def begin_collective(self, phase: Phase) -> None:
        """Note that the rank enters a collective, within the phase that it is in."""
        self._write(self._entered & 0xFFFF00 | phase)

    def end_collective(self) -> None:
        """Note that the rank continues with the phase before."""
        self._write(self._entered)

    def finish_step(self, step: int) -> None:
        """Note that the rank has finished a step."""
        self._cells[_NUM_FINISHED] = step + 1

    def await_copies(self, step: int | None) -> None:
        """Note the oldest ended step with block copies that have not ended."""
        self._cells[_COPYING] = 0 if step is None else step + 1

    def note_unpinned(self, num_blocks: int) -> None:
        """Note how many blocks of the CPU pool cannot be pinned, in this epoch and later epochs."""
        self._num_unpinned = num_blocks
        self._cells[_NUM_UNPINNED] = num_blocks

    def begin_captures(self) -> None:
        """Note that graphs are captured from the beginning."""
        self._cells[_NUM_UNCAPTURED] = 0

    def add_uncaptured(self, num_sizes: int) -> None:
        """Note sizes of steps without CUDA graphs after failed captures, in this epoch."""
        self._cells[_NUM_UNCAPTURED] += num_sizes

    def beat(self, *, is_compiling: bool) -> None:
        """Note that the process runs."""
        self._cells[_IS_COMPILING] = is_compiling
        self._cells[_NUM_BEATS] += 1

    def cells(self) -> tuple[int, ...]:
        """Return the cells, for `RankReport.from_cells`."""
        return tuple(self._cells)

    @property
    def word(self) -> int:
        return self._cells[_WORD]

    def _write(self, entered: int) -> None:
        # A rank that is fast may write all counts within a year.
        self._count = (self._count + 1) % _NUM_COUNTS
        self._cells[_WORD] = self._count << 24 | entered


class ProgressBoard:
    """The controller's side: shared memory with the cells of every rank, freed with its users."""

    def __init__(self, num_ranks: int) -> None:
        size = num_ranks * _NUM_CELLS * _CELL_BYTES
        self._memory = NodeMemory("progress")
        os.ftruncate(self._memory.descriptor, size)
        self._cells = memoryview(mmap.mmap(self._memory.descriptor, size)).cast("Q")
        self.address = self._memory.address
        """Where ranks on this node open the board."""

    def report(self, rank: int) -> RankReport:
        """Return the report of a rank; all zero if the rank writes to another board."""
        first = rank * _NUM_CELLS
        return RankReport.from_cells(self._cells[first : first + _NUM_CELLS])

    def close(self) -> None:
        """Release the descriptor; the memory is freed once no rank uses it."""
        self._memory.close()


def _write_process(cells: memoryview) -> None:
    # The process counts as started once its id is there.
    cells[_START_TICKS] = start_ticks(os.getpid())
    cells[_PID] = os.getpid()


def _private_cells() -> memoryview:
    return memoryview(bytearray(_NUM_CELLS * _CELL_BYTES)).cast("Q")


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """The activity of a rank before it runs, and how much of it is done."""

    what: str = "Loading weights"
    done: int = 0
    """Tensors that are loaded, or bytes that are downloaded."""
    total: int = 0
    """The number for the whole model; 0 while it is unknown."""
    is_download: bool = False

    @property
    def fraction(self) -> float:
        """The part that is done, 0 to 1; 0 while the total is unknown."""
        return self.done / self.total if self.total else 0.0


class PoolReport(NamedTuple):
    """The state of a rank's CPU pool when the rank was made ready for an epoch."""

    is_shared: bool = False
    """Whether it is in the memory of the controller."""
    is_kept: bool = False
    """Whether it has the contents of the epoch before."""
