"""Common part of the graphs of decodes and of steps with prompts.

Owns the captures and their stream; does not know the content of a capture.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from pagedray.rank_progress import Phase
from workers.runner.graphs.captures import Captures

if TYPE_CHECKING:
    from collections.abc import Callable

    from attention.abstract import AttentionMetadata
    from workers.runner.graphs.capture_setup import CaptureSetup
    from workers.runner.input_batch import StepInputs

__all__ = ["StepGraphs"]

Capture = TypeVar("Capture")


class StepGraphs(ABC, Generic[Capture]):
    """Captures by number of tokens; a step is padded to the next larger number.

    Drop it before closing the group: the graphs hold the group's collectives.
    """

    def __init__(self, setup: CaptureSetup, sizes: list[int]) -> None:
        """`sizes` are the numbers of tokens to capture, ascending."""
        self._progress = setup.progress
        self._model = setup.model
        self._kv_cache = setup.kv_cache
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
