"""Layers with equal parameters on a GPU: one plan a step, and what is run for each of them."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from attention.gpu.batch import GpuBatch, Rows
from attention.params import AttentionParams, AttentionSpec

__all__ = ["GpuGroup", "LayerCache"]


class LayerCache(NamedTuple):
    """One layer's part of the cache, and how to read it."""

    blocks: torch.Tensor
    """`[num_blocks, 2, block_size, num_kv_heads, head_size]`, strided; fp8 is viewed as such."""
    pool: torch.Tensor
    """The cache of all layers that it is a part of, viewed likewise."""
    place: int
    """The layer's place on the cache's layer axis."""
    k_scale: float
    v_scale: float


class GpuGroup(ABC):
    """Plans a step once for the layers of a group, and runs each of them.

    Tensors are of heads: queries and results `[num_tokens, num_heads, head_size]`, keys and
    values `[num_tokens, num_kv_heads, head_size]`; rows may be strided, but not those of a
    result. A result is written whole, sequences without keys as zeros.
    """

    def __init__(self, params: AttentionParams, spec: AttentionSpec, *, is_graph: bool) -> None:
        """`is_graph`: plans are for a captured graph, whose shapes and addresses stay."""
        self.params = params
        self.spec = spec
        self.is_graph = is_graph

    @property
    @abstractmethod
    def providers(self) -> dict[str, str]:
        """Return who computes each part of a step: the name of a library, or "shared"."""

    @abstractmethod
    def plan(self, batch: GpuBatch) -> None:
        """Plan a step; the one before ends. Waits for nothing that the device does."""

    @abstractmethod
    def prefill(
        self, rows: Rows, query: torch.Tensor, cache: LayerCache, out: torch.Tensor
    ) -> None:
        """Attend for queries of several tokens over cached keys."""

    @abstractmethod
    def prefill_ragged(
        self,
        rows: Rows,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Attend for sequences whose keys are those of their own tokens."""

    @abstractmethod
    def decode(self, rows: Rows, query: torch.Tensor, cache: LayerCache, out: torch.Tensor) -> None:
        """Attend for one query token of each sequence over cached keys."""
