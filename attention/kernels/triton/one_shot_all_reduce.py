"""One-shot all-reduce over the GPUs of one node, fused with the residual addition and the norm.

Every rank writes its rows into the memory of every other rank, and adds the rows that it has
received. The data are their own flag, as in the Lamport kernels of TensorRT-LLM: an empty place
holds a bit pattern that data never have, and a rank polls its inbox until no place is empty. So no
barrier or fence is needed, and nothing but the data crosses NVLink. For the few rows of a decode
step, this takes as long as one write over NVLink, while a ring of NCCL has several steps and the
norm is another kernel.

A rank empties a place as soon as it has read it. Even and odd launches use separate places: a rank
writes to the same place two launches later. By then it has received rows of the launch in between,
which the other ranks sent after they had emptied the place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from attention.kernels.triton.kernel_launcher import (
    KernelLauncher,
    can_depend,
    launch_options,
    wait_for_inputs,
)
from attention.kernels.triton.received_rows import finish_row, stream_row
from attention.kernels.triton.tuning import next_power_of_two

__all__ = [
    "EMPTY_BYTE",
    "PROGRAMS_PER_SM",
    "Inboxes",
    "all_reduce_add_norm",
    "all_reduce_rows",
    "inbox_bytes",
]

EMPTY_BYTE = 0xFF
"""Each byte of an inbox before the first launch."""
PROGRAMS_PER_SM = 2
"""Programs that every multiprocessor can run at the same time."""
_REGISTERS_PER_SM = 65536
_MAX_REGISTERS = 255
_WORD_BYTES = 4
_WARP_SIZE = 32
_MAX_THREADS = tl.constexpr(512)
_EMPTY = tl.constexpr(-1)
"""A word of an empty place: in every dtype a NaN with a sign that no arithmetic produces."""
_OTHER_NAN = tl.constexpr(0x7FFF7FFF)
_LOOKAHEAD = tl.constexpr(4)
"""Rows that a program sends before it waits for the first of them."""
_POLLS_OF_A_TURN = tl.constexpr(64)
"""Number of polls after which the next program reads host memory."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inboxes:
    """The memory into which the ranks of a group write, as one rank sees it."""

    addresses: torch.Tensor
    """int64 `[size + 2]`: the address in this process of the inbox of each rank, the address of an
    int32 in host memory that ends all waits when it is not zero, and a flag that programs set to 1
    when they have seen the end.
    """
    num_launches: torch.Tensor
    """int32 `[max_rows]`: how often each row was sent, which the kernels count. If the counts of
    two ranks differ, their launches never end."""
    rank: int
    size: int
    max_programs: int
    """Maximum number of programs of a launch, the same on all ranks: `PROGRAMS_PER_SM` for each
    multiprocessor. With more, launches could deadlock, as GPUs start programs in any order."""
    width: int
    """Elements of a row, the same in all launches."""
    dtype: torch.dtype

    @property
    def max_rows(self) -> int:
        """The most rows of a launch."""
        return len(self.num_launches)


def inbox_bytes(max_rows: int, width: int, dtype: torch.dtype, size: int) -> int:
    """Return the size in bytes of an inbox, into which the other ranks of a group write."""
    return 2 * (size - 1) * max_rows * width * dtype.itemsize


