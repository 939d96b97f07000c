"""Plans of torch_sdpa on a CPU for queries of several tokens."""

import sys

import numpy as np
import numpy.typing as npt

from attention.cpu.bias import BandedBias
from attention.cpu.gather import Gatherer
from attention.cpu.plan import Prompts, Span, Tile
from attention.params import AttentionParams, AttentionSpec

__all__ = ["PromptRuns", "SpanPlanner"]


class SpanPlanner:
    """Plans spans for layers with equal parameters."""

    def __init__(
        self,
        params: AttentionParams,
        *,
        spec: AttentionSpec,
        bias: BandedBias,
        gatherer: Gatherer,
    ) -> None:
        self._is_causal = params.is_causal
        self._window = params.sliding_window or sys.maxsize
        self._block_size = spec.block_size
        self._bias = bias
        self._gatherer = gatherer

    def plan_ragged(self, start: int, num_queries: int, keys: slice) -> Span:
        """Return the span of the queries from token `start` on over keys of the step."""
        return Span(keys, self._tiles(start, num_queries, 0, keys.stop - keys.start, 0))

    def plan_cached(
        self,
        start: int,
        num_queries: int,
        num_keys: int,
        table: npt.NDArray[np.int32],
        *,
        context: int = 0,
    ) -> Span:
        """Return the span of queries over keys in the blocks of a table.

        The first query is token `start`, at position `context` of its sequence.
        """
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
        max_queries = self._bias.max_queries(num_keys)
        for offset in range(0, num_queries, max_queries):
            position = context + offset
            stop = context + min(offset + max_queries, num_queries)
            key_start, key_stop = self._seen(position, stop, num_keys)
            tiles.append(
                Tile(
                    query_start=start + offset,
                    query_stop=start + stop - context,
                    key_start=key_start - first_key,
                    key_stop=key_stop - first_key,
                    bias=self._bias.tile(
                        stop - position, key_start - position, key_stop - key_start
                    ),
                )
            )
        return tuple(tiles)

    def _seen(self, start: int, stop: int, num_keys: int) -> tuple[int, int]:
        """Return the range of keys that any of the queries from `start` to `stop` sees."""
        last = stop if self._is_causal else min(num_keys, stop - 1 + self._window)
        return max(0, start - self._window + 1), last


class PromptRuns:
    """Collects prompts; adjacent ones of equal length are one run."""

    def __init__(self) -> None:
        self._runs: list[Prompts] = []

    def add_prompt(self, start: int, length: int) -> None:
        """Add the prompt whose first token is `start`."""
        if self._runs:
            first, num_prompts, num_tokens = self._runs[-1]
            if num_tokens == length and first + num_prompts * length == start:
                self._runs[-1] = Prompts(first, num_prompts + 1, length)
                return
        self._runs.append(Prompts(start, 1, length))

    def runs(self) -> tuple[Prompts, ...]:
        """Return the runs."""
        return tuple(self._runs)
