"""The kernels of layers with equal parameters on a GPU: planned per step, run for each layer."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch

from attention.abstract import AttentionInputs
from attention.gpu.batch import GpuBatch, SubBatch
from attention.gpu.decode_schedule import DecodeMemory, DecodeScheduler
from attention.kernels.arguments import DecodeItems, NewTokens
from attention.params import AttentionParams, AttentionSpec

__all__ = ["LayerCache", "LayerKernels", "LayerSet"]


@dataclass(frozen=True, eq=False)
class LayerCache:
    """One layer's part of the cache and its scales."""

    blocks: torch.Tensor
    """`[num_blocks, 2, block_size, num_kv_heads, head_size]`, strided; fp8 is viewed as such."""
    pool: torch.Tensor
    """The whole cache, viewed as layers of the same shape."""
    place: int
    """The layer's place on the cache's layer axis."""
    k_scale: float
    v_scale: float

    @cached_property
    def keys(self) -> torch.Tensor:
        """Return the keys, `[num_blocks, block_size, num_kv_heads, head_size]`, strided."""
        return self.blocks[:, 0]

    @cached_property
    def values(self) -> torch.Tensor:
        """Return the values, of the same shape."""
        return self.blocks[:, 1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerSet:
    """Layers of a group with equal parameters, planned together."""

    params: AttentionParams
    group: int
    """The group of the layers, which names the block tables that the kernels read."""
    spec: AttentionSpec
    is_graph: bool
    """Whether plans are for a captured graph, which fixes shapes and addresses."""
    memory: DecodeMemory
    """Shared by all launches on the same stream."""
    schedulers: dict[AttentionParams, DecodeScheduler]
    """The schedulers of layers with windows, which groups of equal parameters share."""


class LayerKernels(ABC):
    """Plans each step once for a set of layers, and computes each layer.

    `inputs` and `out` have all tokens of the step; a method reads and writes the tokens of the
    sub-batch. Results are written completely; sequences without keys get zero.
    """

    def __init__(self, layers: LayerSet) -> None:
        self.params = layers.params
        self.group = layers.group
        self.spec = layers.spec
        self.is_graph = layers.is_graph

    @property
    @abstractmethod
    def providers(self) -> dict[str, str]:
        """Return the provider of each part of a step: the name of a library, or "shared"."""

    @property
    def takes_new_tokens(self) -> bool:
        """Return whether `decode` rotates and writes new tokens itself."""
        return False

    @property
    def items(self) -> DecodeItems | None:
        """Return the items of the decodes of the planned step; None without the shared kernel."""
        return None

    @abstractmethod
    def plan_step(self, batch: GpuBatch) -> None:
        """Plan a step in place of the previous step, without waiting for the GPU.

        `batch` is the step in the blocks of the layers' group.
        """

    @abstractmethod
    def prefill(
        self, sub_batch: SubBatch, inputs: AttentionInputs, cache: LayerCache, out: torch.Tensor
    ) -> None:
        """Attend for queries of several tokens over cached keys."""

    @abstractmethod
    def prefill_ragged(
        self, sub_batch: SubBatch, inputs: AttentionInputs, out: torch.Tensor
    ) -> None:
        """Attend to the keys of each sequence's own tokens, without the cache."""

    @abstractmethod
    def decode(
        self,
        sub_batch: SubBatch,
        inputs: AttentionInputs,
        cache: LayerCache,
        out: torch.Tensor,
        new: NewTokens | None = None,
    ) -> None:
        """Attend for one query token of each sequence over cached keys.

        With `new`, only if `takes_new_tokens`, rotate and write these before.
        """
