"""Decode steps captured as CUDA graphs: one launch in place of one for each kernel."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pagedray.rank_progress import Phase, ProgressWord
from workers.models.step_attention import CachedAttention

if TYPE_CHECKING:
    from attention.abstract import (
        AttentionBackend,
        AttentionMetadata,
        AttentionSpec,
        AttentionState,
    )
    from workers.models.decoder import Decoder
    from workers.runner.input_batch import StepInputs

__all__ = ["DecodeGraphs", "graph_batch_sizes"]

_NUM_WARM_UPS = 2
_MAX_BATCH_SIZE = 512


def graph_batch_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to capture, ascending; small ones are closer together."""
    limit = min(max_num_seqs, _MAX_BATCH_SIZE)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, _MAX_BATCH_SIZE + 1, 32)]
    return [*(size for size in sizes if size < limit), limit]


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    state: AttentionState
    input_buffers: dict[str, torch.Tensor]
    hidden: torch.Tensor
    """`[batch_size, hidden_size]`, written by every replay."""


class DecodeGraphs:
    """One graph for each captured batch size; a batch is padded to the next larger size.

    Drop it before closing the group: the graphs hold the group's collectives.
    """

    def __init__(
        self,
        model: Decoder,
        backend: type[AttentionBackend],
        spec: AttentionSpec,
        kv_cache: torch.Tensor,
        *,
        sizes: list[int],
        pool: Any,  # Any: torch does not export the type
        progress: ProgressWord,
    ) -> None:
        """`sizes` are the batch sizes to capture, ascending."""
        self._progress = progress
        self._model = model
        self._kv_cache = kv_cache
        self._sizes = sizes
        self._state = backend.get_state_cls()(spec)
        self._token_ids = torch.zeros(self._sizes[-1], dtype=torch.int64, device=spec.device)
        self._positions = torch.zeros_like(self._token_ids)
        self._graphs: dict[int, _Graph] = {}
        self._pool = pool
        # One for all captures, since cuBLAS keeps memory for each stream.
        self._stream = torch.cuda.Stream(spec.device)

    def capture_graphs(self, *, only_largest: bool = False) -> None:
        """Capture every size, or only the largest; a replay captures a size that is missing.

        All ranks of a group must do this at the same time.
        """
        # The largest first, since the smaller ones reuse its memory pool.
        for size in self._sizes[-1:] if only_largest else reversed(self._sizes):
            self._capture(size)

    def can_replay(self, inputs: StepInputs) -> bool:
        """Return whether a step has only decodes, and no more than the largest captured size."""
        batch = inputs.attention
        return batch.num_prefills == 0 and batch.num_decodes <= self._sizes[-1]

    def replay(self, inputs: StepInputs, metadata: AttentionMetadata) -> torch.Tensor:
        """Return the normed hidden states, `[num_sampled, hidden_size]`.

        The next replay may overwrite them.
        """
        num_tokens = len(inputs.token_ids)
        size = self._sizes[bisect_left(self._sizes, num_tokens)]
        if size not in self._graphs:
            # Every rank has the same plans, so that all capture at the same step.
            self._capture(size)
        graph = self._graphs[size]
        self._token_ids[:num_tokens].copy_(inputs.token_ids)
        self._positions[:num_tokens].copy_(inputs.positions)
        graph.state.prepare_graph_input_buffers(graph.input_buffers, metadata)
        self._progress.enter(Phase.GRAPH, num_tokens)
        graph.graph.replay()
        hidden = graph.hidden[:num_tokens]
        indices = inputs.logits_indices
        return hidden if indices is None else hidden.index_select(0, indices)

    @torch.inference_mode()
    def _capture(self, size: int) -> None:
        self._progress.enter(Phase.CAPTURING, size)
        with self._state.graph_capture(size):
            self._graphs[size] = self._captured(size)

    def _captured(self, size: int) -> _Graph:
        metadata = self._state.graph_capture_get_metadata_for_batch(size)
        attention = CachedAttention(self._kv_cache, metadata)
        token_ids, positions = self._token_ids[:size], self._positions[:size]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Libraries select and compile kernels at the first call with a shape.
            for _ in range(_NUM_WARM_UPS):
                self._model.forward(token_ids, positions, attention, None)
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's watchdog, may call CUDA during the capture.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            hidden = self._model.forward(token_ids, positions, attention, None)
        return _Graph(
            graph=graph,
            state=self._state.graph_clone(size),
            input_buffers=self._state.get_graph_input_buffers(metadata),
            hidden=hidden,
        )
