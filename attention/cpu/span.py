"""Plans of the torch_sdpa backend for sequences with a query of several tokens."""

import sys

import numpy as np
import numpy.typing as npt

from attention.cpu.bias import Staircase
from attention.cpu.gather import Gatherer
from attention.cpu.plan import Prompts, Span, Tile
from attention.params import AttentionParams, AttentionSpec

__all__ = ["PromptRuns", "SpanPlanner"]


class SpanPlanner:
    """Plans spans for the layers that have one set of parameters."""

    def __init__(
        self,
        params: AttentionParams,
        *,
        spec: AttentionSpec,
        staircase: Staircase,
        gatherer: Gatherer,
    ) -> None:
        self._is_causal = params.is_causal
        self._window = params.sliding_window or sys.maxsize
        self._block_size = spec.block_size
        self._staircase = staircase
        self._gatherer = gatherer

    def fresh(self, start: int, num_queries: int, keys: slice, *, context: int = 0) -> Span:
        """Return the span of queries over keys that the step computes.

        The first query is token row `start`, at position `context` of its sequence.
        """
        tiles = self._tiles(start, num_queries, context, keys.stop - keys.start, 0)
        return Span(keys, tiles)

    def cached(
        self,
        start: int,
        num_queries: int,
        num_keys: int,
        table: npt.NDArray[np.int32],
        *,
        context: int = 0,
    ) -> Span:
        """Return the span of queries over keys in the blocks of a table."""
        first_key, stop_key = self._seen(context, context + num_queries, num_keys)
        first_block = first_key // self._block_size
        first_key = first_block * self._block_size
        stop_block = -(-stop_key // self._block_size)
        index = self._gatherer.index(table[None, first_block:stop_block])
        gather = self._gatherer.gather(index, (0, stop_key - first_key))
        return Span(gather, self._tiles(start, num_queries, context, num_keys, first_key))

    def _tiles(
        self, start: int, num_queries: int, context: int, num_keys: int, first_key: int
    ) -> tuple[Tile, ...]:
        tiles = []
        num_rows = self._staircase.num_rows(num_keys)
        for offset in range(0, num_queries, num_rows):
            position = context + offset
            stop = context + min(offset + num_rows, num_queries)
            key_start, key_stop = self._seen(position, stop, num_keys)
            tiles.append(
                Tile(
                    query_start=start + offset,
                    query_stop=start + stop - context,
                    key_start=key_start - first_key,
                    key_stop=key_stop - first_key,
                    bias=self._staircase.tile(
                        stop - position, key_start - position, key_stop - key_start
                    ),
                )
            )
        return tuple(tiles)

    def _seen(self, start: int, stop: int, num_keys: int) -> tuple[int, int]:
        """Return the run of keys that queries at some positions see between them."""
        last = stop if self._is_causal else min(num_keys, stop - 1 + self._window)
        return max(0, start - self._window + 1), last


class PromptRuns:
    """Collects prompts; those that go on with the same length are one run."""

    def __init__(self) -> None:
        self._runs: list[Prompts] = []

    def add(self, start: int, length: int) -> None:
        """Add the prompt that begins at a token row."""
        if self._runs:
            first, num_prompts, num_tokens = self._runs[-1]
            if num_tokens == length and first + num_prompts * length == start:
                self._runs[-1] = Prompts(first, num_prompts + 1, length)
                return
        self._runs.append(Prompts(start, 1, length))

    def runs(self) -> tuple[Prompts, ...]:
        """Return what was collected."""
        return tuple(self._runs)
