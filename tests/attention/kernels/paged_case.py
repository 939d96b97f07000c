"""Sequences in a paged cache whose every other slot is NaN, and attention over them.

The same code runs small under Triton's interpreter and large on a GPU.
"""

from collections.abc import Sequence
from typing import Any

import torch

from attention.kernels.arguments import NewTokens, Rotary
from attention.kernels.triton.chunk_attention import paged_attention, ragged_attention
from attention.kernels.triton.tuning import (
    AttentionOptions,
    PagedAttentionTuning,
    default_decode_tuning,
)
from attention.kernels.triton.write_new_tokens import write_new_tokens
from tests.attention.dense_reference import relative_error
from tests.attention.kernels.decode_items import decode_items
from tests.attention.kernels.decode_launch import paged_decode
from tests.attention.kernels.features import Shape, options_of, sinks_for
from tests.attention.kernels.kernel_device import DEVICE
from tests.attention.kernels.two_sided_reference import two_sided_attention

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}
UNTOUCHED = 7.0


class PagedCase:
    """Some sequences; keys before `num_freed` have been given back, and are NaN.

    `shared` are sequences that begin with the blocks of the first of them, and how many blocks.
    """

    def __init__(
        self,
        shape: Shape,
        seq_lens: list[int],
        *,
        num_freed: int = 0,
        shared: Sequence[tuple[Sequence[int], int]] = (),
        device: str = DEVICE,
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        self.shape = shape
        self.seq_lens = seq_lens
        self.device = device
        block_size = shape.block_size
        rows = shape.num_kv_heads, shape.head_size
        counts = [-(-length // block_size) for length in seq_lens]
        # Block 0 is unused, and pads the tables.
        order = (1 + torch.randperm(sum(counts))).tolist()
        cache = torch.full((2 + sum(counts), 2, 2, block_size, *rows), float("nan"))
        self.tables = torch.zeros(len(seq_lens), max([*counts, 1]) + 1, dtype=torch.int32)
        for sequence, length in enumerate(seq_lens):
            blocks = [order.pop() for _ in range(counts[sequence])]
            self.tables[sequence, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
            for position in range(min(num_freed, length), length):
                block, slot = blocks[position // block_size], position % block_size
                cache[block, 1, :, slot] = torch.randn(2, *rows)
        for (first, *others), num_blocks in shared:
            for sequence in others:
                self.tables[sequence, :num_blocks] = self.tables[first, :num_blocks]
        self.cache = cache.to(shape.cache_dtype or shape.dtype).to(device)

    def keys_and_values(self, sequence: int) -> torch.Tensor:
        """Return the values of the cache, float64 `[2, seq_len, num_kv_heads, head_size]`."""
        length = self.seq_lens[sequence]
        num_blocks = -(-length // self.shape.block_size)
        layer = self.cache[self.tables[sequence, :num_blocks].to(self.device).long(), 1]
        layer = layer.cpu().double().transpose(0, 1).flatten(1, 2)[:, :length]
        return layer * torch.tensor([self.shape.k_scale, self.shape.v_scale])[:, None, None, None]

    def query(self, num_tokens: int) -> torch.Tensor:
        """Return queries that are a part of wider rows, as after one GEMM for q, k and v."""
        shape = self.shape
        size = shape.num_heads * shape.head_size
        rows = torch.randn(num_tokens, size + 3 * shape.head_size).to(shape.dtype).to(self.device)
        return rows[:, :size].view(num_tokens, shape.num_heads, shape.head_size)

    def check_chunks(
        self,
        query_lens: list[int],
        feature: dict[str, Any],  # Any: the options differ in type
        tuning: PagedAttentionTuning | None = None,
    ) -> torch.Tensor:
        """Check the last queries of each sequence, and return their attention."""
        options = options_of(self.shape, feature, self.device)
        sinks = sinks_for(self.shape, feature, self.device)
        query, starts, out, lse = self._inputs(query_lens)
        paged_attention(
            query,
            self.cache[:, 1],
            query_starts=starts,
            seq_lens=self._on_device(self.seq_lens),
            block_tables=self.tables.to(self.device),
            max_query_len=max(query_lens),
            options=options,
            out=out,
            lse=lse,
            sinks=sinks,
            tuning=tuning,
        )
        contents = [self.keys_and_values(i) for i in range(len(query_lens))]
        self._check(query, query_lens, contents, options, sinks, out, lse)
        return out

    def check_ragged(
        self,
        query_lens: list[int],
        feature: dict[str, Any],  # Any: the options differ in type
        tuning: PagedAttentionTuning | None = None,
    ) -> None:
        """Check the same over the keys and values in rows, with NaN behind them."""
        options = options_of(self.shape, feature, self.device)
        sinks = sinks_for(self.shape, feature, self.device)
        query, starts, out, lse = self._inputs(query_lens)
        contents = [self.keys_and_values(i) for i in range(len(query_lens))]
        rows = torch.nn.functional.pad(torch.cat(contents, 1), (0, 0, 0, 0, 0, 5), value=torch.nan)
        rows = rows.to(self.shape.dtype).to(self.device)
        ragged_attention(
            query,
            rows[0],
            rows[1],
            query_starts=starts,
            kv_starts=self._starts(self.seq_lens),
            max_query_len=max(query_lens),
            options=options,
            out=out,
            lse=lse,
            sinks=sinks,
            tuning=tuning,
        )
        self._check(query, query_lens, contents, options, sinks, out, lse)

    def check_decode(
        self,
        feature: dict[str, Any],  # Any: the options differ in type
        *,
        num_splits: int = 2,
    ) -> torch.Tensor:
        """Check one query for each sequence, and return its attention."""
        query, _, out, lse = self._inputs([1] * len(self.seq_lens))
        sinks = self._decode(feature, query, out, lse, num_splits, None)
        self._check_decoded(feature, query, sinks, out, lse)
        return out

    def check_new_tokens(
        self,
        feature: dict[str, Any],  # Any: the options differ in type
        *,
        num_splits: int,
        unwritten: int | None = None,
        by_two_kernels: bool = False,
    ) -> torch.Tensor:
        """Check that a decode rotates and writes the last token of each sequence.

        That of one sequence is not to be written; it has been. With `by_two_kernels`, another
        kernel rotates and writes before. Returns the attention.
        """
        shape, size = self.shape, self.shape.head_size
        query, _, out, lse = self._inputs([1] * len(self.seq_lens))
        angles = torch.outer(torch.arange(50.0), torch.rand(size // 2))
        table = torch.cat((angles.cos(), angles.sin()), dim=1).to(self.device)
        positions = torch.randint(0, 50, (len(self.seq_lens),)).to(self.device)
        # Rows as after one GEMM for queries, keys and values.
        rows = torch.randn(len(positions), 2, shape.num_kv_heads, size).to(query)
        slots = torch.full((len(positions),), -1)
        for sequence, length in enumerate(self.seq_lens):
            if length and sequence != unwritten:
                block = int(self.tables[sequence, (length - 1) // shape.block_size])
                slot = (length - 1) % shape.block_size
                slots[sequence] = block * shape.block_size + slot
                self.cache[block, 1, :, slot] = torch.nan
        new = NewTokens(rows[:, 0], rows[:, 1], slots.to(self.device), Rotary(positions, table))
        turns = table.double()[positions]
        queries = _rotated(query[: len(positions)].double(), turns).to(query)
        if by_two_kernels:
            layer = self.cache[:, 1]
            write_new_tokens(query[: len(positions)], new, layer[:, 0], layer[:, 1])
            sinks = self._decode(feature, query, out, lse, num_splits, None)
        else:
            sinks = self._decode(feature, query, out, lse, num_splits, new)
        for sequence, length in enumerate(self.seq_lens):
            if slots[sequence] >= 0:
                written = self.keys_and_values(sequence)[:, length - 1].to(self.device)
                key, value = rows[sequence].double()
                limit = TOLERANCE[shape.dtype]
                exact = _rotated(key[None], turns[sequence : sequence + 1])[0]
                torch.testing.assert_close(written[0], exact, rtol=limit, atol=4 * limit)
                assert torch.equal(written[1], value)
        query[: len(positions)] = queries
        self._check_decoded(feature, query, sinks, out, lse)
        return out

    def _decode(
        self,
        feature: dict[str, Any],  # Any: the options differ in type
        query: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        num_splits: int,
        new: NewTokens | None,
    ) -> torch.Tensor | None:
        """Run the kernel, and return the sinks that it was given."""
        shape = self.shape
        sinks = sinks_for(shape, feature, self.device)
        num_rows = len(self.seq_lens)
        tuning = default_decode_tuning(
            num_queries_per_kv=shape.num_heads // shape.num_kv_heads,
            head_size=shape.head_size,
            dtype=shape.dtype,
        )
        options = options_of(shape, feature, self.device)
        items = decode_items(
            shape.num_heads,
            self.cache[:, 1],
            self._on_device(self.seq_lens),
            self.tables,
            tuning,
            num_splits=num_splits,
            window=options.window_left + 1 if options.window_left >= 0 else None,
        )
        paged_decode(
            query[:num_rows],
            self.cache[:, 1],
            block_tables=self.tables.to(self.device),
            items=items,
            options=options,
            tuning=tuning,
            out=out[:num_rows],
            lse=lse[:num_rows],
            sinks=sinks,
            new=new,
        )
        assert not items.scratch.arrivals.any()
        return sinks

    def _check_decoded(
        self,
        feature: dict[str, Any],  # Any: the options differ in type
        query: torch.Tensor,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        options = options_of(self.shape, feature, self.device)
        num_rows = len(self.seq_lens)
        contents = [self.keys_and_values(i) for i in range(num_rows)]
        self._check(query, [1] * num_rows, contents, options, sinks, out, lse)

    def _inputs(
        self, query_lens: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        # Two rows of padding, of which nothing may be read or written.
        query = self.query(sum(query_lens) + 2)
        query[-2:] = torch.nan
        out = torch.full_like(query, UNTOUCHED)
        lse = torch.full(query.shape[:2], UNTOUCHED, device=self.device)
        return query, self._starts(query_lens), out, lse

    def _starts(self, lengths: list[int]) -> torch.Tensor:
        return self._on_device([sum(lengths[:i]) for i in range(len(lengths) + 1)])

    def _on_device(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)

    def _check(
        self,
        query: torch.Tensor,
        query_lens: list[int],
        contents: list[torch.Tensor],
        options: AttentionOptions,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        queries = query.cpu()[: sum(query_lens)].split(query_lens)
        contents = [content.nan_to_num() for content in contents]
        expected = [
            two_sided_attention(some, keys, values, options, sinks)
            for some, (keys, values) in zip(queries, contents, strict=True)
        ]
        expected_out, expected_lse = (torch.cat(part) for part in zip(*expected, strict=True))
        assert (out[len(expected_out) :] == UNTOUCHED).all()
        assert (lse[len(expected_lse) :] == UNTOUCHED).all()
        actual = out[: len(expected_out)].cpu()
        assert relative_error(actual, expected_out) < TOLERANCE[self.shape.dtype]
        assert not actual[expected_lse.isinf()].any()
        torch.testing.assert_close(
            lse[: len(expected_lse)].cpu().double(), expected_lse, rtol=1e-5, atol=1e-4
        )


def _rotated(heads: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Return `[num_tokens, num_heads, head_size]` rotated by `[num_tokens, head_size]`, float64."""
    first, second = heads.chunk(2, dim=2)
    cos, sin = turns.unsqueeze(1).chunk(2, dim=2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=2)
