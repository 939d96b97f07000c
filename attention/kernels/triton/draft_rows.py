"""The rows of a draft head: the last accepted token of each sequence, and then its drafts.

Lengths are on the device, since the host does not know how many drafts of a step were accepted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention.kernels.arguments import NUM_ITEM_WORDS
from attention.kernels.triton.kernel_launcher import KernelLauncher
from attention.kernels.triton.tuning import next_power_of_two

__all__ = ["MOST_PARTS", "find_last_tokens", "key_drafts", "place_drafts"]

MOST_PARTS = 64
"""The most programs that attend for a row and KV head; a power of two."""
_TILE = 128


@triton.jit
def _find_last_tokens(
    indices: tl.tensor,
    token_ids: tl.tensor,
    draft_ids: tl.tensor,
    firsts: tl.tensor,
    ends: tl.tensor,
    tile: tl.constexpr,
) -> None:
    """Find the last token of a sequence.

    Launched by `find_last_tokens`; grid `(num_sequences,)`. Pointers, all int64: indices, firsts,
    ends `[num_sequences]`, token_ids, draft_ids `[num_sampled]`.
    """
    sequence = tl.program_id(0)
    first = tl.load(firsts + sequence)
    last = tl.load(ends + sequence) - 1
    places = first + tl.arange(0, tile)
    is_draft = places < last
    sampled = tl.load(token_ids + places, mask=is_draft, other=0)
    drafts = tl.load(draft_ids + places + 1, mask=is_draft, other=0)
    tl.store(indices + sequence, tl.min(tl.where(is_draft & (sampled != drafts), places, last), 0))


@triton.jit(do_not_specialize=["table_stride", "number", "last_position", "max_parts"])
def _place_drafts(
    places: tl.tensor,
    slots: tl.tensor,
    words: tl.tensor,
    positions: tl.tensor,
    num_slots: tl.tensor,
    tables: tl.tensor,
    table_stride: tl.tensor,
    number: tl.tensor,
    last_position: tl.tensor,
    max_parts: tl.tensor,
    block_size: tl.constexpr,
    tile_keys: tl.constexpr,
    padded_parts: tl.constexpr,
    num_item_words: tl.constexpr,
) -> None:
    """Place the token of a row, and divide its keys.

    Launched by `place_drafts`; grid `(num_rows,)`. Pointers: places, slots, positions, num_slots
    `[num_rows]` int64; words `[num_rows * max_parts, 2 * num_item_words]` int32; tables
    `[num_rows, table_stride]` int32.
    """
    row = tl.program_id(0)
    position = tl.load(positions + row) + number
    end = tl.load(num_slots + row)
    num_keys = tl.minimum(position + 1, end)
    column = tl.maximum(tl.minimum(position, end - 1), 0) // block_size
    block = tl.load(tables + row * table_stride + column).to(tl.int64)
    slot = tl.where(position < end, block * block_size + position % block_size, -1)
    tl.store(slots + row, slot)
    tl.store(places + row, tl.minimum(position, last_position))

    num_tiles = (num_keys + tile_keys - 1) // tile_keys
    num_parts = tl.minimum(num_tiles, max_parts)
    divisor = tl.maximum(num_parts, 1)
    parts = tl.arange(0, padded_parts)
    is_part = parts < max_parts
    item = words + (row * max_parts + parts) * (2 * num_item_words)
    tl.store(item, (parts < num_parts).to(tl.int32), mask=is_part)
    tl.store(item + 1, (parts * num_tiles // divisor).to(tl.int32), mask=is_part)
    tl.store(item + 2, ((parts + 1) * num_tiles // divisor).to(tl.int32), mask=is_part)
    tl.store(item + 3, parts, mask=is_part)
    item += num_item_words
    zeros = tl.zeros([padded_parts], tl.int32)
    tl.store(item, zeros + row, mask=is_part)
    tl.store(item + 1, zeros + num_keys.to(tl.int32), mask=is_part)
    tl.store(item + 2, zeros + row * max_parts, mask=is_part)
    tl.store(item + 3, zeros + num_parts.to(tl.int32), mask=is_part)


@triton.jit(do_not_specialize=["number", "num_rows"])
def _key_drafts(
    keys: tl.tensor,
    starts: tl.tensor,
    positions: tl.tensor,
    number: tl.tensor,
    num_rows: tl.tensor,
    tile: tl.constexpr,
) -> None:
    """Compute the keys of `tile` rows.

    Launched by `key_drafts`; grid `(tiles of rows,)`. Pointers, all int64: keys, starts, positions
    `[num_rows]`.
    """
    rows = tl.program_id(0) * tile + tl.arange(0, tile)
    is_row = rows < num_rows
    places = tl.load(positions + rows, mask=is_row, other=0) + number
    words = tl.load(starts + rows, mask=is_row, other=0).to(tl.uint64, bitcast=True)
    words += places.to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    words = (words ^ (words >> 30)) * 0xBF58476D1CE4E5B9
    words = (words ^ (words >> 27)) * 0x94D049BB133111EB
    words = words ^ (words >> 31)
    tl.store(keys + rows, words.to(tl.int64, bitcast=True), mask=is_row)


_FIND_LAST_TOKENS = KernelLauncher(_find_last_tokens)
_PLACE_DRAFTS = KernelLauncher(_place_drafts)
_KEY_DRAFTS = KernelLauncher(_key_drafts)


def find_last_tokens(
    token_ids: torch.Tensor,
    draft_ids: torch.Tensor,
    firsts: torch.Tensor,
    ends: torch.Tensor,
    *,
    max_num_drafts: int,
) -> torch.Tensor:
    """Return the index of the token behind the last right draft of each sequence.

    All are int64. `token_ids`, `[num_sampled]`, are sampled tokens, and `draft_ids` the drafts that
    they were sampled behind, -1 for none. The tokens of a sequence, at most one more than
    `max_num_drafts`, are from `firsts` to before `ends`, `[num_sequences]` each.
    """
    tensors = (torch.empty_like(firsts), token_ids, draft_ids, firsts, ends)
    assert all(tensor.dtype == torch.int64 and tensor.is_contiguous() for tensor in tensors)
    tile = next_power_of_two(max_num_drafts)
    _FIND_LAST_TOKENS.launch((len(firsts), 1, 1), tensors, (tile,), num_warps=1)
    return tensors[0]


def place_drafts(
    places: torch.Tensor,
    slots: torch.Tensor,
    words: torch.Tensor,
    *,
    positions: torch.Tensor,
    num_slots: torch.Tensor,
    tables: torch.Tensor,
    number: int,
    last_position: int,
    block_size: int,
    tile_keys: int,
) -> None:
    """Write where the drafts number `number` of rows are, and the items of their attention.

    Draft 0 is at `positions`. `places`, `slots`, `positions` and `num_slots` are `[num_rows]`
    int64; `places` are at most `last_position`. Rows have blocks of `num_slots` tokens, `tables`
    `[num_rows, width]` int32; a draft without a block gets slot -1, and sees these tokens alone. A
    row without slots is padding, and has no items.
    `words` is that of `DecodeItems`, with as many items for each row, at most `MOST_PARTS`.
    """
    num_rows = len(positions)
    max_parts = len(words) // num_rows
    assert words.shape == (num_rows * max_parts, 2 * NUM_ITEM_WORDS)
    assert words.dtype == tables.dtype == torch.int32
    assert max_parts <= MOST_PARTS
    _PLACE_DRAFTS.launch(
        (num_rows, 1, 1),
        (places, slots, words, positions, num_slots, tables),
        (block_size, tile_keys, MOST_PARTS, NUM_ITEM_WORDS),
        (tables.stride(0), number, last_position, max_parts),
        num_warps=1,
    )


def key_drafts(
    keys: torch.Tensor, *, starts: torch.Tensor, positions: torch.Tensor, number: int
) -> None:
    """Write the keys of noise, as `noise_keys` returns them, `number` positions behind `positions`.

    All are int64 `[num_rows]`; `starts` are the starts of generators.
    """
    num_rows = len(keys)
    _KEY_DRAFTS.launch(
        (triton.cdiv(num_rows, _TILE), 1, 1),
        (keys, starts, positions),
        (_TILE,),
        (number, num_rows),
        num_warps=4,
    )
