"""Decode steps captured as CUDA graphs, each a single launch in place of its kernels' launches."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

from attention.kernels.arguments import Segments
from pagedray.rank_progress import Phase
from workers.layers.recurrent import StepStates
from workers.models.self_attention import CachedAttention
from workers.runner.step_graphs import NO_ROW, CaptureSetup, StepGraphs, dropped_capture

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attention.abstract import (
        AttentionBackend,
        AttentionMetadata,
        AttentionSpec,
        AttentionState,
    )
    from workers.runner.input_batch import StepInputs

__all__ = ["ChainGraphs", "DecodeGraphs", "chain_sizes", "graph_batch_sizes"]

_MAX_BATCH_SIZE = 512
_MIN_CHAINED_SIZE = 5
"""In smaller graphs, a kernel writes the token of a decode while it reads other tokens."""


def graph_batch_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to capture, ascending; small sizes are closer together."""
    limit = min(max_num_seqs, _MAX_BATCH_SIZE)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, _MAX_BATCH_SIZE + 1, 16)]
    return [*(size for size in sizes if size < limit), limit]


def chain_sizes(decode_sizes: list[int]) -> list[int]:
    """Return the sizes of steps with chains to capture: few, as each keeps its columns."""
    largest = decode_sizes[-1]
    sizes = [size for size in decode_sizes if size >= _MIN_CHAINED_SIZE]
    return [size for size in sizes if size.bit_count() == 1 or size == largest]


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    state: AttentionState
    input_buffers: dict[str, torch.Tensor]
    hidden: torch.Tensor
    """`[batch_size, hidden_size]`, written by every replay."""
    states: StepStates | None
    """Its kept tensors, if any, stay allocated."""
    accept: torch.cuda.CUDAGraph | None = None
    """Advances kept states by the accepted tokens of chains."""
    read: torch.cuda.CUDAGraph | None = None
    """Has a draft model read the tokens of the step."""


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
        self._replayed: Segments | None = None
        """The segments that these are the rows of."""
        self._starts = torch.arange(sizes[-1] + 1, dtype=torch.int32, device=device)
        self._sampled_ids = torch.zeros_like(self._token_ids)
        """The token sampled after each token, which decides which drafts are accepted."""
        self._latest: _Graph | None = None

    def replay(self, inputs: StepInputs, metadata: AttentionMetadata) -> torch.Tensor:
        num_tokens = len(inputs.token_ids)
        size, graph = self._capture_for(*self._sizes_of(inputs))
        graph.state.prepare_graph_input_buffers(graph.input_buffers, metadata)
        if inputs.segments is not self._replayed:
            assert inputs.segments is not None
            self._set_segments(inputs.segments, size)
            self._replayed = inputs.segments
        self._progress.enter(Phase.GRAPH, num_tokens)
        graph.graph.replay()
        self._latest = graph
        hidden = graph.hidden[:num_tokens]
        indices = inputs.logits_indices
        return hidden if indices is None else hidden.index_select(0, indices)

    def read(self) -> None:
        """Have the draft model read the tokens of the step that was replayed last."""
        assert self._latest is not None
        assert self._latest.read is not None
        self._latest.read.replay()

    def _set_segments(self, segments: Segments, size: int) -> None:
        """Set the segments that a graph of some size reads; others have no row."""
        num_rows = len(segments.rows)
        self._rows[:num_rows].copy_(segments.rows)
        self._rows[num_rows:].fill_(NO_ROW)

    def _fits(self, inputs: StepInputs) -> bool:
        """Return whether a step has only decodes, and no more than the largest captured size."""
        (size,) = self._sizes_of(inputs)
        is_decode = inputs.attention.num_prefills == 0
        return is_decode and size <= self._sizes[-1] and not inputs.has_kept_states

    def _sizes_of(self, inputs: StepInputs) -> tuple[int, ...]:
        least = _MIN_CHAINED_SIZE if inputs.attention.has_chains else 0
        return (max(len(inputs.token_ids), least),)

    def _attention(self, size: int, metadata: AttentionMetadata) -> CachedAttention:
        if not self._states:
            return CachedAttention(self._kv_cache, metadata)
        states = StepStates(self._segments(size), self._states)
        return CachedAttention(self._kv_cache, metadata, states)

    def _segments(self, size: int) -> Segments:
        return Segments(
            query_starts=self._starts[: size + 1], rows=self._rows[:size], max_query_len=1
        )

    def _capture(self, size: int) -> _Graph:
        with self._state.graph_capture(size):
            return self._captured(size)

    def _trace(self, size: int) -> None:
        with self._state.graph_capture(size):
            metadata = self._state.graph_capture_get_metadata_for_batch(size)
            attention = self._attention(size, metadata)
            token_ids = self._token_ids[:size]
            with dropped_capture(self._stream):
                self._model.forward(token_ids, self._positions[:size], attention, None)
                if attention.states is not None and attention.states.kept:
                    attention.states.accept(token_ids, self._sampled_ids[:size])
                self._read(size, attention)

    def _captured(self, size: int) -> _Graph:
        metadata = self._state.graph_capture_get_metadata_for_batch(size)
        attention = self._attention(size, metadata)
        token_ids, positions = self._token_ids[:size], self._positions[:size]

        def run() -> torch.Tensor:
            return self._model.forward(token_ids, positions, attention, None)

        def run_first() -> None:
            run()
            self._read(size, attention)

        self._run_first(run_first)
        states, accept, read = attention.states, None, None
        if states is not None:
            states.kept.clear()
        with self._recording() as graph:
            hidden = run()
        if states is not None and states.kept:
            with self._recording() as accept:
                states.accept(token_ids, self._sampled_ids[:size])
        if self._reader is not None:
            with self._recording() as read:
                self._read(size, attention)
        return _Graph(
            graph=graph,
            state=self._state.graph_clone(size),
            input_buffers=self._state.get_graph_input_buffers(metadata),
            hidden=hidden,
            states=states,
            accept=accept,
            read=read,
        )

    def _read(self, size: int, attention: CachedAttention) -> None:
        """Have the draft model read the tokens of a step, if there is a draft model."""
        if self._reader is not None:
            self._reader.read(self._token_ids[:size], self._positions[:size], attention)

    @contextmanager
    def _recording(self) -> Iterator[torch.cuda.CUDAGraph]:
        graph = torch.cuda.CUDAGraph()
        # Kernels may be loaded, and other threads, such as NCCL's watchdog, may call CUDA.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="relaxed"
        ):
            yield graph


class ChainGraphs(DecodeGraphs):
    """The graphs of steps with chains of models with recurrent layers.

    A replay keeps the states, until the tokens that the step samples are accepted.
    """

    def accept(self, sampled_ids: torch.Tensor) -> None:
        """Advance the states by the accepted tokens of the step that was replayed last."""
        _, graph = self._capture_for(max(len(sampled_ids), _MIN_CHAINED_SIZE))
        assert graph.accept is not None
        self._sampled_ids[: len(sampled_ids)].copy_(sampled_ids)
        graph.accept.replay()

    def _set_segments(self, segments: Segments, size: int) -> None:
        super()._set_segments(segments, size)
        num_starts = len(segments.query_starts)
        self._starts[:num_starts].copy_(segments.query_starts)
        # Padding is a segment without a row.
        self._starts[num_starts:].fill_(size)

    def _fits(self, inputs: StepInputs) -> bool:
        (size,) = self._sizes_of(inputs)
        return size <= self._sizes[-1] and inputs.has_kept_states

    def _segments(self, size: int) -> Segments:
        return Segments(
            query_starts=self._starts[: size + 1],
            rows=self._rows[:size],
            max_query_len=size,
            num_prompts=0,
            is_chained=True,
            keeps_states=True,
        )
