"""Planners of torch_sdpa on a CPU, by attention type."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from attention.cpu.bias import BandedBias
from attention.cpu.decode import DecodePlanner, Gatherer
from attention.cpu.plan import LayerPlan, Prompts, Span, Tile
from attention.kernels.cpu.paged_decode import DecodeBatch, PrefillBatch
from attention.params import AttentionParams, AttentionSpec, AttentionType

if TYPE_CHECKING:
    import torch

    from attention.batch import AttentionBatch, EncoderBatch
    from attention.cpu.buffers import Scratch, StepArrays, WritePlan

__all__ = ["PlanBuffers", "encoder_of", "make_planner"]

_Ints = npt.NDArray[np.int64]
_Lengths = npt.NDArray[np.int32]

# Few queries per tile waste fewer hidden keys, many make fewer calls.
# Bytes of a tensor with one element per head, query and key.


class PlanBuffers(NamedTuple):
    """The memory that all planners of a builder share."""

    indices: StepArrays
    biases: StepArrays
    scratch: Scratch
    """Buffers for keys and values in the model's dtype."""
    stored: Scratch
    """Buffers for the bytes of an fp8 cache."""
    pairs: Scratch
    """Buffers for pairs of these bytes as int32."""


class LayerPlanner(ABC):
    """Plans steps for layers with equal parameters."""

    def __init__(
        self,
        params: AttentionParams,
        *,
        spec: AttentionSpec,
        buffers: PlanBuffers,
        has_kernel: bool,
        max_prefill_queries: int | None,
    ) -> None:
        self._has_kernel = has_kernel
        self._max_prefill_queries = max_prefill_queries
        self._indices = buffers.indices
        bias = BandedBias(params)
        self._gatherer = Gatherer(
            params,
            spec=spec,
            indices=buffers.indices,
            scratch=buffers.scratch,
            stored=buffers.stored,
            pairs=buffers.pairs,
        )
        self._spans = SpanPlanner(params, spec=spec, bias=bias, gatherer=self._gatherer)
        self._decodes = DecodePlanner(
            params,
            spec=spec,
            bias=bias,
            gatherer=self._gatherer,
            indices=buffers.indices,
            biases=buffers.biases,
        )
        # The longest prompt that needs at most a causal mask.
        self._max_plain_tokens = params.sliding_window or sys.maxsize
        if params.alibi_slopes is not None or not params.has_plain_softmax:
            self._max_plain_tokens = 0

    @abstractmethod
    def plan_step(self, batch: AttentionBatch, write: WritePlan | None) -> LayerPlan:
        """Return the plan of one step.

        `write` is where keys and values are written. It is None if there is no cache, and every
        sequence is then a prompt without context.
        """


