"""Plans of the torch_sdpa backend: what all layers of a group share in one step.

Several ways lead through a layer. A fresh prompt reads its own keys and never the cache. A span is
a query of several tokens, cut into tiles that see no more keys than they need. Decodes go to a
kernel that reads the cache where it lies; where that is not to be had, they go in chunks, runs of
decodes of similar length whose blocks are gathered side by side.
"""

import sys
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from attention.batch import AttentionBatch
from attention.kernels.paged_decode import DecodeRows
from attention.params import AttentionParams, AttentionSpec
from attention.sdpa_bias import Staircase
from attention.sdpa_buffers import Scratch, Staging
from attention.sdpa_decode import DecodeChunk, DecodePlanner
from attention.sdpa_gather import Gather, Gatherer

__all__ = ["GroupPlan", "GroupPlanner", "Prompts", "Span", "Tile"]

_Ints = npt.NDArray[np.int64]


class Prompts(NamedTuple):
    """Adjacent prompts of equal length that need no more than causality."""

    start: int
    """First token row."""
    num_prompts: int
    num_tokens: int
    """Tokens of each prompt."""


class Tile(NamedTuple):
    """A run of query rows and the run of keys that they see between them."""

    query_start: int
    query_stop: int
    """Token rows of the step."""
    key_start: int
    key_stop: int
    """Keys of the span."""
    bias: torch.Tensor | None


class Span(NamedTuple):
    """One sequence with a query of several tokens."""

    start: int
    stop: int
    """Token rows of the step."""
    gather: Gather | None
    """How to read the cache; None if the keys are those of the query's own tokens."""
    tiles: tuple[Tile, ...]


class GroupPlan(NamedTuple):
    """One step of the layers with equal parameters."""

    prompts: tuple[Prompts, ...]
    spans: tuple[Span, ...]
    chunks: tuple[DecodeChunk, ...]
    decodes: DecodeRows | None = None
    """What goes to the kernel."""


class GroupPlanner:
    """Plans steps for the layers that have one set of parameters."""

    def __init__(
        self,
        params: AttentionParams,
        *,
        spec: AttentionSpec,
        indices: Staging,
        masks: Mapping[torch.dtype, Staging],
        scratch: Scratch,
        has_kernel: bool,
    ) -> None:
        self._has_kernel = has_kernel
        self._window = params.sliding_window
        self._block_size = spec.block_size
        self._staircase = Staircase(params, spec)
        self._gatherer = Gatherer(params, spec=spec, indices=indices, scratch=scratch)
        self._decodes = DecodePlanner(
            params,
            spec=spec,
            staircase=self._staircase,
            gatherer=self._gatherer,
            indices=indices,
            masks=masks[self._staircase.decode_dtype],
        )
        # Longest prompt for which causality is all there is to the mask.
        self._max_causal_tokens = params.sliding_window or sys.maxsize
        if params.alibi_slopes is not None or params.soft_cap is not None:
            self._max_causal_tokens = 0

    def plan(
        self, batch: AttentionBatch, query_starts: _Ints, *, has_cache: bool = True
    ) -> GroupPlan:
        """Return the plan of one step; its tensors show their content after the upload.

        Without a cache every sequence is a fresh prompt.
        """
        self._gatherer.forget_views()
        if self._has_kernel and has_cache:
            return self._plan_for_kernel(batch, query_starts)
        if not batch.num_prefills and len(batch.seq_lens):
            return GroupPlan((), (), self._decodes.plan(batch, query_starts, None))
        is_decode = (batch.query_lens == 1) & (batch.seq_lens > 1)
        prompts, spans = self._plan_prefills(batch, query_starts, np.flatnonzero(~is_decode))
        chunks = self._decodes.plan(batch, query_starts, np.flatnonzero(is_decode))
        return GroupPlan(prompts, spans, chunks)

    def _plan_for_kernel(self, batch: AttentionBatch, query_starts: _Ints) -> GroupPlan:
        first = batch.num_prefills
        prompts, spans = self._plan_prefills(batch, query_starts, np.arange(first))
        decodes = None
        if first < len(batch.seq_lens):
            decodes = DecodeRows(
                int(query_starts[first]), batch.block_tables[first:], batch.seq_lens[first:]
            )
        return GroupPlan(prompts, spans, (), decodes)

    def _plan_prefills(
        self, batch: AttentionBatch, query_starts: _Ints, sequences: _Ints
    ) -> tuple[tuple[Prompts, ...], tuple[Span, ...]]:
        prompts: list[Prompts] = []
        spans: list[Span] = []
        for i in sequences.tolist():
            start, length = int(query_starts[i]), int(batch.query_lens[i])
            context = int(batch.seq_lens[i]) - length
            if context == 0 and length <= self._max_causal_tokens:
                _append_prompt(prompts, start, length)
            elif length:
                table = batch.block_tables[i] if context else None
                spans.append(self._span(start, length, context, table))
        return tuple(prompts), tuple(spans)

    def _span(
        self, start: int, length: int, context: int, table: npt.NDArray[np.int32] | None
    ) -> Span:
        window = self._window or context + length
        first_key, gather = 0, None
        if table is not None:
            first_block = max(0, context - window + 1) // self._block_size
            first_key = first_block * self._block_size
            stop_block = -(-(context + length) // self._block_size)
            index = self._gatherer.index(table[None, first_block:stop_block])
            num_keys = context + length - first_key
            gather = self._gatherer.gather(index, (0, num_keys))
        tiles = []
        num_rows = self._staircase.num_rows(context + length)
        for offset in range(0, length, num_rows):
            position = context + offset
            stop = min(position + num_rows, context + length)
            key_start = max(0, position - window + 1)
            tiles.append(
                Tile(
                    query_start=start + offset,
                    query_stop=start + stop - context,
                    key_start=key_start - first_key,
                    key_stop=stop - first_key,
                    bias=self._staircase.tile(stop - position, stop - key_start),
                )
            )
        return Span(start=start, stop=start + length, gather=gather, tiles=tuple(tiles))


def _append_prompt(prompts: list[Prompts], start: int, length: int) -> None:
    """Add a prompt, to the last run of prompts if it goes on with the same length."""
    if prompts:
        last = prompts[-1]
        if last.num_tokens == length and last.start + last.num_prompts * length == start:
            prompts[-1] = Prompts(
                start=last.start, num_prompts=last.num_prompts + 1, num_tokens=length
            )
            return
    prompts.append(Prompts(start=start, num_prompts=1, num_tokens=length))
