"""Norms: of the residual stream, and of the heads of queries and keys."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn import functional

from pagedray.rank_roofline import WeightWork
from workers.layers.fused_kernels import head_norm_kernel
from workers.layers.weight import Layer, Placement, WeightShard

if TYPE_CHECKING:
    from collections.abc import Iterator


__all__ = ["LayerNorm", "Norm", "OffsetRMSNorm", "QKNorm", "RMSNorm", "WholeQKNorm"]


class Norm(Layer):
    """A norm of the residual stream, computed by torch; `FusedNorm` has kernels for it."""

    is_centered: ClassVar[bool] = False
    """Whether the mean is subtracted."""
    _weight_dtype: ClassVar[torch.dtype | None] = None
    """The dtype of the weight; None is that of the stream."""
    _dummy_weight: ClassVar[float] = 1.0

    def __init__(
        self, name: str, size: int, eps: float, place: Placement, *, has_bias: bool = False
    ) -> None:
        self._name = name
        self.weight = torch.empty(
            size, dtype=self._weight_dtype or place.dtype, device=place.device
        )
        self.bias = torch.empty_like(self.weight) if has_bias else None
        self.eps = eps
        self.dtype = place.dtype
        """The dtype of the stream."""

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of `[num_tokens, hidden_size]`."""

    def weight_shards(self) -> Iterator[WeightShard]:
        yield WeightShard.whole(f"{self._name}.weight", self.weight, dummy=self._dummy_weight)
        if self.bias is not None:
            yield WeightShard.whole(f"{self._name}.bias", self.bias, dummy=0.0)

    def weight_work(self) -> WeightWork:
        num_bias_bytes = 0 if self.bias is None else self.bias.nbytes
        return WeightWork(num_bytes=self.weight.nbytes + num_bias_bytes)


class RMSNorm(Norm):
    """Root mean square layer normalization (Zhang and Sennrich 2019)."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class OffsetRMSNorm(Norm):
    """Gemma's RMSNorm: scaled by one plus the weight, in float32 until the result is rounded."""

    # In bfloat16, one plus a small weight would lose most of the precision of the weight.
    _weight_dtype = torch.float32
    _dummy_weight = 0.0

    def finalize(self) -> None:
        self.weight.add_(1.0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        normed = functional.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)
        return normed.to(self.dtype)


class LayerNorm(Norm):
    """Layer normalization (Ba, Kiros and Hinton 2016), with or without a bias."""

    is_centered = True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class QKNorm(Layer):
    """RMSNorm of each head of queries and keys, with one weight for each of the two.

    Heads of values may follow, which are normed without a weight.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        head_size: int,
        eps: float,
        place: Placement,
        *,
        num_heads: int,
        num_kv_heads: int,
        has_offset: bool,
        norms_values: bool = False,
    ) -> None:
        """With a single name, there are only queries."""
        device = place.device
        self._names = names
        self._head_size = head_size
        self._eps = eps
        self._dtype = place.dtype
        self._offset = 1.0 if has_offset else 0.0
        # As in `OffsetRMSNorm`, an offset needs float32 until the result is rounded.
        self._computed_dtype = torch.float32 if has_offset else place.dtype
        repeats = [num_heads, num_kv_heads, num_kv_heads][: len(names) + norms_values]
        self._weights = torch.ones(
            len(repeats), head_size, dtype=self._computed_dtype, device=device
        ).sub_(self._offset)
        self._repeats = torch.tensor(repeats, device=device)
        self._weight = torch.empty(0)
        self._kernel = head_norm_kernel(eps, device)

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """Return the norm of all heads, `[num_tokens, number of heads, head_size]`."""
        if self._kernel is not None:
            return self._kernel(heads, self._weight)
        heads = heads.to(self._computed_dtype)
        normed = functional.rms_norm(heads, (self._head_size,), None, self._eps)
        return normed.mul_(self._weight).to(self._dtype)

    def weight_shards(self) -> Iterator[WeightShard]:
        for name, target in zip(self._names, self._weights, strict=False):
            yield WeightShard.whole(f"{name}.weight", target, dummy=1.0 - self._offset)

    def finalize(self) -> None:
        # [number of heads, head_size]
        self._weight = (self._weights + self._offset).repeat_interleave(self._repeats, dim=0)

    def weight_work(self) -> WeightWork:
        return WeightWork(num_bytes=self._weight.nbytes)


class WholeQKNorm(Layer):
    """RMSNorm over all heads, of which ranks sum their parts: two numbers for each token."""

    def __init__(
        self,
        names: tuple[str, str],
        head_size: int,
        eps: float,
        place: Placement,
        *,
        num_heads: int,
        num_kv_heads: int,
    ) -> None:
        """`num_heads` and `num_kv_heads` count the heads of all ranks together."""
        self._names = names
        self._eps = eps
        group, device = place.group, place.device
        self._dtype = place.dtype
        self._group = group
        self._totals = (num_heads * head_size, num_kv_heads * head_size)
        local = (num_heads // group.size, max(1, num_kv_heads // group.size))
        # The first KV head of this rank; a head that several ranks hold counts several times.
        firsts = (group.rank * local[0], group.rank * num_kv_heads // group.size)
        self._parts = tuple(
            slice(first * head_size, (first + number) * head_size)
            for first, number in zip(firsts, local, strict=True)
        )
        self._num_queries = local[0]
        self._weight = torch.empty(sum(local), head_size, dtype=torch.float32, device=device)
        sizes = [group.size * number * head_size for number in local]
        self._sizes = torch.tensor(sizes, dtype=torch.float32, device=device)

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """Return the norm of `[num_tokens, num_heads + num_kv_heads, head_size]`."""
        heads = heads.to(torch.float32, copy=True)
        squares = heads.square().sum(2)  # [num_tokens, num_heads + num_kv_heads]
        queries = squares[:, : self._num_queries].sum(1)
        keys = squares[:, self._num_queries :].sum(1)
        sums = self._group.all_reduce(torch.stack((queries, keys), dim=1))
        scales = torch.rsqrt(sums / self._sizes + self._eps)
        query_scale, key_scale = scales[:, None].unsqueeze(3).unbind(2)  # [num_tokens, 1, 1]
        heads[:, : self._num_queries].mul_(query_scale)
        heads[:, self._num_queries :].mul_(key_scale)
        return heads.mul_(self._weight).to(self._dtype)

    def weight_work(self) -> WeightWork:
        return WeightWork(num_bytes=self._weight.nbytes)

    def weight_shards(self) -> Iterator[WeightShard]:
        targets = self._weight.split((self._num_queries, len(self._weight) - self._num_queries))
        for name, total, part, target in zip(
            self._names, self._totals, self._parts, targets, strict=True
        ):
            yield WeightShard.of_vector(f"{name}.weight", total, part, target.view(-1), dummy=1.0)
