"""Norms: of the residual stream, and of the heads of queries and keys."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn import functional

from attention.kernels.split_rows import SplitRows
from attention.kernels.unnormed_row import UnnormedRow
from pagedray.rank_roofline import WeightWork
from workers.layers.fused_kernels import (
    add_norm_kernel,
    add_parts_norm_kernel,
    head_norm_kernel,
    quantized_add_norm_kernel,
)
from workers.layers.weight import Layer, WeightShard
from workers.parallel.pending_sum import PendingSum

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attention.kernels.quantized_rows import QuantizedRows
    from workers.parallel.group import ParallelGroup

__all__ = ["LayerNorm", "OffsetRMSNorm", "QKNorm", "RMSNorm", "ResidualNorm"]


class ResidualNorm(Layer):
    """A norm of the residual stream, fused with the addition before it if a kernel does both."""

    _is_centered: ClassVar[bool] = False
    """Whether the mean is subtracted."""
    _weight_dtype: ClassVar[torch.dtype | None] = None
    """The dtype of the weight; None is that of the stream."""
    _dummy_weight: ClassVar[float] = 1.0

    def __init__(
        self,
        name: str,
        size: int,
        eps: float,
        *,
        has_bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
        sums_over: ParallelGroup | None = None,
        overlaps: bool = False,
    ) -> None:
        """`dtype` is that of the stream.

        With `sums_over`, what is added to the stream is this rank's part of a sum over the group.
        With `overlaps`, no kernel of NCCL comes right before this.
        """
        self._name = name
        self._weight = torch.empty(size, dtype=self._weight_dtype or dtype, device=device)
        self._bias = torch.empty_like(self._weight) if has_bias else None
        self._eps = eps
        self._dtype = dtype
        self._sums_over = sums_over
        self._overlaps = overlaps
        self._kernel = add_norm_kernel(
            self._weight,
            self._bias,
            eps,
            is_centered=self._is_centered,
            overlaps=overlaps,
            dtype=dtype,
        )
        self._parts_kernel = add_parts_norm_kernel(
            self._weight, self._bias, eps, is_centered=self._is_centered, overlaps=overlaps
        )
        self._quantized_kernel = quantized_add_norm_kernel(
            self._weight, self._bias, eps, is_centered=self._is_centered, overlaps=overlaps
        )

    def quantized(
        self, stream: torch.Tensor, delta: torch.Tensor | SplitRows | PendingSum | None
    ) -> torch.Tensor | QuantizedRows:
        """As the call, and quantizes the norm if one kernel does both."""
        if isinstance(delta, SplitRows):
            delta = delta.whole(stream.dtype)
        normed = self._normed_sum(stream, delta)
        if normed is not None or self._quantized_kernel is None:
            return normed if normed is not None else self(stream, delta)
        return self._quantized_kernel(stream, self._summed(delta))

    def unnormed(
        self, stream: torch.Tensor, delta: torch.Tensor | SplitRows | None
    ) -> torch.Tensor | UnnormedRow:
        """As the call, for one row, whose norm is left to its reader if nothing else is to do.

        A reader is a kernel that starts while the one before it ends, as this does if it overlaps.
        """
        is_rms = not self._is_centered and self._bias is None
        if delta is None and is_rms and self._overlaps:
            return UnnormedRow(stream, self._weight, self._eps)
        return self(stream, delta)

    def __call__(
        self,
        stream: torch.Tensor,
        delta: torch.Tensor | SplitRows | PendingSum | None = None,
    ) -> torch.Tensor:
        """Add `delta` to the stream, in place, and return the stream's norm.

        All are `[num_tokens, hidden_size]`. A pending sum is finished, whatever this sums over, and
        only a model on one rank has rows in parts.
        """
        if isinstance(delta, SplitRows):
            if self._parts_kernel is not None:
                return self._parts_kernel(stream, delta.parts)
            delta = delta.whole(stream.dtype)
        normed = self._normed_sum(stream, delta)
        if normed is not None:
            return normed
        delta = self._summed(delta)
        if self._kernel is not None:
            return self._kernel(stream, delta)
        if delta is not None:
            stream.add_(delta)
        return self._normed(stream)

    def _normed_sum(
        self, stream: torch.Tensor, delta: torch.Tensor | PendingSum | None
    ) -> torch.Tensor | None:
        """Return the norm if one kernel sums over the ranks, adds and norms; else None."""
        if isinstance(delta, PendingSum):
            add_norm = delta.add_norm
        else:
            one_shot = None if self._sums_over is None else self._sums_over.one_shot
            if delta is None or one_shot is None or not one_shot.takes(delta):
                return None
            add_norm = partial(one_shot.add_norm, delta=delta)
        return add_norm(
            stream,
            weight=self._weight,
            bias=self._bias,
            eps=self._eps,
            is_centered=self._is_centered,
        )

    def _summed(self, delta: torch.Tensor | PendingSum | None) -> torch.Tensor | None:
        if isinstance(delta, PendingSum):
            return delta.finish()
        if delta is None or self._sums_over is None:
            return delta
        return self._sums_over.all_reduce(delta)

    def weight_shards(self) -> Iterator[WeightShard]:
        yield _shard(f"{self._name}.weight", self._weight, dummy=self._dummy_weight)
        if self._bias is not None:
            yield _shard(f"{self._name}.bias", self._bias, dummy=0.0)

    def weight_work(self) -> WeightWork:
        num_bias_bytes = 0 if self._bias is None else self._bias.nbytes
        return WeightWork(num_bytes=self._weight.nbytes + num_bias_bytes)

    @abstractmethod
    def _normed(self, stream: torch.Tensor) -> torch.Tensor:
        """Return the norm of `[num_tokens, hidden_size]`, computed by torch."""


class RMSNorm(ResidualNorm):
    """Root mean square layer normalization (Zhang and Sennrich 2019)."""

    def _normed(self, stream: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(stream, self._weight.shape, self._weight, self._eps)


class OffsetRMSNorm(ResidualNorm):
    """Gemma's RMSNorm: scaled by one plus the weight, in float32 until the result is rounded."""

    # In bfloat16, one plus a small weight would lose most of the precision of the weight.
    _weight_dtype = torch.float32
    _dummy_weight = 0.0

    def finalize(self) -> None:
        self._weight.add_(1.0)

    def _normed(self, stream: torch.Tensor) -> torch.Tensor:
        normed = functional.rms_norm(stream.float(), self._weight.shape, self._weight, self._eps)
        return normed.to(self._dtype)


