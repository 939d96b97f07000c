"""Steps with prompts as CUDA graphs: one launch for each piece between two attentions.

How attention is computed depends on the lengths in a step, and all else on the number of tokens
alone. So attention runs between the graphs, on the tokens of the step without padding. Keys and
values are written to the cache by the graphs, to slots that each step sets, padding to none.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any

import torch

from pagedray.rank_progress import Phase, ProgressWord
from workers.models.step_attention import StepAttention
from workers.runner.piece_recorder import PieceRecorder

if TYPE_CHECKING:
    from collections.abc import Callable

    from attention.abstract import AttentionMetadata, AttentionMetadataBuilder
    from attention.layer import Attention
    from workers.models.decoder import Decoder
    from workers.runner.input_batch import StepInputs
    from workers.runner.piece_recorder import Recording

__all__ = ["PieceGraphs", "piece_sizes"]

_FEW_TOKENS = (16, 32)
_STEP = 64


def piece_sizes(max_num_tokens: int) -> list[int]:
    """Return the numbers of tokens to capture, ascending; none for a maximum of zero."""
    if not max_num_tokens:
        return []
    sizes = [*_FEW_TOKENS, *range(_STEP, max_num_tokens, _STEP)]
    return [*(size for size in sizes if size < max_num_tokens), max_num_tokens]


class PieceGraphs:
    """The graphs for each captured number of tokens; a step is padded to the next larger one.

    Drop it before closing the group: the graphs hold the group's collectives.
    """

    def __init__(
        self,
        model: Decoder,
        builder: AttentionMetadataBuilder,
        kv_cache: torch.Tensor,
        *,
        sizes: list[int],
        pool: Any,  # Any: torch does not export the type
        progress: ProgressWord,
    ) -> None:
        """`sizes` are the numbers of tokens to capture, ascending."""
        self._progress = progress
        self._model = model
        self._builder = builder
        self._kv_cache = kv_cache
        self._sizes = sizes
        self._pool = pool
        self._token_ids = torch.zeros(sizes[-1], dtype=torch.int64, device=model.device)
        self._positions = torch.zeros_like(self._token_ids)
        self._slots = torch.full_like(self._token_ids, -1)
        # One for all recordings, since cuBLAS keeps memory for each stream.
        self._stream = torch.cuda.Stream(model.device)
        self._recordings: dict[int, Recording] = {}

    def capture_graphs(self, *, only_largest: bool = False) -> None:
        """Capture every size, or only the largest; a replay captures a size that is missing.

        All ranks of a group must do this at the same time.
        """
        # The largest first, since the smaller ones reuse its memory pool.
        for size in self._sizes[-1:] if only_largest else reversed(self._sizes):
            self._capture(size)

    def can_replay(self, inputs: StepInputs) -> bool:
        """Return whether a step has no more tokens than the largest captured size."""
        return len(inputs.token_ids) <= self._sizes[-1]

    def replay(self, inputs: StepInputs, metadata: AttentionMetadata) -> torch.Tensor:
        """Return the normed hidden states, `[num_sampled, hidden_size]`.

        The next replay may overwrite them.
        """
        num_tokens = len(inputs.token_ids)
        size = self._sizes[bisect_left(self._sizes, num_tokens)]
        if size not in self._recordings:
            # Every rank has the same plans, so that all capture at the same step.
            self._capture(size)
        recording = self._recordings[size]
        # What is left of earlier steps behind them is padding, whose results are not used.
        self._token_ids[:num_tokens].copy_(inputs.token_ids)
        self._positions[:num_tokens].copy_(inputs.positions)
        self._slots[:num_tokens].copy_(metadata.device_slot_mapping)
        self._slots[num_tokens:size].fill_(-1)
        for layer, piece in enumerate(recording.pieces):
            self._progress.enter(Phase.LAYER, layer)
            graph, layer_index, query, key, value, attended = piece
            graph.replay()
            metadata.attend_layer(layer_index, query, key, value, self._kv_cache, attended)
        recording.last.replay()
        return self._model.normed(
            recording.residual.narrow(0, 0, num_tokens),
            recording.delta.narrow(0, 0, num_tokens),
            inputs.logits_indices,
        )

    @torch.inference_mode()
    def _capture(self, size: int) -> None:
        self._progress.enter(Phase.CAPTURING, size)
        token_ids, positions = self._token_ids[:size], self._positions[:size]
        slots = self._slots[:size]

        def run_layers(attention: StepAttention) -> tuple[torch.Tensor, torch.Tensor]:
            return self._model.run_layers(token_ids, positions, attention)

        def write(layer: Attention, key: torch.Tensor, value: torch.Tensor) -> None:
            self._builder.write_layer(layer.layer_index, key, value, self._kv_cache, slots)

        # The slots of an earlier step belong to its tokens.
        slots.fill_(-1)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Libraries select and compile kernels at the first call with a shape.
            run_layers(_WriteAlone(write))
            self._recordings[size] = PieceRecorder(self._pool, write).record(run_layers)
        torch.cuda.current_stream().wait_stream(self._stream)
        # What the warm-up has used is kept for its stream, where no step runs.
        torch.cuda.empty_cache()


class _WriteAlone(StepAttention):
    """Writes keys and values, and returns zeros in place of attention."""

    def __init__(self, write: Callable[[Attention, torch.Tensor, torch.Tensor], None]) -> None:
        self._write = write

    def attend(
        self,
        layer: Attention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        self._write(layer, key, value)
        return query.new_zeros(query.shape)
