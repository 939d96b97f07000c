"""How checkpoints store the weights of linear layers: data by which layers choose kernels."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pagedray.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "MXFP4_BLOCK_SIZE",
    "CacheScales",
    "FormatRule",
    "Fp8Format",
    "Int4Format",
    "Int8Format",
    "Quantization",
    "WeightFormat",
]

_PER_WORD = 4
MXFP4_BLOCK_SIZE = 32
"""Inputs that share a scale in mxfp4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Format:
    """Weights in float8_e4m3fn, with a scale for each output channel, tensor or block."""

    scales: Literal["channel", "tensor", "block"] = "channel"
    block: tuple[int, int] = (1, 1)
    """Output and input channels of a block, for scales of blocks."""
    scale_name: str = "weight_scale"
    """The name of the tensor of scales, after the name of its layer."""
    is_made_at_load: bool = False
    """Whether the checkpoint has plain weights, which are quantized when they are loaded."""
    has_input_scale: bool = False
    """Whether the checkpoint has one scale for all inputs of a layer. Otherwise each row of inputs
    gets its own, or each block of a row."""

    @property
    def in_step(self) -> int:
        """Input channels, of which a rank has a multiple."""
        return self.block[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Format:
    """Weights of four bits; a group of inputs of an output channel has a scale and a zero.

    GPTQ stores weights of eight bits in the same way.
    """

    packing: Literal["compressed-tensors", "gguf", "gptq", "awq"]
    """How numbers are packed into an int32, and along which dimension."""
    num_bits: Literal[4, 8] = 4
    """The bits of each number; 8 requires the packing of GPTQ."""
    group_size: int | None
    """Inputs of a group; None is all."""
    has_zeros: bool = True
    """Whether the checkpoint has the numbers that stand for zero; otherwise 8 does."""
    has_minimums: bool = False
    """Whether the checkpoint has the value of number 0 of each group."""
    zero_offset: int = 0
    """Added to a stored zero."""
    is_ordered: bool = False
    """Whether the inputs of a group may be any, as `g_idx` of the checkpoint says."""

    @property
    def in_step(self) -> int:
        """Input channels, of which a rank has a multiple."""
        return self.group_size or self.per_word

    @property
    def per_word(self) -> int:
        """Numbers in an int32."""
        return 32 // self.num_bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Format:
    """Weights of eight bits with a sign; a group of inputs of an output channel has a scale."""

    scales: Literal["channel", "tensor", "group"] = "channel"
    group_size: int | None = None
    """Inputs of a group, for scales of groups."""
    is_packed: bool = False
    """Whether four numbers, plus 128, are packed into an int32."""

    @property
    def in_step(self) -> int:
        """Input channels, of which a rank has a multiple."""
        return self.group_size or _PER_WORD


WeightFormat = Fp8Format | Int4Format | Int8Format


@dataclass(frozen=True, slots=True)
class CacheScales:
    """The factors of a layer's keys and values in an fp8 cache, when they are read."""

    keys: float
    values: float


@dataclass(frozen=True, slots=True)
class FormatRule:
    """Which layers have a format."""

    pattern: re.Pattern[str]
    """Matches the names of layers, from their beginning."""
    format: WeightFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The formats of a model's linear layers; embeddings are always plain."""

    method: str
    """The name of the method for users, such as `fp8`."""
    rules: tuple[FormatRule, ...]
    """The first that matches a layer counts."""
    has_head: bool = False
    """Whether the rules are of the output head too, which is plain otherwise."""
    has_cache_scales: bool = False
    """Whether each layer's attention has scales for keys and values in an fp8 cache."""
    ignored: tuple[re.Pattern[str], ...] = ()
    """Patterns of the names of layers that are not quantized."""
    prefixes: tuple[tuple[str, str], ...] = ()
    """The prefixes of `TextTensors`; patterns match stored names, or the names that we give
    them."""

    @property
    def is_fp8(self) -> bool:
        """Whether fp8 is the only format, so that products read weights as they are stored."""
        return all(isinstance(rule.format, Fp8Format) for rule in self.rules)

    def format_of(self, layers: Sequence[str]) -> WeightFormat | None:
        """Return the format of layers that are computed in one product, or None if it is plain.

        Raises CheckpointError if their formats differ.
        """
        first, *others = layers
        found = self._format_of(first)
        for other in others:
            if self._format_of(other) != found:
                raise CheckpointError(
                    f"quantization_config stores {first} and {other} in different formats, but one "
                    "product computes both; quantize all or none of such layers."
                )
        return found

    def _format_of(self, layer: str) -> WeightFormat | None:
        names = (layer, *self._stored_names(layer))
        if any(pattern.match(name) for pattern in self.ignored for name in names):
            return None
        for rule in self.rules:
            if any(rule.pattern.match(name) for name in names):
                return rule.format
        return None

    def _stored_names(self, layer: str) -> Iterator[str]:
        for stored, ours in self.prefixes:
            if layer.startswith(ours):
                yield stored + layer.removeprefix(ours)