class LayerNorm(ResidualNorm):
    """Layer normalization (Ba, Kiros and Hinton 2016), with or without a bias."""

    _is_centered = True

    def _normed(self, stream: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(
            stream, self._weight.shape, self._weight, self._bias, self._eps
        )


class QKNorm(Layer):
    """RMSNorm of each head of queries and keys, with one weight for each of the two."""

    def __init__(
        self,
        names: tuple[str, str],
        head_size: int,
        eps: float,
        *,
        num_heads: int,
        num_kv_heads: int,
        has_offset: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._names = names
        self._head_size = head_size
        self._eps = eps
        self._dtype = dtype
        self._offset = 1.0 if has_offset else 0.0
        # As in `OffsetRMSNorm`, an offset needs float32 until the result is rounded.
        self._computed_dtype = torch.float32 if has_offset else dtype
        self._weights = torch.empty(2, head_size, dtype=self._computed_dtype, device=device)
        self._repeats = torch.tensor([num_heads, num_kv_heads], device=device)
        self._weight = torch.empty(0)
        self._kernel = head_norm_kernel(eps, device)

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """Return the norm of `[num_tokens, num_heads + num_kv_heads, head_size]`."""
        if self._kernel is not None:
            return self._kernel(heads, self._weight)
        heads = heads.to(self._computed_dtype)
        normed = functional.rms_norm(heads, (self._head_size,), None, self._eps)
        return normed.mul_(self._weight).to(self._dtype)

    def weight_shards(self) -> Iterator[WeightShard]:
        for name, target in zip(self._names, self._weights, strict=True):
            yield _shard(f"{name}.weight", target, dummy=1.0 - self._offset)

    def finalize(self) -> None:
        # [num_heads + num_kv_heads, head_size]
        self._weight = (self._weights + self._offset).repeat_interleave(self._repeats, dim=0)

    def weight_work(self) -> WeightWork:
        return WeightWork(num_bytes=self._weight.nbytes)


def _shard(name: str, target: torch.Tensor, *, dummy: float) -> WeightShard:
    return WeightShard(
        name=name, shape=tuple(target.shape), part=(slice(None),), target=target, dummy=dummy
    )
