"""Block tables and arguments of plans in FlashInfer's format; does not import the library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from attention.abstract import AttentionParams, AttentionSpec
    from attention.gpu.batch import SubBatch

__all__ = ["PageUploader", "Pages", "pinned"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GraphPages:
    """The buffers from which a captured graph reads the pages of each step."""

    starts: torch.Tensor
    """`[num_sequences + 1]` int32."""
    last_lens: torch.Tensor
    """`[num_sequences]` int32."""
    indices: torch.Tensor
    """`[num_sequences * width]` int32, filled from the front."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pages:
    """The pages of some sequences in one step."""

    starts: torch.Tensor
    """Pages before each sequence, `[num_sequences + 1]` int32, on the host."""
    last_lens: torch.Tensor
    """Keys in the last page of each, 0 if it has none, `[num_sequences]` int32, on the host."""
    indices: torch.Tensor
    """Blocks of all sequences, `[starts[-1]]` int32."""
    graph: GraphPages | None
    """The same on the device, at fixed addresses; None for an eager step."""


class PageUploader:
    """Makes the pages of each step once, for all layers that see the same keys."""

    def __init__(self, device: torch.device, block_size: int, *, is_graph: bool) -> None:
        self._device = device
        self._block_size = block_size
        self._is_graph = is_graph
        self._fixed: torch.Tensor | None = None
        self._known: list[tuple[SubBatch, Pages]] = []

    def pages_of(self, sub_batch: SubBatch) -> Pages:
        """Return the pages of a sub-batch, uploaded once, without waiting for the GPU."""
        for known, pages in self._known:
            if known is sub_batch:
                return pages
        pages = self._upload(sub_batch)
        # A step has two sub-batches: prefills and decodes.
        self._known = [*self._known[-1:], (sub_batch, pages)]
        return pages

    def _upload(self, sub_batch: SubBatch) -> Pages:
        tables, lens = sub_batch.host_block_tables, sub_batch.host_seq_lens
        assert tables is not None
        size = len(lens)
        num_pages = -(-lens // self._block_size)
        runs = [table[:count] for table, count in zip(tables, num_pages.tolist(), strict=True)]
        last_lens = lens - np.maximum(num_pages - 1, 0) * self._block_size
        host = pinned(np.concatenate([[0], np.cumsum(num_pages), last_lens, *runs]), self._device)
        device, graph = self._copy(host, size, tables.shape[1])
        return Pages(
            starts=host[: size + 1],
            last_lens=host[size + 1 : 2 * size + 1],
            indices=device[2 * size + 1 :],
            graph=graph,
        )

    def _copy(
        self, host: torch.Tensor, size: int, width: int
    ) -> tuple[torch.Tensor, GraphPages | None]:
        if not self._is_graph:
            return host.to(self._device, non_blocking=True), None
        if self._fixed is None:
            length = 2 * size + 1 + size * width
            self._fixed = torch.zeros(length, dtype=torch.int32, device=self._device)
        fixed = self._fixed
        fixed[: len(host)].copy_(host, non_blocking=True)
        graph = GraphPages(
            starts=fixed[: size + 1],
            last_lens=fixed[size + 1 : 2 * size + 1],
            indices=fixed[2 * size + 1 :],
        )
        return fixed[: len(host)], graph


def pinned(numbers: npt.NDArray[np.integer], device: torch.device) -> torch.Tensor:
    """Return numbers as int32 on the host, pinned so that copies to a GPU do not block.

    Torch does not reuse the memory before the copies from it are done.
    """
    host = torch.empty(len(numbers), dtype=torch.int32, pin_memory=device.type == "cuda")
    host.numpy()[:] = numbers
    return host


def plan_arguments(
    params: AttentionParams, spec: AttentionSpec, kv_dtype: torch.dtype
) -> dict[str, Any]:  # Any: mixed
    """Return the layer parameters of a plan, by the library's names."""
    return {
        "num_qo_heads": params.num_heads,
        "num_kv_heads": params.num_kv_heads,
        # The library does not count the query's own key.
        "window_left": -1 if params.sliding_window is None else params.sliding_window - 1,
        "logits_soft_cap": params.soft_cap or 0.0,
        "sm_scale": params.scale,
        "q_data_type": spec.dtype,
        "kv_data_type": kv_dtype,
    }
