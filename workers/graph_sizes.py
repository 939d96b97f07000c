"""The sizes of steps that a rank captures as CUDA graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from workers.runner.graphs.decode_graphs import graph_batch_sizes
from workers.runner.graphs.piece_graphs import piece_sizes

if TYPE_CHECKING:
    import torch

    from attention.abstract import AttentionBackend
    from pagedray.config import EngineConfig

__all__ = ["NO_GRAPHS", "GraphSizes", "graph_sizes"]


class GraphSizes(NamedTuple):
    """The sizes of the captured graphs, ascending."""

    decodes: list[int]
    """Sizes of decodes, in rows."""
    pieces: list[int]
    """Sizes of pieces, in tokens."""


NO_GRAPHS = GraphSizes([], [])


def graph_sizes(
    config: EngineConfig, device: torch.device, backend: type[AttentionBackend]
) -> GraphSizes:
    """Return the sizes that a rank captures; none on a CPU."""
    if device.type != "cuda" or config.enforce_eager:
        return NO_GRAPHS
    decodes = graph_batch_sizes(config.max_num_seqs) if backend.supports_graph_capture else []
    max_tokens = min(config.max_graph_tokens, config.max_num_batched_tokens)
    return GraphSizes(decodes, piece_sizes(max_tokens))
