"""What serves queries of several tokens by FlashInfer, whoever serves the decodes."""

import torch

from attention.flashinfer.pages import PageUploader
from attention.flashinfer.prefill import PagedPrefill, RaggedPrefill
from attention.gpu.batch import GpuBatch, Rows
from attention.gpu.group import GpuGroup, LayerCache
from attention.params import AttentionParams, AttentionSpec, AttentionType

__all__ = ["PromptGroup"]


class PromptGroup(GpuGroup):
    """Plans the prompts of a step ahead of it, and anything else when it is run."""

    def __init__(
        self,
        params: AttentionParams,
        spec: AttentionSpec,
        *,
        is_graph: bool,
        uploader: PageUploader,
    ) -> None:
        """`uploader` serves all groups whose layers see the same keys."""
        super().__init__(params, spec, is_graph=is_graph)
        self._uploader = uploader
        self._is_cross = params.attention_type is AttentionType.ENCODER_DECODER
        self._is_encoder = params.attention_type is AttentionType.ENCODER
        self._prefill = PagedPrefill(params, spec)
        self._ragged_prefill = RaggedPrefill(params, spec)

    def plan(self, batch: GpuBatch) -> None:
        """Plan a step; the one before ends. Waits for nothing that the device does."""
        prefills, _ = batch.rows_of(self.params.attention_type)
        if not self.params.is_cached:
            ragged = batch.encoders if self._is_encoder else prefills
            if ragged is not None:
                self._ragged_prefill.plan(ragged)
        elif prefills is not None:
            self._plan_prefills(prefills)

    def prefill(
        self, rows: Rows, query: torch.Tensor, cache: LayerCache, out: torch.Tensor
    ) -> None:
        """Attend for queries of several tokens over cached keys."""
        if self._prefill.planned is not rows:
            self._prefill.plan(rows, self._uploader.pages_of(rows))
        self._prefill.run(query, cache, out)

    def prefill_ragged(
        self,
        rows: Rows,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Attend for sequences whose keys are those of their own tokens."""
        if self._ragged_prefill.planned is not rows:
            self._ragged_prefill.plan(rows)
        self._ragged_prefill.run(query, key, value, out)

    def _plan_prefills(self, rows: Rows) -> None:
        if rows.has_no_context and not self._is_cross and self.spec.cache_dtype == self.spec.dtype:
            self._ragged_prefill.plan(rows)
        elif self._has_blocks(rows):
            self._prefill.plan(rows, self._uploader.pages_of(rows))

    def _has_blocks(self, rows: Rows) -> bool:
        """Return whether the keys have blocks: in a profile run they have none."""
        assert rows.host_block_tables is not None
        num_slots: int = rows.host_block_tables.shape[1] * self.spec.block_size
        return int(rows.host_seq_lens.max(initial=0)) <= num_slots
