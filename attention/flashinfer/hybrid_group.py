"""What the hybrid backend runs: FlashInfer for prompts, the shared kernel for decodes."""

import torch

from attention.flashinfer.pages import PageUploader
from attention.flashinfer.prompt_group import PromptGroup
from attention.gpu.batch import GpuBatch, Rows
from attention.gpu.group import LayerCache
from attention.gpu.shared_group import SharedGroup
from attention.params import AttentionParams, AttentionSpec

__all__ = ["HybridGroup"]


class HybridGroup(PromptGroup):
    """Decodes by the shared kernel, which needs no plan of a step's pages."""

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
        self._shared = SharedGroup(params, spec, is_graph=is_graph)

    @property
    def providers(self) -> dict[str, str]:
        """Return who computes each part of a step."""
        return {"prefill": "flashinfer", "prefill_ragged": "flashinfer", "decode": "shared"}

    def plan(self, batch: GpuBatch) -> None:
        """Plan a step; the one before ends. Waits for nothing that the device does."""
        super().plan(batch)
        self._shared.plan(batch)

    def decode(self, rows: Rows, query: torch.Tensor, cache: LayerCache, out: torch.Tensor) -> None:
        """Attend for one query token of each sequence over cached keys."""
        self._shared.decode(rows, query, cache, out)
