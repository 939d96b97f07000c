"""The kernels of the FlashInfer and hybrid backends for layers that the library supports."""

import torch

from attention.flashinfer.decode import FlashInferDecode
from attention.flashinfer.pages import PageUploader
from attention.flashinfer.prefill import PagedPrefill, RaggedPrefill
from attention.gpu.batch import GpuBatch, SubBatch
from attention.gpu.layer_kernels import LayerCache, LayerKernels, LayerSet
from attention.gpu.shared_kernels import SharedKernels
from attention.kernels.new_tokens import NewTokens
from attention.params import AttentionType

__all__ = ["FlashInferKernels", "HybridKernels"]


class _FlashInferPrefills(LayerKernels):
    """Prefills by the library; the prefills of a step are planned ahead, others when they run."""

    def __init__(self, layers: LayerSet, uploader: PageUploader) -> None:
        """`uploader` is shared by all layers that see the same keys."""
        super().__init__(layers)
        params, spec = layers.params, layers.spec
        self._uploader = uploader
        self._is_cross = params.attention_type is AttentionType.ENCODER_DECODER
        self._is_encoder = params.attention_type is AttentionType.ENCODER
        self._paged = PagedPrefill(params, spec)
        self._ragged = RaggedPrefill(params, spec)

    def plan_step(self, batch: GpuBatch) -> None:
        prefills, _ = batch.sub_batches_of(self.params.attention_type)
        if not self.params.is_cached:
            ragged = batch.encoders if self._is_encoder else prefills
            if ragged is not None:
                self._ragged.plan_prefills(ragged)
        elif prefills is not None:
            self._plan_cached(prefills)

    def prefill(
        self,
        sub_batch: SubBatch,
        query: torch.Tensor,
        cache: LayerCache,
        out: torch.Tensor,
        *,
        sinks: torch.Tensor | None,
    ) -> None:
        if self._paged.planned is not sub_batch:
            self._paged.plan_prefills(sub_batch, self._uploader.pages_of(sub_batch))
        self._paged.run_prefills(query, cache, out)

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
        if self._ragged.planned is not sub_batch:
            self._ragged.plan_prefills(sub_batch)
        self._ragged.run_prefills(query, key, value, out)

    def _plan_cached(self, prefills: SubBatch) -> None:
        is_same_dtype = self.spec.cache_dtype == self.spec.dtype
        if prefills.has_no_context and not self._is_cross and is_same_dtype:
            self._ragged.plan_prefills(prefills)
        elif self._has_blocks(prefills):
            self._paged.plan_prefills(prefills, self._uploader.pages_of(prefills))

    def _has_blocks(self, sub_batch: SubBatch) -> bool:
        """Return whether the keys have blocks: in a profile run they have none."""
        assert sub_batch.host_block_tables is not None
        num_slots: int = sub_batch.host_block_tables.shape[1] * self.spec.block_size
        return int(sub_batch.host_seq_lens.max(initial=0)) <= num_slots


class FlashInferKernels(_FlashInferPrefills):
    """Prefills and decodes by the library."""

    def __init__(self, layers: LayerSet, uploader: PageUploader) -> None:
        super().__init__(layers, uploader)
        self._decode = FlashInferDecode(layers.params, layers.spec, is_graph=layers.is_graph)

    @property
    def providers(self) -> dict[str, str]:
        return dict.fromkeys(("prefill", "prefill_ragged", "decode"), "flashinfer")

    def plan_step(self, batch: GpuBatch) -> None:
        super().plan_step(batch)
        _, decodes = batch.sub_batches_of(self.params.attention_type)
        if self.params.is_cached and decodes is not None and self._has_blocks(decodes):
            self._decode.plan_decodes(decodes, self._uploader.pages_of(decodes))

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
        assert new is None
        # A graph's plan is made before each replay, and never while it is captured.
        if self._decode.planned is not sub_batch and not self.is_graph:
            self._decode.plan_decodes(sub_batch, self._uploader.pages_of(sub_batch))
        self._decode.run_decodes(query, cache, out)


class HybridKernels(_FlashInferPrefills):
    """Prefills by the library; decodes by the shared kernel, which needs no plan of pages."""

    def __init__(self, layers: LayerSet, uploader: PageUploader) -> None:
        super().__init__(layers, uploader)
        self._shared = SharedKernels(layers)

    @property
    def providers(self) -> dict[str, str]:
        return {"prefill": "flashinfer", "prefill_ragged": "flashinfer", "decode": "shared"}

    @property
    def takes_new_tokens(self) -> bool:
        return self._shared.takes_new_tokens

    def plan_step(self, batch: GpuBatch) -> None:
        super().plan_step(batch)
        self._shared.plan_step(batch)

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
        self._shared.decode(sub_batch, query, cache, out, sinks=sinks, new=new)
