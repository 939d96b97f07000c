"""Planners of the torch_sdpa backend: from a batch to what each kind of layer does in it."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from attention.batch import AttentionBatch, EncoderBatch
from attention.cpu.bias import Staircase
from attention.cpu.buffers import Scratch, Staging
from attention.cpu.decode import DecodePlanner
from attention.cpu.gather import Gatherer
from attention.cpu.plan import GroupPlan, Prompts, Span
from attention.cpu.span import PromptRuns, SpanPlanner
from attention.cpu.write import WritePlan
from attention.kernels.cpu.paged_decode import DecodeRows
from attention.params import AttentionParams, AttentionSpec, AttentionType

__all__ = ["GroupPlanner", "PlanBuffers", "encoder_of", "make_planner"]

_Ints = npt.NDArray[np.int64]
_Lengths = npt.NDArray[np.int32]


class PlanBuffers(NamedTuple):
    """What all planners of a builder share."""

    indices: Staging
    masks: Mapping[torch.dtype, Staging]
    scratch: Scratch
    """For keys and values in the model's dtype."""
    stored: Scratch
    """For the bytes of an fp8 cache."""
    pairs: Scratch
    """For pairs of them as int32."""


class GroupPlanner(ABC):
    """Plans steps for the layers that have one set of parameters."""

    def __init__(
        self,
        params: AttentionParams,
        *,
        spec: AttentionSpec,
        buffers: PlanBuffers,
        has_kernel: bool,
    ) -> None:
        self._has_kernel = has_kernel
        self._indices = buffers.indices
        staircase = Staircase(params, spec)
        self._gatherer = Gatherer(
            params,
            spec=spec,
            indices=buffers.indices,
            scratch=buffers.scratch,
            stored=buffers.stored,
            pairs=buffers.pairs,
        )
        self._spans = SpanPlanner(params, spec=spec, staircase=staircase, gatherer=self._gatherer)
        self._decodes = DecodePlanner(
            params,
            spec=spec,
            staircase=staircase,
            gatherer=self._gatherer,
            indices=buffers.indices,
            masks=buffers.masks[staircase.decode_dtype],
        )
        # Longest prompt whose mask is nothing but causality, or nothing at all.
        self._max_plain_tokens = params.sliding_window or sys.maxsize
        if params.alibi_slopes is not None or params.soft_cap is not None:
            self._max_plain_tokens = 0

    @abstractmethod
    def plan(self, batch: AttentionBatch, write: WritePlan | None) -> GroupPlan:
        """Return the plan of one step; its tensors show their content after the upload.

        `write` is where keys and values go. It is None if there is no cache, and every
        sequence is then a fresh prompt.
        """


class _DecoderPlanner(GroupPlanner):
    def plan(self, batch: AttentionBatch, write: WritePlan | None) -> GroupPlan:
        """Return the plan of causal self attention."""
        self._gatherer.forget_views()
        rows = _starts(batch.query_lens)
        first = batch.num_prefills
        num_padding = batch.num_padding
        if self._has_kernel and write is not None:
            prompts, spans = self._prefills(batch, rows, range(first))
            decodes = None
            if first < len(rows):
                tables, num_keys = batch.block_tables[first:], batch.seq_lens[first:]
                decodes = DecodeRows(int(rows[first]), tables, num_keys)
            return GroupPlan(prompts, spans, (), decodes, write, num_padding)
        if not first and len(rows) and write is not None:
            chunks = self._decodes.plan(batch.seq_lens, rows, batch.block_tables)
            return GroupPlan((), (), chunks, None, write, num_padding)
        is_decode = (batch.query_lens == 1) & (batch.seq_lens > 1)
        prompts, spans = self._prefills(batch, rows, np.flatnonzero(~is_decode).tolist())
        ids = np.flatnonzero(is_decode)
        chunks = self._decodes.plan(batch.seq_lens[ids], rows[ids], batch.block_tables[ids])
        return GroupPlan(prompts, spans, chunks, None, write, num_padding)

    def _prefills(
        self, batch: AttentionBatch, rows: _Ints, sequences: "range | list[int]"
    ) -> tuple[tuple[Prompts, ...], tuple[Span, ...]]:
        prompts = PromptRuns()
        spans = []
        for i in sequences:
            start, length, stop = int(rows[i]), int(batch.query_lens[i]), int(batch.seq_lens[i])
            if stop == length <= self._max_plain_tokens:
                prompts.add(start, length)
            elif stop == length:
                spans.append(self._spans.fresh(start, length, slice(start, start + length)))
            elif length:
                table, context = batch.block_tables[i], stop - length
                spans.append(self._spans.cached(start, length, stop, table, context=context))
        return prompts.runs(), tuple(spans)


