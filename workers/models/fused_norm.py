"""Norms of the residual stream that add to it first, by one kernel if there is one.

What they add may be an output as it is, its parts, a sum over ranks that has begun, or an output
that is normed before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch

from attention.kernels.arguments import DeferredRMSNorm, QuantizedRows, SplitKPartials
from workers.layers.fused_kernels import (
    AddNormedKernel,
    NormKernels,
    add_normed_kernel,
    norm_kernels,
)
from workers.layers.norm import Norm
from workers.parallel.pending_sum import PendingSum

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workers.parallel.group import ParallelGroup

__all__ = ["Delta", "FusedNorm", "NormedDelta", "Reader", "Rows"]

Rows: TypeAlias = torch.Tensor | QuantizedRows | DeferredRMSNorm
"""Inputs of a product, `[num_tokens, hidden_size]`."""


class Reader:
    """The layer that reads a norm; the base class accepts tensors alone."""

    def accepts_quantized(self, num_rows: int) -> bool:
        """Return whether the layer accepts this number of rows as `QuantizedRows`."""
        return False

    def accepts_deferred_norm(self, num_rows: int) -> bool:
        """Return whether the layer accepts this number of rows as a `DeferredRMSNorm`."""
        return False


@dataclass(frozen=True, slots=True, eq=False)
class NormedDelta:
    """An output that is normed before it is added to the stream; the sum may be scaled."""

    output: torch.Tensor
    norm: FusedNorm
    beside: tuple[torch.Tensor, Norm, Norm] | None = None
    """Another output, the norm of `output`, and the norm of the other output; `norm` norms the sum
    of both."""
    scale: torch.Tensor | None = None
    """A factor of the stream after the addition, `[1]`."""

    def select(self, indices: torch.Tensor) -> NormedDelta:
        """Return the delta of some tokens; `indices` is `[num_selected]` int64."""
        beside = self.beside
        if beside is not None:
            beside = (beside[0].index_select(0, indices), *beside[1:])
        return replace(self, output=self.output.index_select(0, indices), beside=beside)

    def add_to(self, stream: torch.Tensor, norms: Sequence[Norm]) -> Sequence[torch.Tensor] | None:
        """Add to the stream, in place, and return norms of it, if one kernel does all of this."""
        kernel = self.norm.add_normed
        if kernel is None or any(norm.is_centered or norm.bias is not None for norm in norms):
            return None
        beside = None
        if self.beside is not None:
            other, output_norm, other_norm = self.beside
            beside = other, output_norm.weight, other_norm.weight
        weights = [norm.weight for norm in norms]
        return kernel(stream, self.output, weights, beside=beside, scale=self.scale)

    def summand(self, stream: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor to add to the stream; None if it is in the stream, in place."""
        output = self.output
        if self.beside is not None:
            other, output_norm, other_norm = self.beside
            output = output_norm(output).add_(other_norm(other))
        normed = self.norm(output)
        if self.scale is None:
            return normed
        stream.add_(normed).mul_(self.scale)
        return None


Delta: TypeAlias = torch.Tensor | SplitKPartials | PendingSum | NormedDelta | None
"""An addition to the residual stream; None if the stream contains the sum already."""


