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
    "MOST_COUNTED",
    "MOST_PARTS",
    "BegunDrafts",
    "begin_drafts",
    "count_refused",
    "key_drafts",
    "num_words",
    "pack_drafts",
    "place_drafts",
    "publish_drafts",
]

MOST_PARTS = 64
"""The most programs that attend for a row and KV head; a power of two."""
MOST_COUNTED = 256
"""The most drafts of a chain that are counted."""
_FIRST_WORD = 2
"""The words before the sequences: the width of block tables, and the number of tokens."""
_NUM_SEQUENCE_WORDS = 7
_WIDTH_TILE = 256
_ONE = 0x3FF0000000000000
"""The bits of the float64 number 1."""
_TILE = 128


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


@triton.jit(do_not_specialize=["token_stride", "table_stride", "num_places", "num_rows"])
def _begin_drafts(
    next_ids: tl.tensor,
    places: tl.tensor,
    slots: tl.tensor,
    indices: tl.tensor,
    last_ids: tl.tensor,
    positions: tl.tensor,
    num_slots: tl.tensor,
    scales: tl.tensor,
    starts: tl.tensor,
    flags: tl.tensor,
    tables: tl.tensor,
    words: tl.tensor,
    blocks: tl.tensor,
    step_ids: tl.tensor,
    step_positions: tl.tensor,
    tokens: tl.tensor,
    token_stride: tl.tensor,
    table_stride: tl.tensor,
    num_places: tl.tensor,
    num_rows: tl.tensor,
    first_word: tl.constexpr,
    num_sequence_words: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    width_tile: tl.constexpr,
) -> None:
    """Find the last token of a sequence, or mark `width_tile` tokens as padding.

    Launched by `begin_drafts`; grid `(num_rows + tiles of places,)`. Pointers: all are int64 but
    for tables `[num_rows, table_stride]` and blocks, the same memory as words, both int32. Without
    places, step_ids and step_positions are those of the step, and the others are not used.
    """
    program = tl.program_id(0)
    width = tl.load(words)
    num_tokens = tl.load(words + 1)
    if program >= num_rows:
        token = (program - num_rows) * width_tile + tl.arange(0, width_tile)
        tl.store(slots + token, -1, mask=(token >= num_tokens) & (token < num_places))
        return
    sequence = words + first_word + program
    row = tl.load(sequence)
    first = tl.load(sequence + num_rows)
    last = tl.load(sequence + 2 * num_rows) - 1
    end = tl.load(sequence + 3 * num_rows)
    chain = first + tl.arange(0, tile)
    is_token = (chain <= last) & (end > 0)
    is_draft = (chain < last) & (end > 0)
    at = tl.load(step_positions + chain, mask=is_token, other=0)
    sampled = tl.load(tokens + row * token_stride + at + 1, mask=is_token, other=0)
    is_wrong = is_draft & (sampled != tl.load(step_ids + chain + 1, mask=is_draft, other=0))
    index = tl.min(tl.where(is_wrong, chain, last), 0)
    tl.store(indices + program, index)
    position = tl.load(step_positions + index)
    tl.store(positions + program, position)
    tl.store(last_ids + program, tl.load(tokens + row * token_stride + position + 1))
    tl.store(num_slots + program, end)
    tl.store(scales + program, tl.load(sequence + 4 * num_rows))
    tl.store(starts + program, tl.load(sequence + 5 * num_rows))
    tl.store(flags + program, tl.load(sequence + 6 * num_rows))
    own = blocks + 2 * (first_word + num_sequence_words * num_rows) + program * width
    is_place = is_token & (chain < num_places)
    tl.store(next_ids + chain, sampled, mask=is_place)
    tl.store(places + chain, at, mask=is_place)
    block = tl.load(own + at // block_size, mask=is_place, other=0).to(tl.int64)
    tl.store(slots + chain, block * block_size + at % block_size, mask=is_place)
    table = tables + program * table_stride
    for begin in range(0, width, width_tile):
        columns = begin + tl.arange(0, width_tile)
        # Padding keeps the blocks of an earlier sequence.
        is_column = (columns < width) & (end > 0)
        tl.store(table + columns, tl.load(own + columns, mask=is_column), mask=is_column)


@triton.jit(do_not_specialize=["token_stride"])
def _count_refused(
    num_refused: tl.tensor,
    rows: tl.tensor,
    firsts: tl.tensor,
    ends: tl.tensor,
    step_ids: tl.tensor,
    step_positions: tl.tensor,
    tokens: tl.tensor,
    token_stride: tl.tensor,
    tile: tl.constexpr,
) -> None:
    """Count the wrong drafts of a chain.

    Launched by `count_refused`; grid `(num_chains,)`. Pointers, all int64: num_refused `[rows]`,
    rows, firsts, ends `[num_chains]`, step_ids, step_positions `[num_tokens]`, tokens
    `[rows, token_stride]`.
    """
    program = tl.program_id(0)
    row = tl.load(rows + program)
    first = tl.load(firsts + program)
    last = tl.load(ends + program) - 1
    chain = first + tl.arange(0, tile)
    is_draft = chain < last
    at = tl.load(step_positions + chain, mask=is_draft, other=0)
    sampled = tl.load(tokens + row * token_stride + at + 1, mask=is_draft, other=0)
    is_wrong = is_draft & (sampled != tl.load(step_ids + chain + 1, mask=is_draft, other=0))
    tl.store(num_refused + row, last - tl.min(tl.where(is_wrong, chain, last), 0))


@triton.jit(do_not_specialize=["token_stride", "draft_stride", "num_drafts", "num_rows"])
def _publish_drafts(
    host: tl.tensor,
    tokens: tl.tensor,
    num_refused: tl.tensor,
    drafts: tl.tensor,
    words: tl.tensor,
    indices: tl.tensor,
    positions: tl.tensor,
    token_stride: tl.tensor,
    draft_stride: tl.tensor,
    num_drafts: tl.tensor,
    num_rows: tl.tensor,
    first_word: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Write the drafts of a sequence, and how many drafts of its chain were wrong.

    Launched by `publish_drafts`; grid `(num_sequences,)`. Pointers, all int64: host
    `[num_sequences, num_drafts]`, tokens `[rows, token_stride]`, num_refused `[rows]`, drafts
    `[num_sequences, draft_stride]`, words as `_begin_drafts`, indices, positions `[num_rows]`.
    """
    program = tl.program_id(0).to(tl.int64)
    sequence = words + first_word + program
    row = tl.load(sequence)
    last = tl.load(sequence + 2 * num_rows) - 1
    tl.store(num_refused + row, last - tl.load(indices + program))
    places = tl.arange(0, tile)
    is_draft = places < num_drafts
    found = tl.load(drafts + program * draft_stride + places, mask=is_draft)
    tl.store(host + program * num_drafts + places, found, mask=is_draft)
    columns = tl.load(positions + program) + 2 + places
    is_draft = is_draft & (columns < token_stride)
    tl.store(tokens + row * token_stride + columns, found, mask=is_draft)


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


_PLACE_DRAFTS = KernelLauncher(_place_drafts)
_BEGIN_DRAFTS = KernelLauncher(_begin_drafts)
_COUNT_REFUSED = KernelLauncher(_count_refused)
_PUBLISH_DRAFTS = KernelLauncher(_publish_drafts)
_KEY_DRAFTS = KernelLauncher(_key_drafts)


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
    """The tokens and sequences of a step, on the device; int64 but for `tables`."""

    next_ids: torch.Tensor
    """The token that follows each token of a step of decodes, `[num_places]`; empty for steps with
    prompts, and so are the next two."""
    places: torch.Tensor
    """The position of each token, `[num_places]`."""
    slots: torch.Tensor
    """The slot of each token, `[num_places]`; -1 for padding."""
    indices: torch.Tensor
    """The last token of each sequence: the token behind its last right draft, `[num_rows]`."""
    last_ids: torch.Tensor
    """The token that follows it, `[num_rows]`."""
    positions: torch.Tensor
    """The position of the last token, `[num_rows]`."""
    num_slots: torch.Tensor
    """The slots of each sequence, `[num_rows]`; 0 for padding."""
    scales: torch.Tensor
    """The bits of float64 numbers, `[num_rows]`, and two other numbers of each sequence."""
    starts: torch.Tensor
    flags: torch.Tensor
    tables: torch.Tensor
    """The blocks of each sequence, `[num_rows, max width]` int32."""


def num_words(num_rows: int, max_width: int) -> int:
    """Return the words that `pack_drafts` writes at most."""
    return _FIRST_WORD + num_rows * (_NUM_SEQUENCE_WORDS + max_width // 2)


def pack_drafts(
    words: NDArray[np.int64],
    sequences: Sequence[NDArray[np.int64]],
    tables: NDArray[np.int32],
    *,
    num_tokens: int,
    num_rows: int,
) -> None:
    """Write what `begin_drafts` reads.

    `sequences` are the row, the first token of the step, the end of the tokens, and the number of
    slots of each sequence, and then `scales`, `starts` and `flags` of `BegunDrafts`; they are
    padded to `num_rows`. `tables` has an even width. The step has `num_tokens`.
    """
    words[0], words[1] = tables.shape[1], num_tokens
    begin = _FIRST_WORD
    for part, padding in zip(sequences, (0, 0, 1, 0, _ONE, 0, 0), strict=True):
        words[begin : begin + len(part)] = part
        words[begin + len(part) : begin + num_rows] = padding
        begin += num_rows
    words[begin : begin + tables.size // 2] = tables.reshape(-1).view(np.int64)


def begin_drafts(
    begun: BegunDrafts,
    words: torch.Tensor,
    step: tuple[torch.Tensor, torch.Tensor],
    tokens: torch.Tensor,
    *,
    block_size: int,
    max_num_drafts: int,
) -> None:
    """Read what `pack_drafts` has written to `words`, int64 on the device, and fill `begun`.

    `step` are the tokens of the step and their positions, `[num_tokens]` int64, and `tokens` is
    `[max_num_rows, length]` int64, with the sampled tokens of the step.
    """
    num_places, num_rows = len(begun.next_ids), len(begun.indices)
    tile = next_power_of_two(max_num_drafts + 1)
    assert words.dtype == tokens.dtype == torch.int64
    assert all(tensor.dtype == torch.int64 for tensor in step)
    assert tokens.is_contiguous()
    _BEGIN_DRAFTS.launch(
        (num_rows + triton.cdiv(num_places, _WIDTH_TILE), 1, 1),
        (*begun, words, words.view(torch.int32), *step, tokens),
        (_FIRST_WORD, _NUM_SEQUENCE_WORDS, block_size, tile, _WIDTH_TILE),
        (tokens.stride(0), begun.tables.stride(0), num_places, num_rows),
        num_warps=1,
    )


def count_refused(
    num_refused: torch.Tensor,
    chains: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    step: tuple[torch.Tensor, torch.Tensor],
    tokens: torch.Tensor,
) -> None:
    """Write how many drafts of each chain are wrong to `num_refused` of its row, `[max_num_rows]`.

    `chains` are the row, the first token of the step and the end of the tokens of each, with at
    most `MOST_COUNTED` drafts. `step` and `tokens` as in `begin_drafts`; all are int64.
    """
    tensors = (num_refused, *chains, *step, tokens)
    assert all(tensor.dtype == torch.int64 for tensor in tensors)
    grid = len(chains[0]), 1, 1
    _COUNT_REFUSED.launch(grid, tensors, (MOST_COUNTED,), (tokens.stride(0),), num_warps=1)


def publish_drafts(
    host: torch.Tensor,
    tokens: torch.Tensor,
    num_refused: torch.Tensor,
    drafts: torch.Tensor,
    words: torch.Tensor,
    begun: BegunDrafts,
) -> None:
    """Write drafts to pinned memory, and behind the tokens of their rows.

    `host` is `[num_sequences, num_drafts]`, and the first of `drafts`, `[num_rows, most]`, are
    written; `tokens` and `words` as in `begin_drafts`. `num_refused`, `[max_num_rows]`, gets how
    many drafts of the chain of each sequence were wrong. All are int64.
    """
    num_sequences, num_drafts = host.shape
    assert host.dtype == num_refused.dtype == drafts.dtype == torch.int64
    assert drafts.stride(1) == 1
    _PUBLISH_DRAFTS.launch(
        (num_sequences, 1, 1),
        (host, tokens, num_refused, drafts, words, begun.indices, begun.positions),
        (_FIRST_WORD, next_power_of_two(drafts.shape[1])),
        (tokens.stride(0), drafts.stride(0), num_drafts, len(begun.indices)),
        num_warps=1,
    )
