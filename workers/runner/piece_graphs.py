"""Steps with prompts as CUDA graphs: one launch for each piece between two attentions.

How attention is computed depends on the lengths in a step, and all else on the number of tokens
alone. So attention runs between the graphs, on the tokens of the step without padding. Keys and
values are written to the cache by the graphs, to slots that each step sets, padding to none.
Recurrent layers are in the graphs, as their kernels read from the device where sequences begin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attention.abstract import AttentionInputs, AttentionMetadata, AttentionMetadataBuilder
from attention.kernels.arguments import Segments
from pagedray.rank_progress import Phase
from workers.layers.recurrent import StepStates
from workers.models.self_attention import HeadInputs, StepAttention
from workers.runner.step_graphs import NO_ROW, CaptureSetup, StepGraphs, dropped_capture

if TYPE_CHECKING:
    from collections.abc import Callable

    from attention.layer import Attention
    from workers.models.fused_layers import LayerTail
    from workers.runner.input_batch import StepInputs

__all__ = ["PieceGraphs", "piece_sizes"]

_FEW_TOKENS = (16, 32)
_MAX_PROMPTS = 16
"""Sequences with several tokens in a step that advances states: kernels have programs for them."""


class Piece(NamedTuple):
    """A graph, and the tensors of the attention that follows it."""

    graph: torch.cuda.CUDAGraph
    """Ends with the write of keys and values to the cache."""
    layer_index: int
    inputs: AttentionInputs
    """Queries, keys and values of `num_padded` tokens, which the graph writes."""
    attended: torch.Tensor
    """Input of the next graph, of the query's shape."""


class Recording(NamedTuple):
    """The graphs of one forward pass."""

    pieces: tuple[Piece, ...]
    end: torch.cuda.CUDAGraph | None
    """The gate or the recurrent layers behind the last attention, for all tokens."""
    last: torch.cuda.CUDAGraph
    """The rest of the last layer, and what follows it."""
    attended: LayerTail
    """The tokens that the last graph reads, and overwrites."""
    hidden: torch.Tensor
    """`[num_padded, hidden_size]`, which the last graph writes for these tokens."""


class PieceRecorder(StepAttention):
    """Ends a graph where a layer attends, and begins the next one after it.

    Use it for one recording, on a stream of its own.
    """

    def __init__(
        self,
        pool: Any,  # Any: torch does not export the type
        write: Callable[[Attention, torch.Tensor, torch.Tensor], None],
        states: StepStates | None,
        *,
        has_end: bool,
    ) -> None:
        """`write` writes a layer's keys and values to the cache.

        `has_end` is whether all tokens need more of the last layer than its attention.
        """
        super().__init__()
        self.states = states
        self._pool = pool
        self._write = write
        self._has_end = has_end
        self._graph = torch.cuda.CUDAGraph()
        self._pieces: list[Piece] = []

    def record(
        self,
        run_layers: Callable[[StepAttention], LayerTail],
        finish: Callable[[LayerTail], torch.Tensor],
    ) -> Recording:
        """Record the launches of `run_layers`, called with this recorder, and then of `finish`."""
        end = None
        self._begin()
        try:
            attended = run_layers(self)
            if self._has_end:
                end = self._begin_next()
            hidden = finish(attended)
        finally:
            self._graph.capture_end()
        unowned = attended.map(_unowned)
        return Recording(tuple(self._pieces), end, self._graph, unowned, _unowned(hidden))

    def attend(self, layer: Attention, inputs: HeadInputs) -> torch.Tensor:
        given = self.split(layer, inputs)
        key, value = given.key, given.value
        assert key is not None
        assert value is not None
        if not given.is_cached:
            self._write(layer, key, value)
        ended = self._begin_next()
        # The pool has this memory, since it is allocated while the next graph is captured. All
        # that the attention reads is still in use and lies elsewhere.
        attended = given.query.new_empty(given.query.shape)
        query, key, value = map(_unowned, (given.query, key, value))
        cached = AttentionInputs(query, key, value, sinks=layer.sinks, is_cached=True)
        self._pieces.append(Piece(ended, layer.layer_index, cached, _unowned(attended)))
        return attended.flatten(1)

    def _begin_next(self) -> torch.cuda.CUDAGraph:
        """End the current graph, which is returned, and begin another one."""
        self._graph.capture_end()
        ended, self._graph = self._graph, torch.cuda.CUDAGraph()
        self._begin()
        return ended

    def _begin(self) -> None:
        # Kernels may be loaded, and other threads, such as NCCL's watchdog, may call CUDA.
        self._graph.capture_begin(self._pool, capture_error_mode="relaxed")


