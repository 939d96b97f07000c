"""Advances a batch of decodes by one token, on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["advance"]

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
