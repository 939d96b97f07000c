"""Runs the layers of a decoder on two halves of a step's tokens in turn.

While the ranks sum the output of a product over one half, they compute the other half. Only
attention is computed for all tokens at once, as those of a prompt may be in both halves. Systems
that serve experts hide what ranks exchange behind a second batch in the same way (DeepSeek-AI,
"DeepSeek-V3 Technical Report", 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedray.rank_progress import Phase
from workers.layers.mlp import MLP
from workers.layers.norm import ResidualNorm
from workers.models.attended import Attended
from workers.models.self_attention import DecoderSelfAttention

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch

    from attention.kernels.quantized_rows import QuantizedRows
    from workers.layers.rope import Rotation
    from workers.models.step_attention import SelectedAttention, StepAttention
    from workers.parallel.group import ParallelGroup
    from workers.parallel.pending_sum import PendingSum

__all__ = ["HalvedLayer", "HalvedLayers"]

_MIN_TOKENS = 6144
"""Below, the host takes about as long to launch twice as many kernels as the device to run them."""
_TILE_ROWS = 128
"""Rows of a tile of the GEMMs of many rows."""


@dataclass(frozen=True, slots=True, eq=False)
class HalvedLayer:
    """One layer, whose only norms are those before attention and MLP."""

    attention_norm: ResidualNorm
    attention: DecoderSelfAttention
    mlp_norm: ResidualNorm
    mlp: MLP

    def attend(
        self,
        streams: Sequence[torch.Tensor],
        deltas: Sequence[PendingSum | None],
        rotation: Rotation,
        attention: StepAttention,
    ) -> torch.Tensor:
        """Return the attention of this rank's heads, `[num_tokens, num_heads * head_size]`.

        `streams` are the halves of the residual stream, `[num_tokens of the half, hidden_size]`,
        and `deltas` sums of the outputs of the layer before, which are added to them.
        """
        sizes = [len(stream) for stream in streams]
        qkv = streams[0].new_empty(sum(sizes), self.attention.num_qkv_columns)
        rotary = self.attention.rotary_of_products(rotation, sizes)
        rotaries = [None] * len(sizes) if rotary is None else rotary.split(sizes)
        halves = zip(streams, deltas, qkv.split(sizes), rotaries, strict=True)
        for stream, delta, out, of_half in halves:
            normed = _normed(self.attention_norm, stream, delta, self.attention)
            self.attention.write_qkv(normed, out, of_half)
        return self.attention.attend(qkv, rotation if rotary is None else None, attention)

    def finish(
        self,
        streams: Sequence[torch.Tensor],
        attended: torch.Tensor,
        begin_sum: Callable[[torch.Tensor], PendingSum],
    ) -> Iterator[torch.Tensor]:
        """Yield this rank's part of the output of each half, as soon as it is launched."""
        parts = attended.split([len(stream) for stream in streams])
        # Both are begun before the first is finished.
        sums = [begin_sum(self.attention.output(part)) for part in parts]
        for stream, pending in zip(streams, sums, strict=True):
            yield self.mlp(_normed(self.mlp_norm, stream, pending, self.mlp))


class HalvedLayers:
    """All layers of a decoder on one of several ranks."""

    def __init__(self, layers: Sequence[HalvedLayer], group: ParallelGroup) -> None:
        self._layers = layers
        self._group = group

    def prepare_steps(self, max_num_tokens: int) -> None:
        """Have the group allocate what steps of up to this many tokens need, if any is halved."""
        if self.takes(max_num_tokens):
            self._group.max_begun_rows = _first_half(max_num_tokens)

    def takes(self, num_tokens: int) -> bool:
        """Return whether a step of this number of tokens takes less time in halves."""
        return self._group.overlaps_sums and num_tokens >= _MIN_TOKENS

    def run(
        self,
        residual: torch.Tensor,
        rotations: Iterable[Rotation],
        attention: StepAttention,
        last_attention: SelectedAttention | None = None,
    ) -> Attended:
        """Run all layers but what follows the attention of the last one.

        `residual` is `[num_tokens, hidden_size]`, and changes in place. `last_attention` is that of
        the last layer, if another one than that of the others.
        """
        num_tokens = len(residual)
        first = _first_half(num_tokens)
        streams = residual.split((first, num_tokens - first))
        deltas: Sequence[PendingSum | None] = (None, None)
        begin_sum = self._group.begin_all_reduce
        for index, (layer, rotation) in enumerate(zip(self._layers, rotations, strict=True)):
            self._group.progress.enter(Phase.LAYER, index)
            is_last = index == len(self._layers) - 1
            if is_last and last_attention is not None:
                attention = last_attention
            attended = layer.attend(streams, deltas, rotation, attention)
            if is_last:
                return Attended(residual, attended)
            # The sum of one half is begun before the other half is computed.
            deltas = [begin_sum(part) for part in layer.finish(streams, attended, begin_sum)]
        raise AssertionError("A decoder has layers.")


def _first_half(num_tokens: int) -> int:
    """Return the tokens of the first half, which has at least as many as the second."""
    return -(-num_tokens // (2 * _TILE_ROWS)) * _TILE_ROWS


def _normed(
    norm: ResidualNorm,
    stream: torch.Tensor,
    delta: PendingSum | None,
    reader: DecoderSelfAttention | MLP,
) -> torch.Tensor | QuantizedRows:
    if reader.takes_quantized(len(stream)):
        return norm.quantized(stream, delta)
    return norm(stream, delta)