@triton.jit
def _num_aborted(num_polls: tl.tensor, abort: tl.tensor, tile: tl.constexpr) -> tl.tensor:
    """Return a positive number if waits must end; `abort` points to the last two of `addresses`.

    If all programs read host memory at once, this takes a millisecond, during which the other ranks
    wait and also begin to read it. Programs therefore take turns, and set a flag in device memory
    for the others.
    """
    if (num_polls // _POLLS_OF_A_TURN - 1) % tl.num_programs(0) == tl.program_id(0):
        host_word = tl.load(abort).to(tl.pointer_type(tl.int32))
        if tl.load(host_word, volatile=True) != 0:
            tl.store(abort + 1, 1)
    # Warps may load different values, but the sum is the same for all of them.
    return tl.sum(tl.load(abort + 1 + tl.zeros([tile], tl.int32), volatile=True))


@triton.jit
def _received(inbox: tl.tensor, is_word: tl.tensor, abort: tl.tensor) -> tl.tensor:
    """Wait until all of these words have arrived; return them, int32, and empty their places."""
    words = tl.load(inbox, mask=is_word, other=0, volatile=True)
    num_missing = tl.sum((words == _EMPTY).to(tl.int32))
    num_polls = 0
    while num_missing > 0:
        words = tl.load(inbox, mask=is_word, other=0, volatile=True)
        num_missing = tl.sum((words == _EMPTY).to(tl.int32))
        num_polls += 1
        # Triton's `and` evaluates both operands, and so would always call the function.
        if num_polls % _POLLS_OF_A_TURN == 0:  # noqa: SIM102
            if _num_aborted(num_polls, abort, min(words.shape[0], _MAX_THREADS)) > 0:
                num_missing = 0
    tl.store(inbox, tl.full(words.shape, _EMPTY, tl.int32), mask=is_word)
    return words


@triton.jit
def _elements(data: tl.tensor, element_type: tl.constexpr) -> tl.tensor:
    """Return the elements in words, float32, `[number of elements]`."""
    if element_type == tl.float32:
        elements = data.to(tl.float32, bitcast=True)
    else:
        low = (data & 0xFFFF).to(tl.int16).to(element_type, bitcast=True)
        high = ((data >> 16) & 0xFFFF).to(tl.int16).to(element_type, bitcast=True)
        elements = tl.interleave(low.to(tl.float32), high.to(tl.float32))
    return elements


@triton.jit
def _place(
    launch: tl.tensor,
    sender: tl.constexpr,
    receiver: tl.constexpr,
    row: tl.tensor,
    max_rows: tl.tensor,
    size: tl.constexpr,
    num_words: tl.constexpr,
) -> tl.tensor:
    """Return the offset in words of a row of a sender in the inbox of a receiver."""
    # A rank has no place in its own inbox.
    slot: tl.constexpr = sender - 1 if sender > receiver else sender
    place = (launch & 1) * (size - 1) + slot
    return (place.to(tl.int64) * max_rows + row) * num_words


@triton.jit
def _inbox(addresses: tl.tensor, rank: tl.constexpr) -> tl.tensor:
    """Return the address of a rank's inbox."""
    # Without this hint, the compiler would load and store single words.
    return tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def _loaded(row_data: tl.tensor, is_word: tl.tensor, tile: tl.constexpr) -> tl.tensor:
    """Return the words of a row, with any that equal an empty place replaced by another NaN."""
    words = tl.load(row_data + tl.arange(0, tile), mask=is_word, other=0)
    return tl.where(words == _EMPTY, _OTHER_NAN, words)


@triton.jit
def _send(
    row: tl.tensor,
    data: tl.tensor,
    addresses: tl.tensor,
    num_launches: tl.tensor,
    data_stride: tl.tensor,
    max_rows: tl.tensor,
    rank: tl.constexpr,
    size: tl.constexpr,
    num_words: tl.constexpr,
    word_tile: tl.constexpr,
) -> tl.tensor:
    """Write a row into the inboxes of the other ranks; return its words."""
    launch = tl.load(num_launches + row) + 1
    words = tl.arange(0, word_tile)
    is_word = words < num_words
    mine = _loaded(data + row * data_stride, is_word, word_tile)
    for peer in tl.static_range(size):
        if peer != rank:
            place = _place(launch, rank, peer, row, max_rows, size, num_words)
            inbox = _inbox(addresses, peer)
            # Write through the caches, since no fence follows.
            tl.store(inbox + place + words, mine, mask=is_word, cache_modifier=".wt")
    return mine


@triton.jit
def _summed(
    row: tl.tensor,
    mine: tl.tensor,
    addresses: tl.tensor,
    num_launches: tl.tensor,
    max_rows: tl.tensor,
    rank: tl.constexpr,
    size: tl.constexpr,
    num_words: tl.constexpr,
    word_tile: tl.constexpr,
    tile: tl.constexpr,
    element_type: tl.constexpr,
) -> tl.tensor:
    """Return the sum of a row over the ranks, `[tile]` of the element type."""
    launch = tl.load(num_launches + row) + 1
    words = tl.arange(0, word_tile)
    inbox = _inbox(addresses, rank)
    total = tl.zeros([tile], tl.float32)
    # In the order of the ranks, so that the sum has the same bits on all of them.
    for peer in tl.static_range(size):
        if peer == rank:
            total += _elements(mine, element_type)
        else:
            place = _place(launch, peer, rank, row, max_rows, size, num_words)
            received = _received(inbox + place + words, words < num_words, addresses + size)
            total += _elements(received, element_type)
    # All warps must have loaded the count before one of them stores it.
    tl.debug_barrier()
    tl.store(num_launches + row, launch)
    return total.to(element_type)


@triton.jit
def _all_reduce(
    delta: tl.tensor,
    data: tl.tensor,
    stream: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    addresses: tl.tensor,
    num_launches: tl.tensor,
    num_rows: tl.tensor,
    delta_stride: tl.tensor,
    data_stride: tl.tensor,
    stream_stride: tl.tensor,
    max_rows: tl.tensor,
    eps: tl.tensor,
    rank: tl.constexpr,
    size: tl.constexpr,
    width: tl.constexpr,
    num_words: tl.constexpr,
    has_norm: tl.constexpr,
    has_bias: tl.constexpr,
    is_centered: tl.constexpr,
    has_one_row: tl.constexpr,
    is_dependent: tl.constexpr,
    word_tile: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Add some rows of all ranks; write the sums, or the norms of the stream plus the sums.

    Launched by `all_reduce_rows` and `all_reduce_add_norm`; grid `(num_programs,)`, of which each
    has every num_programs-th row, or one row if `has_one_row`. Pointers: delta, stream, out
    `[num_rows, width]`; data the same memory as delta, int32 `[num_rows, num_words]`; weight,
    bias `[width]`; addresses and num_launches as in `Inboxes`. An inbox is
    `[2, size - 1, max_rows, num_words]` int32: even and odd launches, senders without the receiver.
    """
    wait_for_inputs(is_dependent)
    element_type: tl.constexpr = delta.dtype.element_ty
    first = tl.program_id(0).to(tl.int64)
    mine = _send(
        first, data, addresses, num_launches, data_stride, max_rows, rank, size, num_words,
        word_tile,
    )  # fmt: skip
    if has_one_row:
        before = stream_row(first, delta, stream, stream_stride, width, has_norm, tile)
        added = _summed(
            first, mine, addresses, num_launches, max_rows, rank, size, num_words,
            word_tile, tile, element_type,
        )  # fmt: skip
        finish_row(
            first, added, before, delta, stream, weight, bias, out, delta_stride, stream_stride,
            eps, width, has_norm, has_bias, is_centered, tile,
        )  # fmt: skip
    else:
        step = tl.num_programs(0)
        for ahead in tl.static_range(1, _LOOKAHEAD):
            if first + ahead * step < num_rows:
                _send(
                    first + ahead * step, data, addresses, num_launches, data_stride, max_rows,
                    rank, size, num_words, word_tile,
                )  # fmt: skip
        is_word = tl.arange(0, word_tile) < num_words
        for row in range(first, num_rows, step):
            if row + _LOOKAHEAD * step < num_rows:
                _send(
                    row + _LOOKAHEAD * step, data, addresses, num_launches, data_stride, max_rows,
                    rank, size, num_words, word_tile,
                )  # fmt: skip
            mine = _loaded(data + row * data_stride, is_word, word_tile)
            before = stream_row(row, delta, stream, stream_stride, width, has_norm, tile)
            added = _summed(
                row, mine, addresses, num_launches, max_rows, rank, size, num_words,
                word_tile, tile, element_type,
            )  # fmt: skip
            finish_row(
                row, added, before, delta, stream, weight, bias, out, delta_stride, stream_stride,
                eps, width, has_norm, has_bias, is_centered, tile,
            )  # fmt: skip


_ALL_REDUCE = KernelLauncher(_all_reduce)


def all_reduce_rows(delta: torch.Tensor, inboxes: Inboxes) -> None:
    """Sum `[num_rows, width]` over the ranks, in place. All ranks must call this together."""
    _launch(delta, None, delta, None, delta, 0.0, False, inboxes)


def all_reduce_add_norm(
    stream: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    *,
    is_centered: bool,
    inboxes: Inboxes,
) -> torch.Tensor:
    """Return the norm of `stream` plus the sum of all ranks' `delta`, `[num_rows, width]`.

    `stream` becomes that sum; the norm is that of `token_rows.add_norm`. All ranks must call this
    together.
    """
    assert stream.shape == delta.shape
    assert stream.stride(1) == 1
    out = torch.empty_like(delta, memory_format=torch.contiguous_format)
    _launch(delta, stream, weight, bias, out, eps, is_centered, inboxes)
    return out


def _launch(
    delta: torch.Tensor,
    stream: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    eps: float,
    is_centered: bool,
    inboxes: Inboxes,
) -> None:
    num_rows, width = delta.shape
    assert width == inboxes.width
    assert delta.dtype == inboxes.dtype
    assert num_rows <= inboxes.max_rows
    assert delta.stride(1) == 1
    data = delta.view(torch.int32)
    tile = next_power_of_two(width)
    word_tile = tile * delta.dtype.itemsize // _WORD_BYTES
    num_programs = min(num_rows, inboxes.max_programs)
    # Only one thread may read a place: once it is empty again, another thread would wait forever.
    num_warps = max(1, min(4, word_tile // _WARP_SIZE), min(16, tile // 512))
    _ALL_REDUCE.launch(
        (num_programs, 1, 1),
        (
            delta,
            data,
            delta if stream is None else stream,
            weight,
            weight if bias is None else bias,
            out,
            inboxes.addresses,
            inboxes.num_launches,
        ),
        (
            delta.stride(0),
            data.stride(0),
            0 if stream is None else stream.stride(0),
            inboxes.max_rows,
            eps,
            inboxes.rank,
            inboxes.size,
            width,
            data.shape[1],
            stream is not None,
            bias is not None,
            is_centered,
            num_rows == num_programs,
            can_depend(delta.device),
            word_tile,
            tile,
        ),
        (num_rows,),
        num_warps=num_warps,
        maxnreg=min(_MAX_REGISTERS, _REGISTERS_PER_SM // (32 * num_warps * PROGRAMS_PER_SM)),
        **launch_options(delta.device),
    )