class _EncoderPlanner(GroupPlanner):
    def plan(self, batch: AttentionBatch, write: WritePlan | None) -> GroupPlan:
        """Return the plan of self attention among all tokens of a sequence, in both directions."""
        lengths, num_padding = self._own_tokens(batch)
        prompts = PromptRuns()
        spans = []
        start = 0
        for length in lengths.tolist():
            if 0 < length <= self._max_plain_tokens:
                prompts.add(start, length)
            elif length:
                spans.append(self._spans.fresh(start, length, slice(start, start + length)))
            start += length
        return GroupPlan(prompts.runs(), tuple(spans), num_padding=num_padding)

    def _own_tokens(self, batch: AttentionBatch) -> tuple[_Lengths, int]:
        """Return the tokens of each sequence and the number of padding rows behind them."""
        return encoder_of(batch).query_lens, 0


class _EncoderOnlyPlanner(_EncoderPlanner):
    def _own_tokens(self, batch: AttentionBatch) -> tuple[_Lengths, int]:
        is_cut = batch.query_lens != batch.seq_lens
        if is_cut.any():
            i = int(is_cut.argmax())
            raise ValueError(
                f"An encoder runs whole, but sequence {i} has {batch.seq_lens[i]} tokens, of "
                f"which the step computes {batch.query_lens[i]}."
            )
        return batch.query_lens, batch.num_padding


class _CrossPlanner(GroupPlanner):
    def plan(self, batch: AttentionBatch, write: WritePlan | None) -> GroupPlan:
        """Return the plan of attention from the decoder's tokens to the encoder's."""
        self._gatherer.forget_views()
        encoder = encoder_of(batch)
        rows, key_rows = _starts(batch.query_lens), _starts(encoder.query_lens)
        num_keys = encoder.query_lens if write is None else encoder.seq_lens
        # Without a cache decodes are like prefills: queries over keys of the step, if any.
        first = batch.num_prefills if write is not None else len(rows)
        spans = []
        for i in range(first):
            start, length = int(rows[i]), int(batch.query_lens[i])
            if not num_keys[i] or not length:
                continue
            if encoder.query_lens[i]:
                keys = slice(int(key_rows[i]), int(key_rows[i]) + int(num_keys[i]))
                spans.append(self._spans.fresh(start, length, keys))
            else:
                table = encoder.block_tables[i]
                spans.append(self._spans.cached(start, length, int(num_keys[i]), table))
        plan = GroupPlan(
            spans=tuple(spans),
            write=write,
            num_padding=batch.num_padding,
            keyless_rows=self._keyless_rows(batch.query_lens, num_keys),
        )
        if first == len(rows):
            return plan
        # What sees no key is zeroed afterwards; until then any key will do.
        tables, num_keys = encoder.block_tables[first:], np.maximum(num_keys[first:], 1)
        if self._has_kernel:
            return plan._replace(decodes=DecodeRows(int(rows[first]), tables, num_keys))
        return plan._replace(chunks=self._decodes.plan(num_keys, rows[first:], tables))

    def _keyless_rows(self, query_lens: _Lengths, num_keys: _Lengths) -> torch.Tensor | None:
        if num_keys.all():
            return None
        rows = np.flatnonzero(np.repeat(num_keys == 0, query_lens))
        array, tensor = self._indices.take(len(rows))
        array[:] = rows
        return tensor


_PLANNERS: dict[AttentionType, type[GroupPlanner]] = {
    AttentionType.DECODER: _DecoderPlanner,
    AttentionType.ENCODER: _EncoderPlanner,
    AttentionType.ENCODER_ONLY: _EncoderOnlyPlanner,
    AttentionType.ENCODER_DECODER: _CrossPlanner,
}


def make_planner(
    params: AttentionParams, *, spec: AttentionSpec, buffers: PlanBuffers, has_kernel: bool
) -> GroupPlanner:
    """Return the planner of layers with these parameters."""
    kind = _PLANNERS[params.attention_type]
    return kind(params, spec=spec, buffers=buffers, has_kernel=has_kernel)


def encoder_of(batch: AttentionBatch) -> EncoderBatch:
    """Return the encoder's side of a batch; ValueError if it has none."""
    if batch.encoder is None:
        raise ValueError(
            f"The model has an encoder, but its batch of {len(batch.seq_lens)} sequences has no "
            "encoder's side."
        )
    return batch.encoder


def _starts(lengths: _Lengths) -> _Ints:
    """Return the first row of each sequence, whose rows are flat and in order."""
    starts: _Ints = np.cumsum(lengths, dtype=np.int64) - lengths
    return starts
