"""Weights of four or eight bits, packed as each format packs them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedray.weight_format import Int4Format

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight columns is in each place of a word, from the lowest bits on."""


def packed(
    numbers: torch.Tensor, order: tuple[int, ...] = tuple(range(8)), num_bits: int = 4
) -> torch.Tensor:
    """Return rows of numbers as rows of int32."""
    per_word = 32 // num_bits
    words = torch.zeros(len(numbers), numbers.shape[1] // per_word, dtype=torch.int64)
    for place, index in enumerate(order[:per_word]):
        words |= numbers[:, index::per_word].long() << num_bits * place
    return words.where(words < 2**31, words - 2**32).int()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Int4Tensors:
    """Numbers `[out_size, in_size]`, scales and zeros `[out_size, groups]`, groups `[in_size]`."""

    format: Int4Format
    numbers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    groups: torch.Tensor

    @classmethod
    def random(cls, out_size: int, in_size: int, format: Int4Format) -> Int4Tensors:
        """Return a random weight of this format."""
        groups = torch.arange(in_size) // (format.group_size or in_size)
        if format.is_ordered:
            # The same for all layers with these inputs.
            groups = groups[torch.randperm(in_size, generator=torch.Generator().manual_seed(1))]
        shape = (out_size, int(groups.max()) + 1)
        count = 2**format.num_bits
        zeros = torch.full(shape, 8)
        if format.has_zeros:
            zeros = torch.randint(format.zero_offset, count, shape)
        return cls(
            format=format,
            numbers=torch.randint(0, count, (out_size, in_size)),
            scales=(torch.rand(shape) + 0.1).half(),
            zeros=zeros,
            groups=groups,
        )

    @classmethod
    def rounded(cls, weight: torch.Tensor, format: Int4Format) -> Int4Tensors:
        """Return the nearest weight of this format."""
        found = cls.random(len(weight), weight.shape[1], format)
        groups = found.groups.expand(weight.shape)
        low, high = (
            torch.zeros(found.scales.shape).scatter_reduce_(1, groups, weight, reduce)
            for reduce in ("amin", "amax")
        )
        most = 2**format.num_bits - 1
        if format.has_zeros:
            scales = ((high - low) / most).half()
            zeros = (-low / scales).round().clamp(format.zero_offset, most)
        else:
            scales, zeros = (torch.maximum(high, -low) / 7.5).half(), torch.full_like(low, 8)
        numbers = (weight / scales[:, found.groups] + zeros[:, found.groups]).round().clamp(0, most)
        return cls(
            format=format,
            numbers=numbers.long(),
            scales=scales,
            zeros=zeros.long(),
            groups=found.groups,
        )

    @property
    def exact(self) -> torch.Tensor:
        """What the tensors stand for, float64."""
        values = self.numbers - self.zeros[:, self.groups]
        return values.double() * self.scales.double()[:, self.groups]

    def stored(self, name: str) -> dict[str, torch.Tensor]:
        """Return the tensors of a checkpoint."""
        kind, zeros = self.format.packing, self.zeros - self.format.zero_offset
        if kind == "compressed-tensors":
            tensors = {
                "weight_packed": packed(self.numbers),
                "weight_scale": self.scales,
                "weight_shape": torch.tensor(self.numbers.shape),
            }
            if self.format.has_zeros:
                tensors["weight_zero_point"] = packed(zeros.t()).t()
        elif kind == "gptq":
            tensors = {
                "qweight": packed(self.numbers, num_bits=self.format.num_bits).t(),
                "qzeros": packed(zeros.t(), num_bits=self.format.num_bits),
                "scales": self.scales.t(),
                "g_idx": self.groups.int(),
            }
        else:
            tensors = {
                "qweight": packed(self.numbers.t(), AWQ_ORDER),
                "qzeros": packed(zeros.t(), AWQ_ORDER),
                "scales": self.scales.t(),
            }
        return {f"{name}.{key}": tensor.contiguous() for key, tensor in tensors.items()}
