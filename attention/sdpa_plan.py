"""Plans of the torch_sdpa backend: what all layers of a group share in one step.

Three ways lead through a layer. A fresh prompt reads its own keys and never the cache. A span is
a query of several tokens, cut into tiles that see no more keys than they need. A chunk is a run
of decodes of similar length, whose blocks are gathered side by side.
"""

import sys
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from attention.batch import AttentionBatch
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
    ) -> None:
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

    def plan(self, batch: AttentionBatch, query_starts: _Ints) -> GroupPlan:
        """Return the plan of one step; its tensors show their content after the upload."""
        self._gatherer.forget_views()
        if not batch.num_prefills and len(batch.seq_lens):
            return GroupPlan((), (), self._decodes.plan(batch, query_starts, None))
        contexts = batch.seq_lens - batch.query_lens
        is_fresh = contexts == 0
        is_decode = (batch.query_lens == 1) & ~is_fresh
        prompts: list[Prompts] = []
        spans: list[Span] = []
        for i in np.flatnonzero(~is_decode).tolist():
            start, length = int(query_starts[i]), int(batch.query_lens[i])
            if is_fresh[i] and length <= self._max_causal_tokens:
                _append_prompt(prompts, start, length)
            elif length:
                table = None if is_fresh[i] else batch.block_tables[i]
                spans.append(self._span(start, length, int(contexts[i]), table))
        chunks = self._decodes.plan(batch, query_starts, np.flatnonzero(is_decode))
        return GroupPlan(tuple(prompts), tuple(spans), chunks)

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
