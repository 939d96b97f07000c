"""The attention of drafters on a GPU: decodes with lengths on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attention.kernels.arguments import NUM_ITEM_WORDS, DecodeItems, num_multiprocessors
from attention.kernels.triton.draft_rows import MOST_PARTS, place_drafts
from attention.kernels.triton.paged_decode import PagedDecode
from attention.kernels.triton.tuning import AttentionOptions, default_decode_tuning

if TYPE_CHECKING:
    from attention.abstract import AttentionInputs
    from attention.gpu.decode_schedule import DecodeMemory
    from attention.gpu.metadata import GpuMetadataBuilder

__all__ = ["DraftDecodes"]

_PROGRAMS_PER_MULTIPROCESSOR = 2


class DraftDecodes:
    """One token of each of several rows at a time, over the cache of layers that are alike."""

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
        """All as in `place_drafts`. `builder` knows the layers; one of them is `layer_index`.

        Others that are launched on the same stream may share `memory`.
        """
        params, _ = builder.layer(layer_index)
        num_rows, device = len(positions), positions.device
        self._builder = builder
        self._kv_cache = kv_cache
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
        self._decodes: dict[int, PagedDecode] = {}
        """The launches of each layer."""

    def place(self, number: int) -> None:
        """Prepare the tokens `number` positions behind the first.

        At least one kernel that waits for all earlier ones must follow before `attend`, which reads
        this early: any kernel of torch.
        """
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

    def attend(self, layer_index: int, inputs: AttentionInputs) -> torch.Tensor:
        """Write keys and values of a layer; return its attention, of the query's shape."""
        assert inputs.key is not None
        assert inputs.value is not None
        kv_cache, query = self._kv_cache, inputs.query
        self._builder.write_layer(layer_index, inputs.key, inputs.value, kv_cache, self._slots)
        cache = self._builder.layer_cache(layer_index, kv_cache)
        options = replace(self._options, k_scale=cache.k_scale, v_scale=cache.v_scale)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        decode = self._decodes.get(layer_index)
        if decode is None or not decode.fits(query, cache.blocks, out, options, None):
            decode = self._decodes[layer_index] = PagedDecode(
                query,
                cache.blocks,
                out,
                block_tables=self._tables,
                items=self._items,
                options=options,
                tuning=self._tuning,
            )
        decode.launch(query, cache.keys, cache.values, out)
        return out
