"""Token embedding and language model head, sharded over the ranks by vocabulary (Megatron-LM).

The vocabulary is padded with zeros to a multiple of the number of ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from workers.layers.activation import soft_capped
from workers.layers.formats.make_kernel import CpuInt8Linear, make_format_kernel
from workers.layers.linear_choice import linear_kernel_class
from workers.layers.sharded_logits import ShardedLogits
from workers.layers.weight import Layer, MatrixPart, Placement, WeightShard, divided

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagedray.rank_roofline import WeightWork
    from workers.parallel.group import ParallelGroup

__all__ = ["ParallelHead", "PositionEmbedding", "VocabEmbedding"]


class VocabEmbedding(Layer):
    """The token embedding, scaled by `scale`."""

    def __init__(
        self, name: str, vocab_size: int, hidden_size: int, place: Placement, *, scale: float = 1.0
    ) -> None:
        self._name = name
        self._scale = float(torch.tensor(scale).to(place.dtype))
        self._group = place.group
        self._vocab = _VocabShard(vocab_size, place.group)
        self.weight = torch.zeros(
            self._vocab.num_rows, hidden_size, dtype=place.dtype, device=place.device
        )
        """`[padded vocab_size / number of ranks, hidden_size]`"""

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return `[num_tokens, hidden_size]`, equal on all ranks, for `[num_tokens]` int64."""
        embedded = self._lookup(token_ids)
        return embedded if self._scale == 1.0 else embedded.mul_(self._scale)

    def weight_shards(self) -> Iterator[WeightShard]:
        yield self._vocab.weight_shard(self._name, self.weight)

    def _lookup(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._group.size == 1:
            return functional.embedding(token_ids, self.weight)
        local = token_ids - self._vocab.first
        is_elsewhere = (local < 0) | (local >= self._vocab.num_rows)
        rows = functional.embedding(local.masked_fill_(is_elsewhere, 0), self.weight)
        rows.masked_fill_(is_elsewhere.unsqueeze(1), 0.0)
        return self._group.all_reduce(rows)


class ParallelHead(Layer):
    """Hidden states to logits; each rank computes its part of the vocabulary.

    `soft_cap` bounds them as `soft_cap * tanh(logits / soft_cap)`, as Gemma-2 does, after `scale`
    multiplies them.
    """

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        place: Placement,
        *,
        soft_cap: float | None = None,
        scale: float = 1.0,
        tied_to: VocabEmbedding | None,
    ) -> None:
        self._name = name
        self._hidden_size = hidden_size
        self._vocab_size = vocab_size
        self._soft_cap = soft_cap
        self._scale = scale
        self._group = place.group
        self._vocab = _VocabShard(vocab_size, place.group)
        self._is_tied = tied_to is not None and not _has_own_format(name, place)
        if tied_to is not None and self._is_tied:
            self._kernel = linear_kernel_class(place.dtype, place.device)(tied_to.weight, None)
            return
        if place.quantization is not None and not place.quantization.has_head:
            place = replace(place, quantization=None)
        self._kernel = make_format_kernel(
            [name], self._vocab.num_rows, hidden_size, place, has_bias=False
        )
        self._kernel.weight.zero_()

    def __call__(self, hidden: torch.Tensor) -> ShardedLogits:
        """Return this rank's part of the logits of each token.

        They are float32 with a soft cap, and else of the model's dtype: sampling reads every dtype.
        `hidden` is `[num_tokens, hidden_size]`.
        """
        logits = self._kernel(hidden)
        if self._scale != 1.0:
            logits.mul_(self._scale)
        if self._soft_cap is not None:
            logits = soft_capped(logits, self._soft_cap)
        return ShardedLogits(
            logits, first_id=self._vocab.first, vocab_size=self._vocab_size, group=self._group
        )

    def weight_shards(self) -> Iterator[WeightShard]:
        if not self._is_tied:
            first, end = self._vocab.loaded
            source = MatrixPart(
                name=self._name,
                shape=(self._vocab_size, self._hidden_size),
                part=(slice(first, end), slice(None)),
            )
            yield from self._kernel.weight_shards(source, slice(0, end - first))

    def finalize(self) -> None:
        # A dense kernel keeps a tied weight shared with the embedding.
        self._kernel.finalize()

    def weight_work(self) -> WeightWork:
        return self._kernel.work(self._vocab.num_rows, self._hidden_size)


def _has_own_format(name: str, place: Placement) -> bool:
    """Return whether a tied head stays quantized, though the embedding is dequantized.

    Only CPUs multiply by numbers as they are stored; elsewhere the head would take more memory.
    """
    quantization = place.quantization
    if quantization is None or quantization.method != "gguf" or place.device.type != "cpu":
        return False
    return CpuInt8Linear.supports(place.dtype) and quantization.format_of([name]) is not None


class _VocabShard:
    """The part of the vocabulary that a rank holds."""

    def __init__(self, vocab_size: int, group: ParallelGroup) -> None:
        self._vocab_size = vocab_size
        self.num_rows = divided(vocab_size, group.size)
        self.first = group.rank * self.num_rows

    @property
    def loaded(self) -> tuple[int, int]:
        """The first of its rows that a checkpoint has, and the end of them, without padding."""
        first = min(self.first, self._vocab_size)
        return first, min(self.first + self.num_rows, self._vocab_size)

    def weight_shard(self, name: str, rows: torch.Tensor) -> WeightShard:
        """Return the shard that loads these rows, without the padding."""
        first, end = self.loaded
        return WeightShard(
            name=f"{name}.weight",
            shape=(self._vocab_size, rows.shape[1]),
            part=(slice(first, end), slice(None)),
            target=rows[: end - first],
        )


class PositionEmbedding(Layer):
    """A learned vector for each position; every rank holds the whole table."""

    def __init__(self, name: str, max_positions: int, hidden_size: int, place: Placement) -> None:
        self._name = name
        self._table = torch.empty(
            max_positions, hidden_size, dtype=place.dtype, device=place.device
        )

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """Return `[num_tokens, hidden_size]` for positions `[num_tokens]` int64."""
        return functional.embedding(positions, self._table)

    def weight_shards(self) -> Iterator[WeightShard]:
        yield WeightShard.whole(self._name, self._table)
