"""Records a forward pass as CUDA graphs, a graph for each piece between two attentions.

A piece holds no tensor: its memory belongs to the graphs' pool, in which later pieces and other
recordings reuse it. Replays must therefore be in the order of the recording, one at a time. The
last graph may also be replayed alone, once the tokens that it reads have been written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from workers.models.step_attention import StepAttention

if TYPE_CHECKING:
    from collections.abc import Callable

    from attention.layer import Attention
    from workers.models.attended import Attended

__all__ = ["Piece", "PieceRecorder", "Recording"]


class Piece(NamedTuple):
    """A graph, and the tensors of the attention that follows it."""

    graph: torch.cuda.CUDAGraph
    """Ends with the write of keys and values to the cache."""
    layer_index: int
    query: torch.Tensor
    """`[num_padded, num_heads, head_size]`, written by the graph, and so are the next two."""
    key: torch.Tensor
    """`[num_padded, num_kv_heads, head_size]`, and so is `value`."""
    value: torch.Tensor
    sinks: torch.Tensor | None
    """The attention sinks of the layer; None if it has none."""
    attended: torch.Tensor
    """Input of the next graph, of the query's shape."""


class Recording(NamedTuple):
    """The graphs of one forward pass."""

    pieces: tuple[Piece, ...]
    last: torch.cuda.CUDAGraph
    """Graph of the piece behind the last attention."""
    attended: Attended
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
    ) -> None:
        """`write` writes a layer's keys and values to the cache."""
        self._pool = pool
        self._write = write
        self._graph = torch.cuda.CUDAGraph()
        self._pieces: list[Piece] = []

    def record(
        self,
        run_layers: Callable[[StepAttention], Attended],
        finish: Callable[[Attended], torch.Tensor],
    ) -> Recording:
        """Record the launches of `run_layers`, called with this recorder, and then of `finish`."""
        self._begin()
        try:
            attended = run_layers(self)
            hidden = finish(attended)
        finally:
            self._graph.capture_end()
        unowned = attended.map(_unowned)
        return Recording(tuple(self._pieces), self._graph, unowned, _unowned(hidden))

    def attend(
        self,
        layer: Attention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        self._write(layer, key, value)
        self._graph.capture_end()
        ended, self._graph = self._graph, torch.cuda.CUDAGraph()
        self._begin()
        # The pool has this memory, since it is allocated while the next graph is captured. All
        # that the attention reads is still in use and lies elsewhere.
        attended = query.new_empty(query.shape)
        query, key, value, attended_heads = (
            _unowned(tensor).unflatten(1, (-1, layer.params.head_size))
            for tensor in (query, key, value, attended)
        )
        piece = Piece(ended, layer.layer_index, query, key, value, layer.sinks, attended_heads)
        self._pieces.append(piece)
        return attended

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