class _DecoderPlanner(LayerPlanner):
    def plan_step(self, batch: AttentionBatch, write: WritePlan | None) -> LayerPlan:
        """Return the plan of causal self attention."""
        self._gatherer.forget_views()
        starts = _starts(batch.query_lens)
        first = batch.num_prefills
        num_padding = batch.num_padding
        if self._has_kernel and write is not None:
            return self._plan_kernels(batch, starts, write)
        if not first and len(starts) and write is not None:
            chunks = self._decodes.plan_chunks(batch.seq_lens, starts, batch.block_tables)
            return LayerPlan(chunks=chunks, write=write, num_padding=num_padding)
        is_decode = (batch.query_lens == 1) & (batch.seq_lens > 1)
        prompts, spans = self._prefills(batch, starts, np.flatnonzero(~is_decode).tolist())
        ids = np.flatnonzero(is_decode)
        chunks = self._decodes.plan_chunks(
            batch.seq_lens[ids], starts[ids], batch.block_tables[ids]
        )
        return LayerPlan(
            prompts=prompts, spans=spans, chunks=chunks, write=write, num_padding=num_padding
        )

    def _plan_kernels(self, batch: AttentionBatch, starts: _Ints, write: WritePlan) -> LayerPlan:
        """Return the plan of a step in which kernels compute decodes, and if possible prefills."""
        first = batch.num_prefills
        prefills, decodes = self._kernel_prefills(batch, starts, write), None
        prompts, spans = self._prefills(batch, starts, range(first if prefills is None else 0))
        if first < len(starts):
            tables, num_keys = batch.block_tables[first:], batch.seq_lens[first:]
            decodes = DecodeBatch(int(starts[first]), tables, num_keys)
        return LayerPlan(
            prompts=prompts,
            spans=spans,
            prefills=prefills,
            decodes=decodes,
            write=write,
            num_padding=batch.num_padding,
        )

    def _kernel_prefills(
        self, batch: AttentionBatch, starts: _Ints, write: WritePlan
    ) -> PrefillBatch | None:
        """Return the prefills if the kernel computes them, and not torch."""
        n = batch.num_prefills
        # The kernel reads the written cache; torch reads the keys and values of the step.
        if not n or self._max_prefill_queries is None or write.tokens is not None:
            return None
        return PrefillBatch(
            starts[:n],
            batch.query_lens[:n],
            batch.seq_lens[:n],
            batch.block_tables[:n],
            max_queries=self._max_prefill_queries,
        )

    def _prefills(
        self, batch: AttentionBatch, starts: _Ints, sequences: range | list[int]
    ) -> tuple[tuple[Prompts, ...], tuple[Span, ...]]:
        prompts = PromptRuns()
        spans = []
        for i in sequences:
            start, length, stop = int(starts[i]), int(batch.query_lens[i]), int(batch.seq_lens[i])
            if stop == length <= self._max_plain_tokens:
                prompts.add_prompt(start, length)
            elif stop == length:
                spans.append(self._spans.plan_ragged(start, length, slice(start, start + length)))
            elif length:
                table, context = batch.block_tables[i], stop - length
                spans.append(self._spans.plan_cached(start, length, stop, table, context=context))
        return prompts.runs(), tuple(spans)


class _EncoderPlanner(LayerPlanner):
    def plan_step(self, batch: AttentionBatch, write: WritePlan | None) -> LayerPlan:
        """Return the plan of self attention among all tokens of a sequence, in both directions."""
        lengths, num_padding = self._own_tokens(batch)
        prompts = PromptRuns()
        spans = []
        start = 0
        for length in lengths.tolist():
            if 0 < length <= self._max_plain_tokens:
                prompts.add_prompt(start, length)
            elif length:
                spans.append(self._spans.plan_ragged(start, length, slice(start, start + length)))
            start += length
        return LayerPlan(prompts.runs(), tuple(spans), num_padding=num_padding)

    def _own_tokens(self, batch: AttentionBatch) -> tuple[_Lengths, int]:
        """Return the tokens of each sequence and the number of padding tokens after them."""
        return encoder_of(batch).query_lens, 0


class _EncoderOnlyPlanner(_EncoderPlanner):
    def _own_tokens(self, batch: AttentionBatch) -> tuple[_Lengths, int]:
        is_cut = batch.query_lens != batch.seq_lens
        if is_cut.any():
            i = int(is_cut.argmax())
            raise ValueError(
                f"An encoder must compute a sequence in one step, but sequence {i} has "
                f"{batch.seq_lens[i]} tokens, and the step computes {batch.query_lens[i]}."
            )
        return batch.query_lens, batch.num_padding


