"""What the graphs of decodes and those of steps with prompts have in common.

Owns the sizes and the captures; does not know what a capture holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from pagedray.rank_progress import Phase, ProgressWord

if TYPE_CHECKING:
    from collections.abc import Callable

    from attention.abstract import AttentionMetadata
    from workers.models.decoder import Decoder
    from workers.runner.input_batch import StepInputs
    from workers.runner.token_table import TokenTable

__all__ = ["StepGraphs"]

Capture = TypeVar("Capture")


class StepGraphs(ABC, Generic[Capture]):
    """A capture for each of several numbers of tokens; a step is padded to the next larger one.

    Drop it before closing the group: the graphs hold the group's collectives.
    """

    def __init__(
        self,
        model: Decoder,
        kv_cache: torch.Tensor,
        table: TokenTable,
        *,
        sizes: list[int],
        pool: Any,  # Any: torch does not export the type
        progress: ProgressWord,
    ) -> None:
        """`sizes` are the numbers of tokens to capture, ascending; `table` begins the steps."""
        self._progress = progress
        self._model = model
        self._kv_cache = kv_cache
        self._sizes = sizes
        self._pool = pool
        # What is left of earlier steps behind the tokens of a step is padding, whose results are
        # not used.
        self._token_ids = table.token_ids[: sizes[-1]]
        self._positions = table.positions[: sizes[-1]]
        # One for all captures, since cuBLAS keeps memory for each stream.
        self._stream = torch.cuda.Stream(model.device)
        self._captures: dict[int, Capture] = {}

    @property
    def missing_sizes(self) -> list[int]:
        """The sizes that are not captured, ascending."""
        return [size for size in self._sizes if size not in self._captures]

    def capture_graphs(self, *, only_largest: bool = False) -> None:
        """Capture the missing sizes, or only the largest; a replay captures the one that it needs.

        All ranks of a group must do this at the same time.
        """
        # The largest first, since the smaller ones reuse its memory pool.
        for size in self._sizes[-1:] if only_largest else reversed(self._sizes):
            if size not in self._captures:
                self._add_capture(size)

    def capture_next(self) -> None:
        """Capture the smallest missing size."""
        self._add_capture(self.missing_sizes[0])

    @torch.inference_mode()
    def trace(self) -> None:
        """Capture all sizes, and drop the captures; nothing runs.

        All ranks of a group must do this at the same time.
        """
        for size in reversed(self._sizes):
            self._progress.enter(Phase.CAPTURING, size)
            self._trace(size)

    @abstractmethod
    def can_replay(self, inputs: StepInputs) -> bool:
        """Return whether graphs can run a step."""

    @abstractmethod
    def replay(self, inputs: StepInputs, metadata: AttentionMetadata) -> torch.Tensor:
        """Return the normed hidden states, `[num_sampled, hidden_size]`.

        The next replay may overwrite them.
        """

    @abstractmethod
    def _capture(self, size: int) -> Capture:
        """Capture the model for so many tokens, on the stream and with the pool of all captures."""

    @abstractmethod
    def _trace(self, size: int) -> None:
        """Capture the model for so many tokens, without running it before, and drop the capture."""

    def _capture_for(self, num_tokens: int) -> tuple[int, Capture]:
        """Return the padded number of tokens, and its capture."""
        size = self._sizes[bisect_left(self._sizes, num_tokens)]
        if size not in self._captures:
            # Every rank has the same plans, so that all capture at the same step.
            self._add_capture(size)
        return size, self._captures[size]

    def _run_first(self, run: Callable[[], object]) -> None:
        """Run what is captured next, unless there are captures.

        Libraries allocate what they need at their first call, outside the captures' memory.
        """
        if self._captures:
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
        # What was used is kept for this stream, where no step runs.
        torch.cuda.empty_cache()

    @torch.inference_mode()
    def _add_capture(self, size: int) -> None:
        self._progress.enter(Phase.CAPTURING, size)
        self._captures[size] = self._capture(size)
