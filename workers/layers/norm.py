"""Norms: of the residual stream, and of the heads of queries and keys."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from workers.layers.fused_kernels import add_norm_kernel, head_norm_kernel
from workers.layers.weight import WeightSlot

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["LayerNorm", "OffsetRMSNorm", "RMSNorm", "ResidualNorm", "RowNorm"]


class ResidualNorm(ABC):
    """A norm of token rows, which adds to the rows before if told to."""

    @abstractmethod
    def __call__(self, stream: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        """Add to the stream, in place, and return its norm, `[num_tokens, hidden_size]`."""

    @abstractmethod
    def slots(self) -> Iterator[WeightSlot]:
        """Yield the weight, and the bias if there is one."""

    @abstractmethod
    def finalize(self) -> None:
        """Bring the weight into the form that is computed with."""


class RMSNorm(ResidualNorm):
    """The root-mean-square norm."""

    def __init__(
        self, name: str, size: int, eps: float, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._name = name
        self._size = size
        self._eps = eps
        self._weight = torch.empty(size, dtype=dtype, device=device)
        self._kernel = add_norm_kernel(self._weight, None, eps, is_centred=False, dtype=dtype)

    def __call__(self, stream: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        """Add to the stream, in place, and return its norm, `[num_tokens, hidden_size]`."""
        if self._kernel is not None:
            return self._kernel(stream, delta)
        if delta is not None:
            stream.add_(delta)
        return functional.rms_norm(stream, (self._size,), self._weight, self._eps)

    def slots(self) -> Iterator[WeightSlot]:
        """Yield the weight."""
        yield _slot(f"{self._name}.weight", self._weight, dummy=1.0)

    def finalize(self) -> None:
        """Do nothing."""


class OffsetRMSNorm(ResidualNorm):
    """The root-mean-square norm times one plus the weight, rounded once, at the end."""

    def __init__(
        self, name: str, size: int, eps: float, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._name = name
        self._size = size
        self._eps = eps
        self._dtype = dtype
        # One plus a small weight would lose most of the weight's digits in bfloat16.
        self._weight = torch.empty(size, dtype=torch.float32, device=device)
        self._kernel = add_norm_kernel(self._weight, None, eps, is_centred=False, dtype=dtype)

    def __call__(self, stream: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        """Add to the stream, in place, and return its norm, `[num_tokens, hidden_size]`."""
        if self._kernel is not None:
            return self._kernel(stream, delta)
        if delta is not None:
            stream.add_(delta)
        normed = functional.rms_norm(stream.float(), (self._size,), self._weight, self._eps)
        return normed.to(self._dtype)

    def slots(self) -> Iterator[WeightSlot]:
        """Yield the weight."""
        yield _slot(f"{self._name}.weight", self._weight, dummy=0.0)

    def finalize(self) -> None:
        """Add the one."""
        self._weight.add_(1.0)


class LayerNorm(ResidualNorm):
    """The norm that takes the mean away first."""

    def __init__(
        self,
        name: str,
        size: int,
        eps: float,
        *,
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._name = name
        self._size = size
        self._eps = eps
        self._weight = torch.empty(size, dtype=dtype, device=device)
        self._bias = torch.empty(size, dtype=dtype, device=device) if has_bias else None
        self._kernel = add_norm_kernel(self._weight, self._bias, eps, is_centred=True, dtype=dtype)

    def __call__(self, stream: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        """Add to the stream, in place, and return its norm, `[num_tokens, hidden_size]`."""
        if self._kernel is not None:
            return self._kernel(stream, delta)
        if delta is not None:
            stream.add_(delta)
        return functional.layer_norm(stream, (self._size,), self._weight, self._bias, self._eps)

    def slots(self) -> Iterator[WeightSlot]:
        """Yield the weight, and the bias if there is one."""
        yield _slot(f"{self._name}.weight", self._weight, dummy=1.0)
        if self._bias is not None:
            yield _slot(f"{self._name}.bias", self._bias, dummy=0.0)

    def finalize(self) -> None:
        """Do nothing."""


class RowNorm:
    """The norm of each head of queries and keys, with a weight for each of the two."""

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
        # As in `OffsetRMSNorm`, an offset asks for float32 until the end.
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

    def slots(self) -> Iterator[WeightSlot]:
        """Yield both weights."""
        for name, target in zip(self._names, self._weights, strict=True):
            yield _slot(f"{name}.weight", target, dummy=1.0 - self._offset)

    def finalize(self) -> None:
        """Repeat the weights, a row for each head."""
        self._weight = (self._weights + self._offset).repeat_interleave(self._repeats, dim=0)


def _slot(name: str, target: torch.Tensor, *, dummy: float) -> WeightSlot:
    return WeightSlot(
        name=name, shape=tuple(target.shape), part=(slice(None),), target=target, dummy=dummy
    )
