"""A weight of four or eight bits: numbers from 0, a scale and a zero for each group of inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from pagedray.errors import CheckpointError
from workers.layers.formats.quantized_linear import StoredWeight
from workers.layers.weight import MatrixPart, WeightShard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagedray.weight_format import Int4Format

__all__ = ["Int4Weight"]

_MIDDLE = 8
"""The number that stands for zero in a symmetric format."""
_NO_GROUP = -1
"""The group of inputs of dummy weights, which have groups in order."""

# Where AWQ's kernels find number 0, 1, 2, ... of a word.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Part:
    """The loaded tensors of a layer of the checkpoint."""

    source: MatrixPart
    numbers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    minimums: torch.Tensor | None
    groups: torch.Tensor | None


class Int4Weight(StoredWeight):
    """A weight of four bits, or of eight bits in GPTQ.

    Numbers are `[out_size, in_size]`, scales and zeros `[out_size, groups]`.
    """

    def __init__(
        self, format: Int4Format, out_size: int, in_size: int, *, device: torch.device
    ) -> None:
        self._format = format
        self._size = (out_size, in_size)
        self._device = device
        self.group_size = format.group_size or in_size
        self._parts: dict[tuple[int, int], _Part] = {}
        self._order: torch.Tensor | None = None
        self._factors: torch.Tensor | None = None
        self.numbers = torch.empty(0, dtype=torch.uint8, device=device)
        """`[out_size, in_size]` uint8, after `finalize`; a product takes and drops it."""
        self.scales = torch.empty(0, device=device)
        """`[out_size, in_size / group_size]` float32, after `finalize`."""
        self.zeros = torch.empty(0, dtype=torch.uint8, device=device)
        """`[out_size, in_size / group_size]` uint8, after `finalize`."""
        self.minimums: torch.Tensor | None = None
        """`[out_size, in_size / group_size]` float32, after `finalize`; without zeros then."""
        self.input_order: torch.Tensor | None = None
        """The input of each column of numbers, `[in_size]` int64, or None if they are in order."""

    def weight_shards(self, source: MatrixPart, rows: slice) -> Iterator[WeightShard]:
        first, end, _ = rows.indices(self._size[0])
        if (first, end) not in self._parts:
            self._parts[first, end] = self._new_part(source, end - first)
        part = self._parts[first, end]
        out_part, in_part = source.part
        out_size, in_size = source.shape
        num_groups, groups = 1, slice(0, 1)
        if self._format.group_size is not None:
            num_groups = in_size // self._format.group_size
            groups = _divided(in_part, in_size, self._format.group_size)
        per_word = self._format.per_word
        # GGUF has words of inputs only.
        is_gguf = self._format.packing == "gguf"
        words_out = out_part if is_gguf else _divided(out_part, out_size, per_word)
        words_in = _divided(in_part, in_size, per_word)

        def shard(
            name: str,
            shape: tuple[int, ...],
            part: tuple[slice, ...],
            target: torch.Tensor,
            dummy: float | None = None,
        ) -> WeightShard:
            name = f"{source.name}.{name}"
            return WeightShard(name=name, shape=shape, part=part, target=target, dummy=dummy)

        out_words, in_words = out_size // per_word, in_size // per_word
        if self._format.packing in ("compressed-tensors", "gguf"):
            yield shard("weight_packed", (out_size, in_words), (out_part, words_in), part.numbers)
            yield shard(
                "weight_scale", (out_size, num_groups), (out_part, groups), part.scales, 0.01
            )
            if part.zeros is not None:
                yield shard(
                    "weight_zero_point", (out_words, num_groups), (words_out, groups), part.zeros
                )
            if part.minimums is not None:
                yield shard(
                    "weight_minimum", (out_size, num_groups), (out_part, groups), part.minimums, 0.0
                )
            if self._format.packing == "compressed-tensors":
                # The shape is known from config.json.
                shape = torch.empty(2, dtype=torch.int64, device=self._device)
                yield shard("weight_shape", (2,), (slice(None),), shape)
            return
        if self._format.packing == "gptq":
            yield shard("qweight", (in_words, out_size), (words_in, out_part), part.numbers)
        else:
            yield shard("qweight", (in_size, out_words), (in_part, words_out), part.numbers)
        assert part.zeros is not None
        yield shard("qzeros", (num_groups, out_words), (groups, words_out), part.zeros)
        yield shard("scales", (num_groups, out_size), (groups, out_part), part.scales, 0.01)
        if part.groups is not None:
            yield shard("g_idx", (in_size,), (in_part,), part.groups, _NO_GROUP)

    def reorder(self, order: torch.Tensor) -> None:
        self._order = order

    def scale(self, factors: torch.Tensor) -> None:
        self._factors = factors.unsqueeze(1)

    def finalize(self) -> None:
        parts = [self._parts[key] for key in sorted(self._parts)]
        self._parts.clear()
        self.input_order = self._common_order(parts)
        loaded = [self._unpacked(part) for part in parts]
        tensors = [torch.cat(tensors) for tensors in zip(*loaded, strict=True)]
        if self._format.has_minimums:
            minimums = [part.minimums for part in parts if part.minimums is not None]
            tensors.append(torch.cat(minimums))
        if num_padded := self._size[0] - len(tensors[0]):
            # The last rank of an output head has fewer tokens; its other rows are 0.
            tensors = [functional.pad(tensor, (0, 0, 0, num_padded)) for tensor in tensors]
        if self._order is not None:
            tensors = [tensor[self._order] for tensor in tensors]
        self.numbers, self.scales, self.zeros = tensors[:3]
        self.minimums = tensors[3] if self._format.has_minimums else None
        if self._factors is not None:
            self.scales = self.scales * self._factors
            if self.minimums is not None:
                self.minimums = self.minimums * self._factors
        if self.input_order is not None:
            self.numbers = self.numbers[:, self.input_order]

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        shape = (*self.scales.shape, self.group_size)
        values = self.numbers.view(shape).float()
        if self.minimums is None:
            values.sub_(self.zeros.unsqueeze(2)).mul_(self.scales.unsqueeze(2))
        else:
            values.mul_(self.scales.unsqueeze(2)).add_(self.minimums.unsqueeze(2))
        weight = values.view(self._size).to(dtype)
        if self.input_order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.input_order, weight)

    def values_of_middle(self) -> torch.Tensor | None:
        """Return the value of number 8 in each group, or None if all are 0."""
        if self.minimums is not None:
            return self.minimums + _MIDDLE * self.scales
        if bool((self.zeros == _MIDDLE).all()):
            return None
        return (_MIDDLE - self.zeros.to(torch.int8)) * self.scales

    def _new_part(self, source: MatrixPart, num_rows: int) -> _Part:
        """Return uninitialized tensors for the checkpoint's tensors of some rows."""
        in_size, per_word = self._size[1], self._format.per_word
        has_rest = self._format.packing != "gguf" and num_rows % per_word
        if has_rest or in_size % per_word or in_size % self.group_size:
            raise CheckpointError(
                f"{source.name} has {num_rows} outputs and {in_size} inputs on each rank, but "
                f"int{self._format.num_bits} weights need multiples of {per_word}, and of inputs "
                f"multiples of {self.group_size}; use fewer ranks."
            )
        packing = self._format.packing
        shape = (num_rows, in_size)
        packed = 0 if packing == "awq" else 1
        words = [size // per_word if dim == packed else size for dim, size in enumerate(shape)]
        scales = [num_rows, in_size // self.group_size]
        zeros = [num_rows // per_word, scales[1]]
        if packing in ("gptq", "awq"):
            words, scales, zeros = words[::-1], scales[::-1], zeros[::-1]

        def words_of(shape: list[int]) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=self._device)

        minimums = torch.empty(scales, device=self._device) if self._format.has_minimums else None
        return _Part(
            source=source,
            numbers=words_of(words),
            scales=torch.empty(scales, device=self._device),
            zeros=words_of(zeros) if self._format.has_zeros else None,
            minimums=minimums,
            groups=words_of([in_size]) if packing == "gptq" else None,
        )

    def _unpacked(self, part: _Part) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return numbers, scales and zeros of a part."""
        packing = self._format.packing
        if packing in ("compressed-tensors", "gguf"):
            numbers, scales = unpacked(part.numbers, 1), part.scales
            zeros = torch.full_like(scales, _MIDDLE, dtype=torch.uint8)
            if part.zeros is not None:
                zeros = unpacked(part.zeros, 0)
            return numbers, scales, zeros
        assert part.zeros is not None
        is_awq, num_bits = packing == "awq", self._format.num_bits
        numbers = unpacked(part.numbers, 1 if is_awq else 0, is_awq=is_awq, num_bits=num_bits)
        zeros = unpacked(part.zeros, 1, is_awq=is_awq, num_bits=num_bits)
        zeros.add_(self._format.zero_offset)
        return numbers.t(), part.scales.t(), zeros.t()

    def _common_order(self, parts: list[_Part]) -> torch.Tensor | None:
        """Return the order that sorts inputs by groups, or None if they are sorted."""
        groups = [part.groups for part in parts if part.groups is not None]
        if not groups or bool((groups[0] == _NO_GROUP).all()):
            return None
        first = groups[0]
        if any(not torch.equal(first, other) for other in groups[1:]):
            names = " and ".join(part.source.name for part in parts)
            raise CheckpointError(
                f"{names} have different g_idx, but one product computes them; use a checkpoint "
                "with desc_act false."
            )
        order = first.argsort(stable=True)
        source = parts[0].source
        size = self._format.group_size or source.shape[1]
        left, _, _ = source.part[1].indices(source.shape[1])
        places = torch.arange(left, left + len(first), device=first.device)
        if not torch.equal(first[order], (places // size).to(first.dtype)):
            raise CheckpointError(
                f"tensor {source.name}.g_idx must have {size} inputs of each group."
            )
        is_sorted = torch.equal(order, torch.arange(len(order), device=order.device))
        return None if is_sorted else order


def _divided(part: slice, size: int, step: int) -> slice:
    """Return the part of a dimension that is `step` times coarser."""
    first, end, _ = part.indices(size)
    if first % step or end % step:
        raise CheckpointError(
            f"Packed weights are stored in units of {step}, but a rank's part would be {first} to "
            f"{end}; use fewer ranks."
        )
    return slice(first // step, end // step)


def unpacked(
    words: torch.Tensor, dim: int, *, is_awq: bool = False, num_bits: int = 4
) -> torch.Tensor:
    """Return the uint8 numbers in an int32 matrix; `dim` becomes `32 / num_bits` times as long."""
    places = _AWQ_PLACES if is_awq else range(32 // num_bits)
    shifts = torch.tensor(
        [num_bits * place for place in places], dtype=torch.int32, device=words.device
    )
    shape = [1, 1, 1]
    shape[dim + 1] = len(shifts)
    numbers = words.unsqueeze(dim + 1).bitwise_right_shift(shifts.view(shape))
    return numbers.bitwise_and_(2**num_bits - 1).to(torch.uint8).flatten(dim, dim + 1)
