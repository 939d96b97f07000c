"""What the FlashInfer backend runs for the layers that the library serves."""

import torch

from attention.flashinfer.decode import FlashInferDecode
from attention.flashinfer.pages import PageUploader
from attention.flashinfer.prompt_group import PromptGroup
from attention.gpu.batch import GpuBatch, Rows
from attention.gpu.group import LayerCache
from attention.params import AttentionParams, AttentionSpec

__all__ = ["FlashInferGroup"]


class FlashInferGroup(PromptGroup):
    """Decodes by the library too."""

    def __init__(
        self,
        params: AttentionParams,
        spec: AttentionSpec,
        *,
        is_graph: bool,
        uploader: PageUploader,
    ) -> None:
        """`uploader` serves all groups whose layers see the same keys."""
        super().__init__(params, spec, is_graph=is_graph, uploader=uploader)
        self._decode = FlashInferDecode(params, spec, is_graph=is_graph)

    @property
    def providers(self) -> dict[str, str]:
        """Return who computes each part of a step."""
        return {"prefill": "flashinfer", "prefill_ragged": "flashinfer", "decode": "flashinfer"}

    def plan(self, batch: GpuBatch) -> None:
        """Plan a step; the one before ends. Waits for nothing that the device does."""
        super().plan(batch)
        _, decodes = batch.rows_of(self.params.attention_type)
        if self.params.is_cached and decodes is not None and self._has_blocks(decodes):
            self._decode.plan(decodes, self._uploader.pages_of(decodes))

    def decode(self, rows: Rows, query: torch.Tensor, cache: LayerCache, out: torch.Tensor) -> None:
        """Attend for one query token of each sequence over cached keys."""
        # A graph's plan is made before each replay, and never while it is captured.
        if self._decode.planned is not rows and not self.is_graph:
            self._decode.plan(rows, self._uploader.pages_of(rows))
        self._decode.run(query, cache, out)
