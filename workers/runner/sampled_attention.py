"""The attention of the last layer for sampled tokens alone.

No layer reads the last layer's output for other tokens. Their keys and values are written all the
same, since later steps read them. For attention, sampled tokens are decodes: each sees the whole
sequence before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attention.abstract import AttentionInputs
from workers.models.step_attention import SelectedAttention

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from attention.abstract import AttentionMetadata, AttentionMetadataBuilder
    from attention.layer import Attention
    from workers.runner.input_batch import StepInputs

__all__ = ["SampledAttention"]


class SampledAttention:
    """Makes the attention of the last layer for the steps of a rank."""

    def __init__(
        self,
        kv_cache: torch.Tensor,
        builder: AttentionMetadataBuilder,
        sampled_builder: AttentionMetadataBuilder,
    ) -> None:
        """`builder` is that of the steps, and `sampled_builder` another one of the same backend."""
        self._kv_cache = kv_cache
        self._builder = builder
        self._sampled_builder = sampled_builder

    def of_step(self, inputs: StepInputs, metadata: AttentionMetadata) -> SelectedAttention | None:
        """Return the attention for the tokens of `logits_indices`; None if not all are sampled.

        `metadata` belongs to the step. The next call invalidates the result.
        """
        if inputs.sampled_sequences is None:
            return None
        assert inputs.logits_indices is not None
        decodes = inputs.attention.last_tokens(inputs.sampled_sequences)
        sampled = self._sampled_builder.build(decodes) if decodes.num_decodes else None

        def write(layer: Attention, key: torch.Tensor, value: torch.Tensor) -> None:
            slots = metadata.device_slot_mapping
            self._builder.write_layer(layer.layer_index, key, value, self._kv_cache, slots)

        return _SampledStep(self._kv_cache, inputs.logits_indices, sampled, write)


class _SampledStep(SelectedAttention):
    """Attends for the sampled tokens of a step, as decodes."""

    def __init__(
        self,
        kv_cache: torch.Tensor,
        indices: torch.Tensor,
        metadata: AttentionMetadata | None,
        write: Callable[[Attention, torch.Tensor, torch.Tensor], None],
    ) -> None:
        """`metadata` has the tokens of `indices` as decodes, and is None if there are none.

        `write` writes the keys and values of all tokens to the cache.
        """
        super().__init__(indices)
        self._kv_cache = kv_cache
        self._metadata = metadata
        self._write = write

    def attend_selected(
        self,
        layer: Attention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        self._write(layer, key, value)
        out = query.new_empty(query.shape)
        if self._metadata is not None:
            inputs = AttentionInputs(query, key, value, sinks=layer.sinks, is_cached=True)
            self._metadata.attend(layer.layer_index, inputs, self._kv_cache, out)
        return out.flatten(1)