class _Memory:
    """Device memory by address, for libraries that support CUDA's array interface."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 3,
        }


def _unowned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor again, but such that its memory is free when the original is gone."""
    storage = tensor.untyped_storage()
    memory = _Memory(storage.data_ptr(), storage.nbytes())
    elements = torch.as_tensor(memory, device=tensor.device).view(tensor.dtype)
    return elements.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def piece_sizes(max_num_tokens: int) -> list[int]:
    """Return the numbers of tokens to capture, ascending; none for a maximum of zero."""
    if not max_num_tokens:
        return []
    sizes = [*_FEW_TOKENS]
    while sizes[-1] < max_num_tokens:
        sizes.append(sizes[-1] + _distance_above(sizes[-1]))
    return [*(size for size in sizes if size < max_num_tokens), max_num_tokens]


def _distance_above(size: int) -> int:
    """Return the distance to the next size: larger steps can be padded by more tokens."""
    if size < 64:
        return 32
    if size < 1024:
        return 64
    return 128 if size < 4096 else 512


class PieceGraphs(StepGraphs[Recording]):
    """The graphs of steps that may have prompts."""

    def __init__(
        self, setup: CaptureSetup, sizes: list[int], builder: AttentionMetadataBuilder
    ) -> None:
        """`sizes` are the numbers of tokens to capture, ascending."""
        super().__init__(setup, sizes)
        self._builder = builder
        self._groups = builder.spec.cache_groups
        self._slots = [torch.full_like(self._token_ids, -1) for _ in builder.spec.group_windows]
        config = setup.model.config
        self._has_end = config.is_recurrent(config.num_layers - 1) or config.has_attention_gate
        num_spares = setup.num_spare_states
        num_rows = min(sizes[-1], len(setup.states[0][0]) - num_spares) if setup.states else 0
        self._starts = self._token_ids.new_zeros(num_rows + 1, dtype=torch.int32)
        self._rows = self._token_ids.new_full((num_rows,), NO_ROW, dtype=torch.int32)
        self._save_ends = self._token_ids.new_full((num_spares,), -1, dtype=torch.int32)

    def replay(self, inputs: StepInputs, metadata: AttentionMetadata) -> torch.Tensor:
        num_tokens, indices = len(inputs.token_ids), inputs.logits_indices
        size, recording = self._capture_for(num_tokens)
        for slots, written in zip(self._slots, metadata.device_slot_mappings, strict=True):
            slots[:num_tokens].copy_(written)
            slots[num_tokens:size].fill_(-1)
        if inputs.segments is not None:
            self._set_segments(inputs.segments, num_tokens)
        for layer, piece in enumerate(recording.pieces):
            self._progress.enter(Phase.LAYER, layer)
            piece.graph.replay()
            metadata.attend(piece.layer_index, piece.inputs, self._kv_cache, piece.attended)
        if recording.end is not None:
            recording.end.replay()
        if indices is None or self._model.finishes_all:
            recording.last.replay()
            hidden = recording.hidden[:num_tokens]
            return hidden if indices is None else hidden.index_select(0, indices)
        return self._finish(recording.attended, indices)

    def _finish(self, attended: LayerTail, indices: torch.Tensor) -> torch.Tensor:
        """Return what `FusedLayers.finish` does for some of the tokens.

        The last graph of the captured size that these few need computes it.
        """
        num_selected = len(indices)
        if not num_selected:
            return attended.residual[:0]
        _, recording = self._capture_for(num_selected)
        # Recordings share memory: all is read before any is written.
        attended.select(indices).write(recording.attended)
        recording.last.replay()
        return recording.hidden[:num_selected]

    def _sizes_of(self, inputs: StepInputs) -> tuple[int, ...]:
        num_tokens, indices = len(inputs.token_ids), inputs.logits_indices
        if indices is None or not len(indices) or self._model.finishes_all:
            return (num_tokens,)
        return num_tokens, len(indices)

    def _fits(self, inputs: StepInputs) -> bool:
        """Return whether a step has no more tokens and prompts than the graphs."""
        if inputs.has_kept_states:
            return False
        has_few_prompts = inputs.segments is None or inputs.segments.max_prompts <= _MAX_PROMPTS
        return len(inputs.token_ids) <= self._sizes[-1] and has_few_prompts

    def _capture(self, size: int) -> Recording:
        token_ids, positions = self._token_ids[:size], self._positions[:size]

        def run_layers(attention: StepAttention) -> LayerTail:
            return self._model.run_layers(token_ids, positions, attention)

        write, finish = self._writer(size), self._model.fused.finish
        states = self._states_of(size)
        self._run_first(lambda: finish(run_layers(_WriteAlone(write, states))))
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            recorder = PieceRecorder(self._pool, write, states, has_end=self._has_end)
            recording = recorder.record(run_layers, finish)
        torch.cuda.current_stream().wait_stream(self._stream)
        return recording

    def _trace(self, size: int) -> None:
        attention = _WriteAlone(self._writer(size), self._states_of(size))
        token_ids, positions = self._token_ids[:size], self._positions[:size]
        with dropped_capture(self._stream):
            self._model.fused.finish(self._model.run_layers(token_ids, positions, attention))

    def _states_of(self, size: int) -> StepStates | None:
        """Return the states of a step of this many tokens, with no rows yet."""
        if not self._states:
            return None
        num_rows = min(size, len(self._rows))
        self._rows.fill_(NO_ROW)
        self._save_ends.fill_(-1)
        segments = Segments(
            query_starts=self._starts[: num_rows + 1],
            rows=self._rows[:num_rows],
            max_query_len=size,
            num_prompts=_MAX_PROMPTS,
            save_ends=self._save_ends,
        )
        return StepStates(segments, self._states)

    def _set_segments(self, segments: Segments, num_tokens: int) -> None:
        """Set the segments that the graphs read; others are empty, without a row."""
        num_rows = len(segments.rows)
        self._rows[:num_rows].copy_(segments.rows)
        self._rows[num_rows:].fill_(NO_ROW)
        self._starts[: num_rows + 1].copy_(segments.query_starts)
        self._starts[num_rows + 1 :].fill_(num_tokens)
        if segments.save_ends is None:
            self._save_ends.fill_(-1)
        else:
            self._save_ends.copy_(segments.save_ends)

    def _writer(self, size: int) -> Callable[[Attention, torch.Tensor, torch.Tensor], None]:
        """Return a function that writes a layer's keys and values to this many slots."""
        slots_of = [slots[:size] for slots in self._slots]
        # Slots of an earlier step belong to the tokens of that step.
        for slots in slots_of:
            slots.fill_(-1)

        def write(layer: Attention, key: torch.Tensor, value: torch.Tensor) -> None:
            index = layer.layer_index
            slots = slots_of[self._groups[index]]
            self._builder.write_layer(index, key, value, self._kv_cache, slots)

        return write


class _WriteAlone(StepAttention):
    """Writes keys and values, and returns zeros instead of attention."""

    def __init__(
        self,
        write: Callable[[Attention, torch.Tensor, torch.Tensor], None],
        states: StepStates | None,
    ) -> None:
        super().__init__()
        self.states = states
        self._write = write

    def attend(self, layer: Attention, inputs: HeadInputs) -> torch.Tensor:
        query, key = inputs.split(layer)
        if key is not None and inputs.value is not None:
            self._write(layer, key, inputs.value)
        return query.new_zeros(query.shape).flatten(1)
