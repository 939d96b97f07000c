"""Kernels that copy small arrays between pinned host memory and a GPU.

A copy engine runs its copies in order. Copies of a step would wait there behind copies of swapped
blocks, so kernels access pinned memory directly instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
import triton
import triton.language as tl

from attention.kernels.triton.kernel_launcher import KernelLauncher

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["append_tokens", "copy_words", "place_tokens", "row_words"]

_Ints: TypeAlias = "NDArray[np.int64]"

_TILE = 256
_ROW_BITS = tl.constexpr(32)
"""Of a word; the other bits have the draft of a token plus one, or 0."""
_ROW_MASK = tl.constexpr((1 << 32) - 1)


@triton.jit(do_not_specialize=["num_words"])
def _copy_words(
    target: tl.tensor, source: tl.tensor, num_words: tl.tensor, tile: tl.constexpr
) -> None:
    """Copy `tile` words.

    Launched by `copy_words`; grid `(tiles of words,)`. Pointers, both int64: target, source
    `[num_words]`.
    """
    words = tl.program_id(0) * tile + tl.arange(0, tile)
    is_word = words < num_words
    tl.store(target + words, tl.load(source + words, mask=is_word), mask=is_word)


@triton.jit(do_not_specialize=["table_stride", "num_tokens", "num_others", "is_overlapped"])
def _place_tokens(
    token_ids: tl.tensor,
    positions: tl.tensor,
    others: tl.tensor,
    host: tl.tensor,
    table: tl.tensor,
    num_refused: tl.tensor,
    table_stride: tl.tensor,
    num_tokens: tl.tensor,
    num_others: tl.tensor,
    is_overlapped: tl.tensor,
    tile: tl.constexpr,
) -> None:
    """Look up or write the tokens of `tile` places, and copy as many of the other words.

    Launched by `place_tokens`; grid `(tiles of the longer part,)`. Pointers, all int64: token_ids,
    positions `[num_tokens]`, others `[num_others]`, host `[2 * num_tokens + num_others]`, table
    `[rows, table_stride]`, num_refused `[rows]`.
    """
    places = tl.program_id(0) * tile + tl.arange(0, tile)
    is_token = places < num_tokens
    is_other = places < num_others
    words = tl.load(host + places, mask=is_token, other=0)
    columns = tl.load(host + num_tokens + places, mask=is_token, other=0)
    others_read = tl.load(host + 2 * num_tokens + places, mask=is_other, other=0)
    drafts = (words >> _ROW_BITS) - 1
    is_draft = drafts >= 0
    rows = words & _ROW_MASK
    is_late = is_token & (is_overlapped != 0)
    columns -= tl.load(num_refused + rows, mask=is_late, other=0)
    entries = table + rows * table_stride + columns
    known = tl.load(entries, mask=is_token & ~is_draft, other=0)
    tokens = tl.where(is_draft, drafts, known)
    tl.store(entries, tokens, mask=is_draft)
    tl.store(token_ids + places, tokens, mask=is_token)
    tl.store(positions + places, columns, mask=is_token)
    tl.store(others + places, others_read, mask=is_other)


@triton.jit(do_not_specialize=["table_stride", "num_tokens"])
def _append_tokens(
    table: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    token_ids: tl.tensor,
    host: tl.tensor,
    table_stride: tl.tensor,
    num_tokens: tl.tensor,
    tile: tl.constexpr,
) -> None:
    """Write `tile` tokens to the table, and to the host.

    Launched by `append_tokens`; grid `(tiles of tokens,)`. Pointers, all int64: rows, columns,
    token_ids, host `[num_tokens]`, table `[rows, table_stride]`.
    """
    tokens = tl.program_id(0) * tile + tl.arange(0, tile)
    is_token = tokens < num_tokens
    row = tl.load(rows + tokens, mask=is_token, other=0)
    column = tl.load(columns + tokens, mask=is_token, other=0)
    token = tl.load(token_ids + tokens, mask=is_token, other=0)
    tl.store(table + row * table_stride + column, tl.maximum(token, 0), mask=is_token)
    tl.store(host + tokens, token, mask=is_token)


_COPY_WORDS = KernelLauncher(_copy_words)
_PLACE_TOKENS = KernelLauncher(_place_tokens)
_APPEND_TOKENS = KernelLauncher(_append_tokens)


def copy_words(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy int64 words, `[num_words]` each; one of the two may be pinned host memory."""
    assert target.dtype == source.dtype == torch.int64
    assert target.shape == source.shape
    assert target.is_contiguous()
    assert source.is_contiguous()
    if not len(target):
        return
    _COPY_WORDS.launch(_grid(len(target)), (target, source), (_TILE,), (len(target),), num_warps=4)


def row_words(rows: _Ints, draft_ids: _Ints) -> _Ints:
    """Return the words of the rows of tokens, some of which are drafts, to be written to the table.

    Both are `[num_tokens]`; tokens that are no drafts have -1, and their rows are their words.
    """
    words: _Ints = rows | (draft_ids + 1) << _ROW_BITS.value
    return words


def place_tokens(
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    others: torch.Tensor,
    host: torch.Tensor,
    table: torch.Tensor,
    num_refused: torch.Tensor,
    *,
    is_overlapped: bool,
) -> None:
    """Take the inputs of a step from pinned host memory, and its tokens from the table.

    `host` has the row of each token (see `row_words`), the position of each, and then `others`:
    int64 as all tensors here. `token_ids` and `positions` are `[num_tokens]`, `table` is
    `[num_rows, length]`. With `is_overlapped`, positions are less by `num_refused` of their rows,
    `[num_rows]`.
    """
    num_tokens = len(token_ids)
    assert len(host) == 2 * num_tokens + len(others)
    assert len(positions) == num_tokens
    assert table.is_contiguous()
    tensors = (token_ids, positions, others, host, table, num_refused)
    assert all(tensor.dtype == torch.int64 for tensor in tensors)
    numbers = table.stride(0), num_tokens, len(others), int(is_overlapped)
    grid = _grid(max(num_tokens, len(others)))
    _PLACE_TOKENS.launch(grid, tensors, (_TILE,), numbers, num_warps=4)


def append_tokens(
    table: torch.Tensor,
    rows: torch.Tensor,
    columns: torch.Tensor,
    token_ids: torch.Tensor,
    host: torch.Tensor,
) -> None:
    """Write tokens to their places in the table, and to pinned host memory.

    `rows`, `columns`, `token_ids` and `host` are int64 `[num_tokens]`. A token of -1 becomes 0 in
    the table, and stays -1 on the host.
    """
    num_tokens = len(token_ids)
    tensors = (table, rows, columns, token_ids, host)
    assert all(len(tensor) == num_tokens for tensor in tensors[1:])
    assert all(tensor.dtype == torch.int64 for tensor in tensors)
    assert table.is_contiguous()
    if not num_tokens:
        return
    numbers = table.stride(0), num_tokens
    _APPEND_TOKENS.launch(_grid(num_tokens), tensors, (_TILE,), numbers, num_warps=4)


def _grid(num_words: int) -> tuple[int, int, int]:
    return triton.cdiv(num_words, _TILE), 1, 1
