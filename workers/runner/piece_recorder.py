"""Records a forward pass as CUDA graphs, a graph for each piece between two attentions.

A piece holds no tensor: its memory belongs to the graphs' pool, in which later pieces and other
recordings reuse it. Replays must therefore be in the order of the recording, one at a time. The
last graph may also be replayed alone, once the tokens that it reads have been written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attention.abstract import AttentionInputs
from workers.models.step_attention import StepAttention

if TYPE_CHECKING:
    from collections.abc import Callable

    from attention.layer import Attention
    from workers.models.fused_layers import LayerTail
    from workers.models.step_attention import HeadInputs

__all__ = ["Piece", "PieceRecorder", "Recording"]


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
    last: torch.cuda.CUDAGraph
    """What follows the last attention."""
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
    ) -> None:
        """`write` writes a layer's keys and values to the cache."""
        self._pool = pool
        self._write = write
        self._graph = torch.cuda.CUDAGraph()
        self._pieces: list[Piece] = []

    def record(
        self,
        run_layers: Callable[[StepAttention], LayerTail],
        finish: Callable[[LayerTail], torch.Tensor],
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

    def attend(self, layer: Attention, inputs: HeadInputs) -> torch.Tensor:
        query, key = inputs.split(layer)
        self._write(layer, key, inputs.value)
        self._graph.capture_end()
        ended, self._graph = self._graph, torch.cuda.CUDAGraph()
        self._begin()
        # The pool has this memory, since it is allocated while the next graph is captured. All
        # that the attention reads is still in use and lies elsewhere.
        attended = query.new_empty(query.shape)
        query, key, value = (_unowned(tensor) for tensor in (query, key, inputs.value))
        cached = AttentionInputs(query, key, value, sinks=layer.sinks, is_cached=True)
        self._pieces.append(Piece(ended, layer.layer_index, cached, _unowned(attended)))
        return attended.flatten(1)

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