class _CrossPlanner(LayerPlanner):
    def plan_step(self, batch: AttentionBatch, write: WritePlan | None) -> LayerPlan:
        """Return the plan of attention from the decoder's tokens to the encoder's."""
        self._gatherer.forget_views()
        encoder = encoder_of(batch)
        starts, key_starts = _starts(batch.query_lens), _starts(encoder.query_lens)
        num_keys = encoder.query_lens if write is None else encoder.seq_lens
        # Without a cache decodes are planned as prefills: over keys of the step, if any.
        first = batch.num_prefills if write is not None else len(starts)
        spans = []
        for i in range(first):
            start, length = int(starts[i]), int(batch.query_lens[i])
            if not num_keys[i] or not length:
                continue
            if encoder.query_lens[i]:
                keys = slice(int(key_starts[i]), int(key_starts[i]) + int(num_keys[i]))
                spans.append(self._spans.plan_ragged(start, length, keys))
            else:
                table = encoder.block_tables[i]
                spans.append(self._spans.plan_cached(start, length, int(num_keys[i]), table))
        plan = LayerPlan(
            spans=tuple(spans),
            write=write,
            num_padding=batch.num_padding,
            keyless_tokens=self._keyless_tokens(batch.query_lens, num_keys),
        )
        if first == len(starts):
            return plan
        # The result of tokens without keys is set to zero afterwards, so any key will do.
        tables, num_keys = encoder.block_tables[first:], np.maximum(num_keys[first:], 1)
        if self._has_kernel:
            return plan._replace(decodes=DecodeBatch(int(starts[first]), tables, num_keys))
        return plan._replace(chunks=self._decodes.plan_chunks(num_keys, starts[first:], tables))

    def _keyless_tokens(self, query_lens: _Lengths, num_keys: _Lengths) -> torch.Tensor | None:
        if num_keys.all():
            return None
        tokens = np.flatnonzero(np.repeat(num_keys == 0, query_lens))
        array, tensor = self._indices.allocate(len(tokens))
        array[:] = tokens
        return tensor


_PLANNERS: dict[AttentionType, type[LayerPlanner]] = {
    AttentionType.DECODER: _DecoderPlanner,
    AttentionType.ENCODER: _EncoderPlanner,
    AttentionType.ENCODER_ONLY: _EncoderOnlyPlanner,
    AttentionType.ENCODER_DECODER: _CrossPlanner,
}


def make_planner(
    params: AttentionParams,
    *,
    spec: AttentionSpec,
    buffers: PlanBuffers,
    has_kernel: bool,
    max_prefill_queries: int | None,
) -> LayerPlanner:
    """Return the planner of layers with these parameters.

    `has_kernel` is whether a kernel computes decodes. A prefill kernel divides prefills into items
    of up to `max_prefill_queries`, which is None without a prefill kernel.
    """
    kind = _PLANNERS[params.attention_type]
    return kind(
        params,
        spec=spec,
        buffers=buffers,
        has_kernel=has_kernel,
        max_prefill_queries=max_prefill_queries,
    )


def encoder_of(batch: AttentionBatch) -> EncoderBatch:
    """Return the encoder batch of a batch; raise ValueError if it has none."""
    if batch.encoder is None:
        raise ValueError(
            f"The model has an encoder, but the batch of {len(batch.seq_lens)} sequences has no "
            "encoder batch."
        )
    return batch.encoder


def _starts(lengths: _Lengths) -> _Ints:
    """Return the first token of each sequence."""
    starts: _Ints = np.cumsum(lengths, dtype=np.int64) - lengths
    return starts


class SpanPlanner:
    """Plans spans for layers with equal parameters."""

    def __init__(
        self, params: AttentionParams, *, spec: AttentionSpec, bias: BandedBias, gatherer: Gatherer
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
    """Collects prompts; adjacent prompts of equal length form a run."""

    def __init__(self) -> None:
        self._runs: list[Prompts] = []

    def add_prompt(self, start: int, length: int) -> None:
        """Add a prompt that begins at token `start`."""
        if self._runs:
            first, num_prompts, num_tokens = self._runs[-1]
            if num_tokens == length and first + num_prompts * length == start:
                self._runs[-1] = Prompts(first, num_prompts + 1, length)
                return
        self._runs.append(Prompts(start, 1, length))

    def runs(self) -> tuple[Prompts, ...]:
        """Return the runs."""
        return tuple(self._runs)
