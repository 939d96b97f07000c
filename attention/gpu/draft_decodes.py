"""The attention of a draft head on a GPU: decodes of one layer with lengths on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attention.kernels.arguments import (
    NUM_ITEM_WORDS,
    DecodeItems,
    num_multiprocessors,
)

if TYPE_CHECKING:
    from attention.abstract import AttentionInputs
    from attention.gpu.decode_schedule import DecodeMemory
    from attention.gpu.metadata import GpuMetadataBuilder
    from attention.kernels.triton.paged_decode import PagedDecode

__all__ = ["DraftDecodes"]

_PROGRAMS_PER_MULTIPROCESSOR = 2


class DraftDecodes:
    """One token of each of several rows at a time, over the cache of one layer."""

    def __init__(
        self,
        builder: GpuMetadataBuilder,
        layer_index: int,
        kv_cache: torch.Tensor,
        *,
        positions: torch.Tensor,
        num_slots: torch.Tensor,
        tables: torch.Tensor,
        last_position: int,
        memory: DecodeMemory,
    ) -> None:
        """All as in `place_drafts`. `builder` knows the layers of the cache.

        Others that are launched on the same stream may share `memory`.
        """
        # Imported here so that this module can be imported without Triton.
        from attention.kernels.triton.draft_rows import MOST_PARTS
        from attention.kernels.triton.tuning import AttentionOptions, default_decode_tuning

        params, _ = builder.layer(layer_index)
        num_rows, device = len(positions), positions.device
        self._builder = builder
        self._layer_index = layer_index
        self._kv_cache = kv_cache
        self._cache = builder.layer_cache(layer_index, kv_cache)
        self._positions, self._num_slots, self._tables = positions, num_slots, tables
        self._last_position = last_position
        self._tuning = default_decode_tuning(
            num_queries_per_kv=params.num_queries_per_kv,
            head_size=params.head_size,
            dtype=builder.spec.dtype,
        )
        self._options = AttentionOptions(
            scale=params.scale,
            window_left=-1,
            window_right=0,
            soft_cap=params.soft_cap,
            alibi_slopes=None,
            k_scale=self._cache.k_scale,
            v_scale=self._cache.v_scale,
        )
        programs = _PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(device)
        parts = max(1, min(MOST_PARTS, programs // (num_rows * params.num_kv_heads)))
        num_parts = num_rows * parts
        words = torch.empty((num_parts, 2 * NUM_ITEM_WORDS), dtype=torch.int32, device=device)
        size = num_parts * params.num_heads * (params.head_size + 1)
        self._items = DecodeItems(
            words=words,
            max_parts=num_parts,
            scratch=memory.reserve(size, num_rows * params.num_kv_heads),
        )
        self.places = torch.empty_like(positions)
        """The positions of the tokens that are attended for, `[num_rows]` int64."""
        self._slots = torch.empty_like(positions)
        self._decode: PagedDecode | None = None

    def place(self, number: int) -> None:
        """Prepare the tokens `number` positions behind the first.

        At least one kernel that waits for all earlier ones must follow before `attend`, which reads
        this early: any kernel of torch.
        """
        from attention.kernels.triton.draft_rows import place_drafts

        place_drafts(
            self.places,
            self._slots,
            self._items.words,
            positions=self._positions,
            num_slots=self._num_slots,
            tables=self._tables,
            number=number,
            last_position=self._last_position,
            block_size=self._builder.spec.block_size,
            tile_keys=self._tuning.tile_keys,
        )

    def attend(self, inputs: AttentionInputs) -> torch.Tensor:
        """Write keys and values, and return the attention, of the query's shape."""
        from attention.kernels.triton.paged_decode import PagedDecode

        assert inputs.key is not None
        assert inputs.value is not None
        index = self._layer_index
        self._builder.write_layer(index, inputs.key, inputs.value, self._kv_cache, self._slots)
        out = torch.empty_like(inputs.query, memory_format=torch.contiguous_format)
        if self._decode is None or not self._decode.fits(
            inputs.query, self._cache.blocks, out, self._options, None
        ):
            self._decode = PagedDecode(
                inputs.query,
                self._cache.blocks,
                out,
                block_tables=self._tables,
                items=self._items,
                options=self._options,
                tuning=self._tuning,
            )
        self._decode.launch(inputs.query, self._cache.keys, self._cache.values, out)
        return out
