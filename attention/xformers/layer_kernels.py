"""Kernels of the xFormers backend: the library where it supports a layer, else shared kernels."""

from typing import NamedTuple

import torch

from attention.gpu.batch import GpuBatch, SubBatch
from attention.gpu.layer_kernels import LayerCache, LayerSet
from attention.gpu.shared_kernels import SharedKernels
from attention.kernels.new_tokens import NewTokens
from attention.params import AttentionParams
from attention.xformers.decode import PagedDecodes
from attention.xformers.ragged import RaggedAttention
from attention.xformers.unsupported import unsupported_by_decode, unsupported_by_prefill

__all__ = ["XFormersKernels"]


class _KeyTables(NamedTuple):
    """Where the keys of some sequences are."""

    seq_lens: torch.Tensor
    """`[num_sequences]` int32."""
    max_seq_len: int
    block_tables: torch.Tensor
    """`[num_sequences, width]` int32."""


class XFormersKernels(SharedKernels):
    """FlashAttention 2 for prefills and split-k for decodes, or the shared kernels."""

    def __init__(self, layers: LayerSet) -> None:
        super().__init__(layers)
        params, spec = layers.params, layers.spec
        self._ragged: RaggedAttention | None = None
        if unsupported_by_prefill(params) is None:
            self._ragged = RaggedAttention(params)
        self._decodes: PagedDecodes | None = None
        if unsupported_by_decode(params, spec) is None:
            self._decodes = PagedDecodes(params, spec, is_graph=layers.is_graph)

    @property
    def providers(self) -> dict[str, str]:
        prefill = "shared" if self._ragged is None else "xformers"
        decode = "shared" if self._decodes is None else "xformers"
        return {"prefill": prefill, "prefill_ragged": prefill, "decode": decode}

    def plan_step(self, batch: GpuBatch) -> None:
        if self._ragged is not None:
            self._ragged.forget_step()
        if self._decodes is None:
            super().plan_step(batch)
        elif (tables := _key_tables_of(batch, self.params)) is not None:
            self._decodes.plan_decodes(*tables)

    @property
    def takes_new_tokens(self) -> bool:
        return self._decodes is None and super().takes_new_tokens

    def prefill(
        self,
        sub_batch: SubBatch,
        query: torch.Tensor,
        cache: LayerCache,
        out: torch.Tensor,
        *,
        sinks: torch.Tensor | None,
    ) -> None:
        if self._ragged is None:
            super().prefill(sub_batch, query, cache, out, sinks=sinks)
        else:
            self._ragged.prefill(sub_batch, query, cache, out)

    def prefill_ragged(
        self,
        sub_batch: SubBatch,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        *,
        sinks: torch.Tensor | None,
    ) -> None:
        if self._ragged is None:
            super().prefill_ragged(sub_batch, query, key, value, out, sinks=sinks)
        else:
            self._ragged.prefill_ragged(sub_batch, query, key, value, out)

    def decode(
        self,
        sub_batch: SubBatch,
        query: torch.Tensor,
        cache: LayerCache,
        out: torch.Tensor,
        *,
        sinks: torch.Tensor | None,
        new: NewTokens | None = None,
    ) -> None:
        if self._decodes is None:
            super().decode(sub_batch, query, cache, out, sinks=sinks, new=new)
        else:
            assert new is None
            self._decodes.run_decodes(query, cache, out)


def _key_tables_of(batch: GpuBatch, params: AttentionParams) -> _KeyTables | None:
    """Return the key tables of the decodes of a step; None without cached keys.

    Decoders read their own sequences, cross attention reads the encoders' sequences, and encoders
    have no blocks.
    """
    _, decodes = batch.sub_batches_of(params.attention_type)
    if decodes is None or not params.is_cached:
        return None
    assert decodes.block_tables is not None
    return _KeyTables(decodes.seq_lens, decodes.max_seq_len, decodes.block_tables)
