"""Rotary position embeddings: tables made once, gathered once per step, applied in every layer.

J. Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021. Kinds of
scaling: `linear` (position interpolation, Chen et al. 2023), `llama3` (Llama 3.1), `longrope`
(Ding et al. 2024) and `yarn` (Peng et al. 2023).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from attention.kernels.arguments import Rotary
from workers.layers.fused_kernels import RotateKernel, rotate_kernel

if TYPE_CHECKING:
    from pagedray.model_config import RopeConfig

__all__ = ["NoRotation", "RotaryEmbedding", "Rotation", "inverse_frequencies"]


def inverse_frequencies(rope: RopeConfig, size: int) -> torch.Tensor:
    """Return the angle per position of each pair of `size` elements, `[size / 2]` float32."""
    exponents = torch.arange(0, size, 2, dtype=torch.int64).to(torch.float32) / size
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor(rope.pair_factors) * rope.theta**exponents)
    frequencies = 1.0 / rope.theta**exponents
    if rope.num_rotated_pairs is not None:
        frequencies[rope.num_rotated_pairs :] = 0.0
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _scaled_as_llama3(rope, frequencies)
    if rope.kind == "yarn":
        return _scaled_as_yarn(rope, frequencies, size)
    return frequencies


def _scaled_as_llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Divide low frequencies by the factor, keep high frequencies, and interpolate in between."""
    wavelengths = 2 * math.pi / frequencies
    periods = rope.original_max_positions / wavelengths
    blend = (periods - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    slowed = torch.where(periods < rope.low_freq_factor, frequencies / rope.factor, blended)
    return torch.where(periods > rope.high_freq_factor, frequencies, slowed)


def _scaled_as_yarn(rope: RopeConfig, frequencies: torch.Tensor, size: int) -> torch.Tensor:
    """Keep high frequencies, divide low frequencies by the factor, and interpolate in between."""
    first, last = (
        size
        * math.log(rope.original_max_positions / (turns * 2 * math.pi))
        / (2 * math.log(rope.theta))
        for turns in (rope.beta_fast, rope.beta_slow)
    )
    if rope.is_range_rounded:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    width = last - first if last != first else 0.001
    ramp = torch.arange(size // 2, dtype=torch.float32).sub_(first).div_(width).clamp_(0, 1)
    return frequencies / rope.factor * ramp + frequencies * (1 - ramp)


class Rotation(ABC):
    """The rotation of queries and keys to the positions of one step's tokens."""

    rotary: Rotary | None = None
    """The rotation for kernels of attention or of products that rotate whole heads themselves."""

    @abstractmethod
    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """Return `[num_tokens, num_heads, head_size]`, rotated; may happen in place.

        Queries come before keys. Pair i of a head is elements i and i + head_size / 2.
        """

    def select(self, indices: torch.Tensor) -> Rotation | None:
        """Return the rotation of some tokens, `[num_selected]` int64.

        Both rotations may be called with queries or keys alone. None if these are not rotated
        alike.
        """
        return None


class NoRotation(Rotation):
    """No rotation, for models without rotary embeddings."""

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        return heads

    def select(self, indices: torch.Tensor) -> Rotation:
        return self


class _GatheredRotation(Rotation):
    """By torch, with angles that were gathered once per step."""

    rotary: Rotary

    def __init__(self, rotary: Rotary, dtype: torch.dtype) -> None:
        self.rotary = rotary
        self._dtype = dtype
        rows = rotary.table.index_select(0, rotary.positions).to(dtype).unsqueeze(1)
        cos, sin = rows.chunk(2, dim=2)
        self._cos = torch.cat((cos, cos), 2)  # [num_tokens, 1, head_size]
        self._sin = torch.cat((-sin, sin), 2)
        self._half = rotary.table.shape[1] // 2

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        # Rolling by half puts each element's partner next to it.
        partners = heads.roll(self._half, -1)
        return (heads * self._cos).addcmul_(partners, self._sin)

    def select(self, indices: torch.Tensor) -> Rotation:
        return _GatheredRotation(self.rotary.select(indices), self._dtype)


class _KernelRotation(Rotation):
    """By a kernel that looks up the angles itself."""

    rotary: Rotary

    def __init__(self, kernel: RotateKernel, rotary: Rotary) -> None:
        self._kernel = kernel
        self.rotary = rotary

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        self._kernel(heads, self.rotary.positions)
        return heads

    def select(self, indices: torch.Tensor) -> Rotation:
        return _KernelRotation(self._kernel, self.rotary.select(indices))


class _PartialRotation(Rotation):
    """Of the first `size` elements of each head."""

    def __init__(self, rotation: Rotation, size: int) -> None:
        self._rotation = rotation
        self._size = size

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        part = heads.narrow(2, 0, self._size)
        if isinstance(self._rotation, _KernelRotation) and part.is_cuda:
            self._rotation(part)
        else:
            part.copy_(self._rotation(part.contiguous()))
        return heads

    def select(self, indices: torch.Tensor) -> Rotation | None:
        selected = self._rotation.select(indices)
        return None if selected is None else _PartialRotation(selected, self._size)


class _GrowingQueries(Rotation):
    """Multiplies the rotated queries, the first heads, by a factor that grows with the position."""

    def __init__(self, rotation: Rotation, factors: torch.Tensor, num_query_heads: int) -> None:
        self._rotation = rotation
        self._factors = factors  # [num_tokens, 1, 1]
        self._num_query_heads = num_query_heads

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        rotated = self._rotation(heads)
        rotated.narrow(1, 0, self._num_query_heads).mul_(self._factors)
        return rotated


class RotaryEmbedding:
    """The table of cosines and sines of all positions."""

    def __init__(
        self,
        rope: RopeConfig,
        *,
        head_size: int,
        num_query_heads: int,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        size = rope.rotary_size or head_size
        self._partial_size = size if size < head_size else None
        positions = torch.arange(max_positions, dtype=torch.float32, device=device)
        frequencies = inverse_frequencies(rope, size).to(device)
        # Angles need float32: bfloat16 rounds positions 1000 and 1001 to one number.
        angles = torch.outer(positions, frequencies)
        self._table = torch.cat((angles.cos(), angles.sin()), dim=1).mul_(rope.magnitude)
        self._dtype = dtype
        self._kernel = rotate_kernel(self._table, dtype)
        self._num_query_heads = num_query_heads
        self._query_factors: torch.Tensor | None = None
        if rope.query_growth:
            spans = positions.div_(rope.original_max_positions, rounding_mode="floor")
            self._query_factors = spans.log1p_().mul_(rope.query_growth).add_(1.0).to(dtype)

    def rotation_at(self, positions: torch.Tensor) -> Rotation:
        """Return the rotation to these positions, `[num_tokens]` int64."""
        rotation = self._whole(positions)
        if self._partial_size is not None:
            rotation = _PartialRotation(rotation, self._partial_size)
        if self._query_factors is None:
            return rotation
        factors = self._query_factors.index_select(0, positions).view(-1, 1, 1)
        return _GrowingQueries(rotation, factors, self._num_query_heads)

    def _whole(self, positions: torch.Tensor) -> Rotation:
        rotary = Rotary(positions, self._table)
        if self._kernel is not None:
            return _KernelRotation(self._kernel, rotary)
        return _GatheredRotation(rotary, self._dtype)
