"""Schedules the decodes of each step and uploads the schedule, for layers with equal parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attention.gpu.pinned_ring import PinnedRing, copy_from_host
from attention.kernels.decode_items import DecodeItems

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from attention.gpu.decodes.memory import DecodeMemory
    from attention.gpu.decodes.schedule import DecodeDivision
    from attention.kernels.decode_items import DecodeScratch
    from attention.params import AttentionParams

__all__ = ["DecodeScheduler"]

_WORDS_PER_COPY = 2
"""int32 values in each int64 that is copied."""


class DecodeScheduler:
    """Uploads one schedule at a time; a captured graph has a scheduler of its own.

    It keeps the memory that the graph was captured with.
    """

    def __init__(
        self,
        division: DecodeDivision,
        params: AttentionParams,
        memory: DecodeMemory,
        device: torch.device,
        *,
        is_graph: bool,
    ) -> None:
        """`is_graph`: steps have the same number of rows, and their items the same addresses."""
        self._division = division
        self._prefixes = division.kept_prefixes()
        self._params = params
        self._memory = memory
        self._is_graph = is_graph
        self._scratch: DecodeScratch | None = None
        self._pinned = PinnedRing(device)
        self._on_device = torch.empty(0, dtype=torch.int64, device=device)

    def items_of(self, seq_lens: NDArray[np.int32], block_tables: NDArray[np.int32]) -> DecodeItems:
        """Return the items of a step's decodes, valid until the next call.

        `seq_lens` is `[num_rows]`, 0 for padding, and `block_tables` `[num_rows, width]`.
        """
        num_rows, params = len(seq_lens), self._params
        if self._is_graph and num_rows == 1 and self._division.rows_per_item > 1:
            # The kernel for one row per item is simpler.
            self._division = replace(self._division, rows_per_item=1)
        items = self._division.items(seq_lens, block_tables, self._prefixes)
        words = self._upload(items, num_rows)
        max_parts = self._division.max_parts(num_rows)
        # A captured graph holds the addresses; the memory's owner holds only the last loan.
        if self._scratch is None or not self._is_graph:
            self._scratch = self._memory.reserve(
                max_parts * params.num_heads * (params.head_size + 1),
                num_rows * params.num_kv_heads,
            )
        return DecodeItems(words, max_parts, self._scratch)

    def _upload(self, items: NDArray[np.int32], num_rows: int) -> torch.Tensor:
        size, num_words = items.size, items.shape[1]
        num_items = self._division.max_items(num_rows) if self._is_graph else len(items)
        num_copied = num_items * num_words // _WORDS_PER_COPY
        if num_copied > len(self._on_device):
            # A captured graph holds the address.
            assert not (self._is_graph and len(self._on_device))
            capacity = num_copied if self._is_graph else 1 << (num_copied - 1).bit_length()
            self._on_device = self._on_device.new_empty(capacity)
        with self._pinned.next_buffer(num_copied) as words:
            host = words.view(torch.int32).numpy()
            host[:size] = items.reshape(-1)
            # Items without work.
            host[size:] = 0
            copy_from_host(self._on_device[:num_copied], words)
        return self._on_device[:num_copied].view(torch.int32).view(num_items, num_words)
