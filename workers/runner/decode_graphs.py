"""Decode steps captured as CUDA graphs, each a single launch in place of its kernels' launches."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from attention.kernels.arguments import Segments
from pagedray.rank_progress import Phase
from workers.layers.recurrent import StepStates
from workers.models.self_attention import CachedAttention
from workers.runner.step_graphs import NO_ROW, CaptureSetup, StepGraphs, dropped_capture

if TYPE_CHECKING:
    from attention.abstract import (
        AttentionBackend,
        AttentionMetadata,
        AttentionSpec,
        AttentionState,
    )
    from workers.runner.input_batch import StepInputs

__all__ = ["DecodeGraphs", "graph_batch_sizes"]

_MAX_BATCH_SIZE = 512
_MIN_CHAINED_SIZE = 5
"""In smaller graphs, a kernel writes the token of a decode while it reads other tokens."""


def graph_batch_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to capture, ascending; small sizes are closer together."""
    limit = min(max_num_seqs, _MAX_BATCH_SIZE)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, _MAX_BATCH_SIZE + 1, 16)]
    return [*(size for size in sizes if size < limit), limit]


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    state: AttentionState
    input_buffers: dict[str, torch.Tensor]
    hidden: torch.Tensor
    """`[batch_size, hidden_size]`, written by every replay."""


class DecodeGraphs(StepGraphs[_Graph]):
    """The graphs of steps that have only decodes."""

    def __init__(
        self,
        setup: CaptureSetup,
        sizes: list[int],
        backend: type[AttentionBackend],
        spec: AttentionSpec,
    ) -> None:
        """`sizes` are the batch sizes to capture, ascending."""
        super().__init__(setup, sizes)
        self._state = backend.get_state_cls()(spec)
        device = setup.model.device
        self._rows = torch.full((sizes[-1],), NO_ROW, dtype=torch.int32, device=device)
        """The row of each token, whose state the graphs advance."""
        self._starts = torch.arange(sizes[-1] + 1, dtype=torch.int32, device=device)

    def replay(self, inputs: StepInputs, metadata: AttentionMetadata) -> torch.Tensor:
        num_tokens = len(inputs.token_ids)
        _, graph = self._capture_for(*self._sizes_of(inputs))
        graph.state.prepare_graph_input_buffers(graph.input_buffers, metadata)
        if inputs.segments is not None:
            self._rows[:num_tokens].copy_(inputs.segments.rows)
            self._rows[num_tokens:].fill_(NO_ROW)
        self._progress.enter(Phase.GRAPH, num_tokens)
        graph.graph.replay()
        hidden = graph.hidden[:num_tokens]
        indices = inputs.logits_indices
        return hidden if indices is None else hidden.index_select(0, indices)

    def _fits(self, inputs: StepInputs) -> bool:
        """Return whether a step has only decodes, and no more than the largest captured size."""
        (size,) = self._sizes_of(inputs)
        return inputs.attention.num_prefills == 0 and size <= self._sizes[-1]

    def _sizes_of(self, inputs: StepInputs) -> tuple[int, ...]:
        least = _MIN_CHAINED_SIZE if inputs.attention.has_chains else 0
        return (max(len(inputs.token_ids), least),)

    def _attention(self, size: int, metadata: AttentionMetadata) -> CachedAttention:
        if not self._states:
            return CachedAttention(self._kv_cache, metadata)
        segments = Segments(
            query_starts=self._starts[: size + 1], rows=self._rows[:size], max_query_len=1
        )
        return CachedAttention(self._kv_cache, metadata, StepStates(segments, self._states))

    def _capture(self, size: int) -> _Graph:
        with self._state.graph_capture(size):
            return self._captured(size)

    def _trace(self, size: int) -> None:
        with self._state.graph_capture(size):
            metadata = self._state.graph_capture_get_metadata_for_batch(size)
            attention = self._attention(size, metadata)
            with dropped_capture(self._stream):
                self._model.forward(self._token_ids[:size], self._positions[:size], attention, None)

    def _captured(self, size: int) -> _Graph:
        metadata = self._state.graph_capture_get_metadata_for_batch(size)
        attention = self._attention(size, metadata)
        token_ids, positions = self._token_ids[:size], self._positions[:size]

        def run() -> torch.Tensor:
            return self._model.forward(token_ids, positions, attention, None)

        self._run_first(run)
        graph = torch.cuda.CUDAGraph()
        # Kernels may be loaded, and other threads, such as NCCL's watchdog, may call CUDA.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="relaxed"
        ):
            hidden = run()
        return _Graph(
            graph=graph,
            state=self._state.graph_clone(size),
            input_buffers=self._state.get_graph_input_buffers(metadata),
            hidden=hidden,
        )
