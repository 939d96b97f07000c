"""What the xFormers backend runs: the library where it has what a layer needs, else our kernels."""

from typing import NamedTuple

import torch

from attention.gpu.batch import GpuBatch, Rows
from attention.gpu.group import GpuGroup, LayerCache
from attention.gpu.shared_group import SharedGroup
from attention.params import AttentionParams, AttentionSpec
from attention.xformers.decode import PagedDecodes
from attention.xformers.ragged import RaggedAttention
from attention.xformers.unsupported import why_decode_is_shared, why_prefill_is_shared

__all__ = ["XFormersGroup"]


class _KeyTables(NamedTuple):
    """Where the keys of some sequences are."""

    seq_lens: torch.Tensor
    """`[num_sequences]` int32."""
    max_seq_len: int
    block_tables: torch.Tensor
    """`[num_sequences, width]` int32."""


class XFormersGroup(GpuGroup):
    """Queries of several tokens go to FlashAttention 2, decodes to split-k, the rest is shared."""

    def __init__(self, params: AttentionParams, spec: AttentionSpec, *, is_graph: bool) -> None:
        super().__init__(params, spec, is_graph=is_graph)
        self._ragged: RaggedAttention | None = None
        if why_prefill_is_shared(params) is None:
            self._ragged = RaggedAttention(params)
        self._decodes: PagedDecodes | None = None
        if why_decode_is_shared(params, spec) is None:
            self._decodes = PagedDecodes(params, spec, is_graph=is_graph)
        self._shared: SharedGroup | None = None
        if self._ragged is None or self._decodes is None:
            self._shared = SharedGroup(params, spec, is_graph=is_graph)

    @property
    def providers(self) -> dict[str, str]:
        """Return who computes each part of a step."""
        ragged = "shared" if self._ragged is None else "xformers"
        decode = "shared" if self._decodes is None else "xformers"
        return {"prefill": ragged, "prefill_ragged": ragged, "decode": decode}

    def plan(self, batch: GpuBatch) -> None:
        """Plan a step; the one before ends. Waits for nothing that the device does."""
        if self._shared is not None:
            self._shared.plan(batch)
        if self._ragged is not None:
            self._ragged.forget_step()
        if self._decodes is not None:
            tables = _get_seq_len_block_table_args(batch, self.params)
            if tables is not None:
                self._decodes.plan(*tables)

    def prefill(
        self, rows: Rows, query: torch.Tensor, cache: LayerCache, out: torch.Tensor
    ) -> None:
        """Attend for queries of several tokens over cached keys."""
        (self._ragged or self._ours).prefill(rows, query, cache, out)

    def prefill_ragged(
        self,
        rows: Rows,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Attend for sequences whose keys are those of their own tokens."""
        (self._ragged or self._ours).prefill_ragged(rows, query, key, value, out)

    def decode(self, rows: Rows, query: torch.Tensor, cache: LayerCache, out: torch.Tensor) -> None:
        """Attend for one query token of each sequence over cached keys."""
        if self._decodes is None:
            self._ours.decode(rows, query, cache, out)
        else:
            self._decodes.run(query, cache, out)

    @property
    def _ours(self) -> SharedGroup:
        assert self._shared is not None
        return self._shared


def _get_seq_len_block_table_args(batch: GpuBatch, params: AttentionParams) -> _KeyTables | None:
    """Return where the decodes of a step find their keys; None if there is nothing to find.

    Decoders read their own sequences, cross attention those of the encoders, and encoders have no
    blocks.
    """
    _, decodes = batch.rows_of(params.attention_type)
    if decodes is None or not params.is_cached:
        return None
    assert decodes.block_tables is not None
    return _KeyTables(decodes.seq_lens, decodes.max_seq_len, decodes.block_tables)
