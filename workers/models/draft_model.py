"""Draft models: whole decoders that draft tokens of a larger model, from tokens alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from workers.models.draft_head import DraftOutputs, RankDrafter

if TYPE_CHECKING:
    from workers.layers.sharded_logits import ShardedLogits
    from workers.models.decoder import Decoder
    from workers.models.self_attention import StepAttention

__all__ = ["DraftModel"]


class DraftModel(RankDrafter):
    """One rank's part of a draft model.

    Vocabularies may be padded to different sizes. A token that the draft model lacks is replaced.
    """

    lag = 0

    def __init__(self, decoder: Decoder, *, vocab_size: int) -> None:
        """`vocab_size` is that of the target."""
        self._decoder = decoder
        self.layers, self.vocab_size = decoder.config, vocab_size
        size = min(decoder.config.vocab_size, vocab_size)
        self.token_ids = torch.arange(size, device=decoder.device)

    def read(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: StepAttention
    ) -> None:
        self._decoder.run_layers(self._known(token_ids), positions, attention)

    def run(
        self,
        token_ids: torch.Tensor,
        states: torch.Tensor | None,
        positions: torch.Tensor,
        attention: StepAttention,
    ) -> DraftOutputs:
        hidden = self._decoder.forward(self._known(token_ids), positions, attention, None)
        return DraftOutputs(hidden, None)

    def logits(self, outputs: DraftOutputs) -> ShardedLogits:
        return self._decoder.logits(outputs.normed).cut(self.vocab_size)

    def _known(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return tokens of the vocabulary of the draft model."""
        size = self.layers.vocab_size
        return token_ids if size >= self.vocab_size else token_ids.clamp(max=size - 1)