class FusedNorm:
    """Adds to the residual stream, in place, and norms the sum, by one kernel if there is one."""

    def __init__(
        self, norm: Norm | None, *, sums_over: ParallelGroup | None = None, overlaps: bool = False
    ) -> None:
        """Without a norm, the stream itself is returned.

        With `sums_over`, what is added to the stream is this rank's part of a sum over the group.
        With `overlaps`, no kernel of NCCL comes right before this.
        """
        self._norm = norm
        self._sums_over = sums_over
        self._kernels = NormKernels()
        self._defers = False
        self.add_normed: AddNormedKernel | None = None
        """The kernel that adds norms of this kind to the stream, if there is one."""
        if norm is not None:
            is_plain = not norm.is_centered and norm.bias is None
            if is_plain:
                self.add_normed = add_normed_kernel(norm.weight, norm.eps, overlaps=overlaps)
            # A reader is a kernel that starts before this kernel ends.
            self._defers = overlaps and is_plain
            self._kernels = norm_kernels(
                norm.weight,
                norm.bias,
                norm.eps,
                is_centered=norm.is_centered,
                overlaps=overlaps,
                dtype=norm.dtype,
            )

    def __call__(self, stream: torch.Tensor, delta: Delta = None) -> torch.Tensor:
        """Add `delta` to the stream, in place, and return the stream's norm.

        All are `[num_tokens, hidden_size]`. A pending sum is finished, whatever this sums over, and
        only a model on one rank has products in parts.
        """
        if isinstance(delta, NormedDelta):
            return self.with_others(stream, delta, ())[0]
        if isinstance(delta, SplitKPartials):
            if self._kernels.add_parts is not None:
                return self._kernels.add_parts(stream, delta.parts)
            delta = delta.whole(stream.dtype)
        normed = self._normed_sum(stream, delta)
        if normed is not None:
            return normed
        delta = self._summed(delta)
        if self._kernels.add is not None:
            return self._kernels.add(stream, delta)
        if delta is not None:
            stream.add_(delta)
        return stream if self._norm is None else self._norm(stream)

    def with_others(
        self, stream: torch.Tensor, delta: NormedDelta, others: Sequence[Norm]
    ) -> Sequence[torch.Tensor]:
        """Return what the call does, and other norms of the stream, of the same epsilon."""
        own = () if self._norm is None else (self._norm,)
        normed = delta.add_to(stream, (*own, *others))
        if normed is not None:
            return normed if own else (stream, *normed)
        first = self(stream, delta.summand(stream))
        return first, *(norm(stream) for norm in others)

    def rows_for(self, stream: torch.Tensor, delta: Delta, reader: Reader) -> Rows:
        """Return what the call does, as its reader can best read it.

        It is quantized if the reader would quantize it, and one row may be left to the reader.
        """
        if reader.accepts_quantized(len(stream)):
            return self.quantized(stream, delta)
        if delta is None and self._defers and reader.accepts_deferred_norm(len(stream)):
            assert self._norm is not None
            return DeferredRMSNorm(stream, self._norm.weight, self._norm.eps)
        return self(stream, delta)

    def quantized(self, stream: torch.Tensor, delta: Delta) -> torch.Tensor | QuantizedRows:
        """Return what the call does, quantized if one kernel does both."""
        if self._kernels.add_quantized is None:
            return self(stream, delta)
        if isinstance(delta, NormedDelta):
            delta = delta.summand(stream)
        if isinstance(delta, SplitKPartials):
            delta = delta.whole(stream.dtype)
        normed = self._normed_sum(stream, delta)
        if normed is not None:
            return normed
        return self._kernels.add_quantized(stream, self._summed(delta))

    def _normed_sum(
        self, stream: torch.Tensor, delta: torch.Tensor | PendingSum | None
    ) -> torch.Tensor | None:
        """Return the norm if one kernel sums over the ranks, adds and norms; else None."""
        norm = self._norm
        if norm is None:
            return None
        if isinstance(delta, PendingSum):
            add_norm = delta.add_norm
        else:
            one_shot = None if self._sums_over is None else self._sums_over.one_shot
            if delta is None or one_shot is None or not one_shot.takes(delta):
                return None
            add_norm = partial(one_shot.add_norm, delta=delta)
        return add_norm(
            stream, weight=norm.weight, bias=norm.bias, eps=norm.eps, is_centered=norm.is_centered
        )

    def _summed(self, delta: torch.Tensor | PendingSum | None) -> torch.Tensor | None:
        if isinstance(delta, PendingSum):
            return delta.finish()
        if delta is None or self._sums_over is None:
            return delta
        return self._sums_over.all_reduce(delta)
