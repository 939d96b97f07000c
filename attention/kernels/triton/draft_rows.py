"""The rows of a draft head: the last accepted token of each sequence, and then its drafts.

Lengths are on the device, since the host does not know how many drafts of a step were accepted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from attention.kernels.arguments import NUM_ITEM_WORDS
from attention.kernels.triton.kernel_launcher import KernelLauncher
from attention.kernels.triton.tuning import next_power_of_two

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = [
    "MOST_PARTS",
    "BegunDrafts",
    "begin_drafts",
    "find_last_tokens",
    "key_drafts",
    "pack_drafts",
    "place_drafts",
]

MOST_PARTS = 64
"""The most programs that attend for a row and KV head; a power of two."""
_FIRST_WORD = 2
"""The words before the tokens, of which the first is the width of block tables."""
_WIDTH_TILE = 256
_ONE = 0x3FF0000000000000
"""The bits of the float64 number 1."""
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
    # Padding sees a token, so that its result is a number.
    num_keys = tl.maximum(tl.minimum(position + 1, end), 1)
    column = tl.maximum(tl.minimum(position, end - 1), 0) // block_size
    block = tl.load(tables + row * table_stride + column).to(tl.int64)
    slot = tl.where(position < end, block * block_size + position % block_size, -1)
    tl.store(slots + row, slot)
    tl.store(places + row, tl.minimum(position, last_position))

    num_tiles = (num_keys + tile_keys - 1) // tile_keys
    num_parts = tl.minimum(num_tiles, max_parts)
    parts = tl.arange(0, padded_parts)
    is_part = parts < max_parts
    item = words + (row * max_parts + parts) * (2 * num_item_words)
    tl.store(item, (parts < num_parts).to(tl.int32), mask=is_part)
    tl.store(item + 1, (parts * num_tiles // num_parts).to(tl.int32), mask=is_part)
    tl.store(item + 2, ((parts + 1) * num_tiles // num_parts).to(tl.int32), mask=is_part)
    tl.store(item + 3, parts, mask=is_part)
    item += num_item_words
    zeros = tl.zeros([padded_parts], tl.int32)
    tl.store(item, zeros + row, mask=is_part)
    tl.store(item + 1, zeros + num_keys.to(tl.int32), mask=is_part)
    tl.store(item + 2, zeros + row * max_parts, mask=is_part)
    tl.store(item + 3, zeros + num_parts.to(tl.int32), mask=is_part)


@triton.jit(do_not_specialize=["token_stride", "table_stride", "num_tokens", "num_rows"])
def _begin_drafts(
    next_ids: tl.tensor,
    places: tl.tensor,
    slots: tl.tensor,
    indices: tl.tensor,
    positions: tl.tensor,
    num_slots: tl.tensor,
    scales: tl.tensor,
    starts: tl.tensor,
    flags: tl.tensor,
    tables: tl.tensor,
    host: tl.tensor,
    host_blocks: tl.tensor,
    tokens: tl.tensor,
    token_stride: tl.tensor,
    table_stride: tl.tensor,
    num_tokens: tl.tensor,
    num_rows: tl.tensor,
    first_word: tl.constexpr,
    tile: tl.constexpr,
    width_tile: tl.constexpr,
) -> None:
    """Read a token, or a sequence, of a step.

    Launched by `begin_drafts`; grid `(num_tokens + num_rows,)`. Pointers: all are int64 but for
    tables `[num_rows, table_stride]` and host_blocks, the same memory as host, both int32.
    """
    program = tl.program_id(0)
    token_rows = host + first_word
    token_positions = token_rows + num_tokens
    if program < num_tokens:
        row = tl.load(token_rows + program)
        position = tl.load(token_positions + program)
        tl.store(next_ids + program, tl.load(tokens + row * token_stride + position + 1))
        tl.store(places + program, position)
        tl.store(slots + program, tl.load(token_positions + num_tokens + program))
    else:
        sequence = program - num_tokens
        words = token_positions + 3 * num_tokens + sequence
        first = tl.load(words)
        last = tl.load(words + num_rows) - 1
        row = tl.load(token_rows + first)
        chain = first + tl.arange(0, tile)
        is_draft = chain < last
        at = tl.load(token_positions + chain, mask=is_draft, other=0)
        sampled = tl.load(tokens + row * token_stride + at + 1, mask=is_draft, other=0)
        drafts = token_positions + 2 * num_tokens + chain + 1
        is_wrong = sampled != tl.load(drafts, mask=is_draft, other=0)
        index = tl.min(tl.where(is_draft & is_wrong, chain, last), 0)
        tl.store(indices + sequence, index)
        tl.store(positions + sequence, tl.load(token_positions + index))
        end = tl.load(words + 2 * num_rows)
        tl.store(num_slots + sequence, end)
        tl.store(scales + sequence, tl.load(words + 3 * num_rows))
        tl.store(starts + sequence, tl.load(words + 4 * num_rows))
        tl.store(flags + sequence, tl.load(words + 5 * num_rows))
        width = tl.load(host)
        blocks = host_blocks + 2 * (first_word + 4 * num_tokens + 6 * num_rows) + sequence * width
        table = tables + sequence * table_stride
        for begin in range(0, width, width_tile):
            columns = begin + tl.arange(0, width_tile)
            # Padding keeps the blocks of an earlier sequence.
            is_column = (columns < width) & (end > 0)
            tl.store(table + columns, tl.load(blocks + columns, mask=is_column), mask=is_column)


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
_BEGIN_DRAFTS = KernelLauncher(_begin_drafts)
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
    row without slots is padding, and sees any token.
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


class BegunDrafts(NamedTuple):
    """The tokens and sequences of a step of decodes, on the device; int64 but for `tables`."""

    next_ids: torch.Tensor
    """The token that follows each token, `[num_tokens]`."""
    places: torch.Tensor
    """The position of each token, `[num_tokens]`."""
    slots: torch.Tensor
    """The slot of each token, `[num_tokens]`; -1 for padding."""
    indices: torch.Tensor
    """The last token of each sequence: the token behind its last right draft, `[num_rows]`."""
    positions: torch.Tensor
    """The position of that token, `[num_rows]`."""
    num_slots: torch.Tensor
    """The slots of each sequence, `[num_rows]`; 0 for padding."""
    scales: torch.Tensor
    """The bits of float64 numbers, `[num_rows]`, and two other numbers of each sequence."""
    starts: torch.Tensor
    flags: torch.Tensor
    tables: torch.Tensor
    """The blocks of each sequence, `[num_rows, max width]` int32."""


def pack_drafts(
    host: NDArray[np.int64],
    tokens: Sequence[NDArray[np.int64]],
    sequences: Sequence[NDArray[np.int64]],
    tables: NDArray[np.int32],
    *,
    num_tokens: int,
    num_rows: int,
) -> None:
    """Write what `begin_drafts` reads.

    `tokens` are the row, the position, the slot and the draft of each token, -1 for no draft;
    `sequences` the first token, the end of the tokens, and the number of slots of each sequence,
    and then `scales`, `starts` and `flags` of `BegunDrafts`. The padding is up to `num_tokens` and
    `num_rows`. `tables` has an even width.
    """
    host[0] = tables.shape[1]
    begin = _FIRST_WORD
    for parts, size, paddings in (
        (tokens, num_tokens, (0, 0, -1, -1)),
        (sequences, num_rows, (0, 1, 0, _ONE, 0, 0)),
    ):
        for part, padding in zip(parts, paddings, strict=True):
            host[begin : begin + len(part)] = part
            host[begin + len(part) : begin + size] = padding
            begin += size
    host[begin : begin + tables.size // 2] = tables.reshape(-1).view(np.int64)


def begin_drafts(
    begun: BegunDrafts, host: torch.Tensor, tokens: torch.Tensor, *, max_num_drafts: int
) -> None:
    """Read what `pack_drafts` has written to `host`, int64 and pinned, and fill `begun`.

    `tokens` is `[max_num_rows, length]` int64, with the sampled tokens of the step.
    """
    num_tokens, num_rows = len(begun.next_ids), len(begun.indices)
    assert host.dtype == tokens.dtype == torch.int64
    assert tokens.is_contiguous()
    _BEGIN_DRAFTS.launch(
        (num_tokens + num_rows, 1, 1),
        (*begun, host, host.view(torch.int32), tokens),
        (_FIRST_WORD, next_power_of_two(max_num_drafts), _WIDTH_TILE),
        (tokens.stride(0), begun.tables.stride(0), num_tokens, num_rows),
        num_warps=1,
    )
