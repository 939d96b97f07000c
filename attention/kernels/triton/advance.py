"""Changes the lengths of decodes on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention.kernels.arguments import NUM_ITEM_WORDS
from attention.kernels.triton.kernel_launcher import KernelLauncher

__all__ = ["advance", "shorten", "shorten_items"]

_TILE = 128


@triton.jit(do_not_specialize=["table_stride", "table_width", "num_rows"])
def _advance_rows(
    seq_lens: tl.tensor,
    slot_mapping: tl.tensor,
    tables: tl.tensor,
    table_stride: tl.tensor,
    table_width: tl.tensor,
    num_rows: tl.tensor,
    block_size: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Advance `tile` rows of the batch.

    Launched by `advance`; grid `(tiles of rows,)`. Pointers: seq_lens `[B]` int32, slot_mapping
    `[>= B]` int64, tables `[>= B, width]` int32.
    """
    rows = tl.program_id(0) * tile + tl.arange(0, tile)
    is_row = rows < num_rows
    lengths = tl.load(seq_lens + rows, mask=is_row, other=0)
    is_decode = is_row & (lengths > 0)
    columns = lengths // block_size
    has_room = is_decode & (columns < table_width)
    entries = tables + rows.to(tl.int64) * table_stride + columns
    blocks = tl.load(entries, mask=has_room, other=0).to(tl.int64)
    slots = tl.where(has_room, blocks * block_size + lengths % block_size, -1)
    tl.store(slot_mapping + rows, slots, mask=is_decode)
    tl.store(seq_lens + rows, lengths + 1, mask=has_room)


@triton.jit(do_not_specialize=["table_stride", "num_rows"])
def _shorten_rows(
    seq_lens: tl.tensor,
    slot_mapping: tl.tensor,
    tables: tl.tensor,
    excess: tl.tensor,
    table_stride: tl.tensor,
    num_rows: tl.tensor,
    block_size: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Shorten `tile` rows.

    Launched by `shorten`; grid `(tiles of rows,)`. Pointers: seq_lens `[B]` int32, slot_mapping
    `[B]` int64, tables `[B, table_stride]` int32, excess `[B]` int64.
    """
    rows = tl.program_id(0) * tile + tl.arange(0, tile)
    is_row = rows < num_rows
    lengths = tl.load(seq_lens + rows, mask=is_row, other=1)
    lengths -= tl.load(excess + rows, mask=is_row, other=0).to(tl.int32)
    places = lengths - 1
    entries = tables + rows.to(tl.int64) * table_stride + places // block_size
    blocks = tl.load(entries, mask=is_row, other=0).to(tl.int64)
    tl.store(slot_mapping + rows, blocks * block_size + places % block_size, mask=is_row)
    tl.store(seq_lens + rows, lengths, mask=is_row)


@triton.jit(do_not_specialize=["num_places", "rows_per_item", "num_rows"])
def _shorten_items(
    words: tl.tensor,
    excess: tl.tensor,
    num_places: tl.tensor,
    rows_per_item: tl.tensor,
    num_rows: tl.tensor,
    item_words: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Shorten `tile` rows of items.

    Launched by `shorten_items`; grid `(tiles of rows of items,)`. Pointers: words
    `[num_places / rows_per_item, (1 + rows_per_item) * item_words]` int32, excess `[B]` int64.
    """
    places = tl.program_id(0) * tile + tl.arange(0, tile)
    is_place = places < num_places
    item = words + places // rows_per_item * ((1 + rows_per_item) * item_words)
    place = places % rows_per_item
    is_place &= place < tl.load(item, mask=is_place, other=0)
    of_row = item + (1 + place) * item_words
    rows = tl.load(of_row, mask=is_place, other=0)
    is_place &= rows < num_rows
    lengths = tl.load(of_row + 1, mask=is_place, other=0)
    lengths -= tl.load(excess + rows, mask=is_place, other=0).to(tl.int32)
    tl.store(of_row + 1, lengths, mask=is_place)


_SHORTEN_ROWS = KernelLauncher(_shorten_rows)
_SHORTEN_ITEMS = KernelLauncher(_shorten_items)


def advance(
    seq_lens: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    block_size: int,
) -> None:
    """Advance each sequence by one token: increment its length, and write its next slot.

    `seq_lens` is int32 `[B]`, `slot_mapping` int64 `[>= B]`, `block_tables` int32 `[>= B, width]`.
    Rows of length 0 are padding and are left unchanged. A row without a block for the next token
    keeps its length and gets slot -1.
    """
    num_rows = len(seq_lens)
    assert seq_lens.dtype == block_tables.dtype == torch.int32
    assert slot_mapping.dtype == torch.int64
    assert all(t.is_contiguous() for t in (seq_lens, slot_mapping))
    assert block_tables.stride(1) == 1
    assert num_rows <= min(len(slot_mapping), len(block_tables))
    if not num_rows:
        return
    _advance_rows[(triton.cdiv(num_rows, _TILE),)](
        seq_lens,
        slot_mapping,
        block_tables,
        block_tables.stride(0),
        block_tables.shape[1],
        num_rows,
        block_size=block_size,
        tile=_TILE,
        num_warps=4,
    )


def shorten(
    seq_lens: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_tables: torch.Tensor,
    excess: torch.Tensor,
    *,
    block_size: int,
) -> None:
    """Subtract the excess of each sequence from its length, and write the slot of its last token.

    `seq_lens` is int32, `slot_mapping` int64, `block_tables` int32 `[>= B, width]`, and `excess`
    int64 `[B]`; lengths and slots of other sequences are left unchanged.
    """
    num_rows = len(excess)
    assert seq_lens.dtype == block_tables.dtype == torch.int32
    assert slot_mapping.dtype == excess.dtype == torch.int64
    assert block_tables.stride(1) == 1
    _SHORTEN_ROWS.launch(
        (triton.cdiv(num_rows, _TILE), 1, 1),
        (seq_lens, slot_mapping, block_tables, excess),
        (block_size, _TILE),
        (block_tables.stride(0), num_rows),
        num_warps=4,
    )


def shorten_items(words: torch.Tensor, excess: torch.Tensor) -> None:
    """Subtract the excess of each sequence, `[B]` int64, from its lengths in `DecodeItems.words`.

    Its keys up to the shorter length are read as they are divided: some items may have none.
    """
    num_items, width = words.shape
    rows_per_item = width // NUM_ITEM_WORDS - 1
    assert words.dtype == torch.int32
    assert words.is_contiguous()
    _SHORTEN_ITEMS.launch(
        (triton.cdiv(num_items * rows_per_item, _TILE), 1, 1),
        (words, excess),
        (NUM_ITEM_WORDS, _TILE),
        (num_items * rows_per_item, rows_per_item, len(excess)),
        num_warps=4,
    )
