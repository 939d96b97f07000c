"""Common part of the graphs of decodes and of steps with prompts.

Owns the captures and their stream; does not know the content of a capture.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from bisect import bisect_left
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakSet

import torch

from pagedray.rank_progress import Phase, ProgressWord
from workers.models.decoder import Decoder
from workers.models.draft_head import RankDrafter
from workers.runner.token_table import TokenTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from attention.abstract import AttentionMetadata
    from workers.runner.input_batch import StepInputs

__all__ = [
    "NO_ROW",
    "CaptureSetup",
    "Captures",
    "StepGraphs",
    "dropped_capture",
    "has_graphs",
]

logger = logging.getLogger(__name__)

NO_ROW = -1
"""The row of padding, which has no state."""

Capture = TypeVar("Capture")

CaptureT = TypeVar("CaptureT")

# Any: each kind has captures of its own.
_LIVING: WeakSet[StepGraphs[Any]] = WeakSet()


def has_graphs() -> bool:
    """Return whether this process has graphs of any engine."""
    return bool(_LIVING)


class StepGraphs(ABC, Generic[Capture]):
    """Captures by number of tokens; a step is padded to the next larger number.

    Drop it before closing the group: the graphs hold the group's collectives.
    """

    def __init__(self, setup: CaptureSetup, sizes: list[int]) -> None:
        """`sizes` are the numbers of tokens to capture, ascending."""
        _LIVING.add(self)
        self._progress = setup.progress
        self._model = setup.model
        self._reader = setup.reader
        self._kv_cache = setup.kv_cache
        self._states = setup.states
        self._pool = setup.pool
        self._sizes = sizes
        # Rows after the tokens of a step still hold tokens of earlier steps. They are padding, and
        # their results are not used.
        self._token_ids = setup.table.token_ids[: sizes[-1]]
        self._positions = setup.table.positions[: sizes[-1]]
        # A single stream for all captures, since cuBLAS keeps memory for each stream.
        self._stream = torch.cuda.Stream(setup.model.device)
        self._captures = Captures(
            sizes, self._captured_on_stream, progress=setup.progress, may_lack=setup.is_alone
        )

    @property
    def missing_sizes(self) -> list[int]:
        """The sizes that are still to be captured, ascending."""
        return self._captures.missing_sizes

    def capture_graphs(self, *, only_largest: bool = False) -> None:
        """Capture the missing sizes, or only the largest; later steps capture their sizes.

        All ranks of a group must do this at the same time. Raises the errors of the capture.
        """
        self._captures.capture_all(only_largest=only_largest)

    def capture_next(self) -> None:
        """Capture the smallest missing size; if that fails, some steps run without graphs."""
        self._captures.capture_next()

    @torch.inference_mode()
    def trace(self) -> None:
        """Capture all sizes, and drop the captures; nothing runs.

        All ranks of a group must do this at the same time.
        """
        for size in reversed(self._sizes):
            self._progress.enter(Phase.CAPTURING, size)
            self._trace(size)

    def can_replay(self, inputs: StepInputs) -> bool:
        """Return whether graphs can run a step; capture the missing graphs of the step."""
        return self._fits(inputs) and all(
            self._captures.find(num_tokens) is not None for num_tokens in self._sizes_of(inputs)
        )

    @abstractmethod
    def replay(self, inputs: StepInputs, metadata: AttentionMetadata) -> torch.Tensor:
        """Return the normed hidden states, `[num_sampled, hidden_size]`.

        Call it only if `can_replay`. The next replay may overwrite them.
        """

    @abstractmethod
    def _fits(self, inputs: StepInputs) -> bool:
        """Return whether the step is of a kind and size that is captured."""

    @abstractmethod
    def _sizes_of(self, inputs: StepInputs) -> tuple[int, ...]:
        """Return the numbers of tokens of the captures that the step replays."""

    @abstractmethod
    def _capture(self, size: int) -> Capture:
        """Capture the model for a number of tokens, on the stream and in the pool of captures."""

    @abstractmethod
    def _trace(self, size: int) -> None:
        """Capture the model for a number of tokens without running it before; drop the capture."""

    def _capture_for(self, num_tokens: int) -> tuple[int, Capture]:
        """Return the padded number of tokens, and its capture."""
        found = self._captures.find(num_tokens)
        assert found is not None
        return found

    def _run_first(self, run: Callable[[], object]) -> None:
        """Run the model before the first capture.

        Libraries allocate memory at their first call, outside the captures' memory.
        """
        if self._captures.are_any:
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
        # Free the memory that torch keeps for this stream, on which no step runs.
        torch.cuda.empty_cache()

    @torch.inference_mode()
    def _captured_on_stream(self, size: int) -> Capture:
        # If a capture fails, torch may leave its stream as the current stream.
        with torch.cuda.stream(torch.cuda.current_stream()):
            return self._capture(size)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CaptureSetup:
    """The model to capture, its inputs and outputs, and the group that must capture together."""

    model: Decoder
    kv_cache: torch.Tensor
    """The pool of blocks on the device, as the attention backend lays it out."""
    table: TokenTable
    """Where steps begin: their tokens and positions."""
    pool: Any  # Any: torch does not export the type
    """The memory of all graphs."""
    progress: ProgressWord
    is_alone: bool
    """Whether no other rank runs the same steps."""
    states: tuple[tuple[torch.Tensor, ...], ...] = ()
    """The states of all rows, by recurrent layer."""
    num_spare_states: int = 0
    """The number of the last states, which steps with prompts save."""
    reader: RankDrafter | None = None
    """A draft model that reads the tokens of steps, or None."""


@contextmanager
def dropped_capture(stream: torch.cuda.Stream) -> Iterator[None]:
    """Capture the launches on a stream, and drop the capture: nothing runs.

    The capture has its own memory pool, since a pool is freed with the only capture that uses it.
    """
    # The graph would otherwise be instantiated.
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    # Libraries may run here for the first time, and allocate their memory.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
        yield


class Captures(Generic[CaptureT]):
    """A capture for each of several sizes, made before the first step or later."""

    def __init__(
        self,
        sizes: list[int],
        capture: Callable[[int], CaptureT],
        *,
        progress: ProgressWord,
        may_lack: bool,
    ) -> None:
        """`sizes` are ascending. `may_lack` is true if later steps may run without a capture.

        Several ranks may not: their collectives would have other sizes on a rank without a capture.
        """
        self._sizes = sizes
        self._capture = capture
        self._progress = progress
        self._may_lack = may_lack
        self._made: dict[int, CaptureT] = {}
        self._has_failed = False

    @property
    def are_any(self) -> bool:
        """Whether any size is captured."""
        return bool(self._made)

    @property
    def missing_sizes(self) -> list[int]:
        """The sizes that are still to be captured, ascending."""
        return [] if self._has_failed else self._uncaptured()

    def capture_all(self, *, only_largest: bool) -> None:
        """Capture the missing sizes, or only the largest.

        Raises the errors of the capture.
        """
        # The largest first, since smaller captures reuse its memory pool.
        for size in self._sizes[-1:] if only_largest else reversed(self._sizes):
            if size not in self._made:
                self._add(size)

    def capture_next(self) -> None:
        """Capture the smallest missing size; a failure is handled as in `find`."""
        self._add_or_fail(self.missing_sizes[0])

    def find(self, num_tokens: int) -> tuple[int, CaptureT] | None:
        """Return the least size that fits and its capture, or None if the step has no capture.

        A missing capture is made. If that fails, no other capture is made either: mostly, memory is
        short.
        """
        size = self._sizes[bisect_left(self._sizes, num_tokens)]
        if size not in self._made and not self._has_failed:
            # Every rank has the same plans, so that all capture at the same step.
            self._add_or_fail(size)
        capture = self._made.get(size)
        return None if capture is None else (size, capture)

    def _uncaptured(self) -> list[int]:
        return [size for size in self._sizes if size not in self._made]

    def _add(self, size: int) -> None:
        self._progress.enter(Phase.CAPTURING, size)
        self._made[size] = self._capture(size)

    def _add_or_fail(self, size: int) -> None:
        if not self._may_lack:
            self._add(size)
            return
        try:
            self._add(size)
        # A compiler raises other errors than CUDA does. If the device has failed, the next step
        # raises too.
        except Exception as error:
            self._has_failed = True
            num_lacking = len(self._uncaptured())
            logger.warning(
                "Could not capture the CUDA graph of size %s; steps of %s sizes run without graphs "
                "and are slower: %s",
                size,
                num_lacking,
                next(iter(str(error).splitlines()), type(error).__name__),
            )
            self._progress.add_uncaptured(num_lacking)
