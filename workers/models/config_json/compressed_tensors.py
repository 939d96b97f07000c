"""The formats of compressed-tensors, by groups of layers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pagedray.weight_format import FormatRule, Fp8Format, Int4Format, Int8Format
from workers.models.config_json.int4_methods import group_size
from workers.models.config_json.name_pattern import PatternError, name_pattern

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagedray.weight_format import WeightFormat
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["block_shape", "compressed_tensors_rules", "has_cache_scales"]

_REGEX = "re:"
_MAX_BLOCK = 2**16
# The class of all layers that a format can have.
_LINEAR = "Linear"
# How the weights were rounded, and how they are computed with.
_RECORDS = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype", "format")


def compressed_tensors_rules(
    section: ConfigFile,
) -> tuple[tuple[FormatRule, ...], tuple[re.Pattern[str], ...]]:
    """Return which layers have which format, and which have none. Raises CheckpointError."""
    section.note_read("format", "global_compression_ratio", "quantization_status", "run_compressed")
    section.choice("quantization_status", ("compressed",), "compressed")
    sparsity = section.section("sparsity_config")
    sparsity.choice("format", ("dense",), "dense")
    for key in sparsity.given_keys():
        sparsity.note_read(key)
    groups = section.section("config_groups")
    rules = []
    for name in groups.given_keys():
        group = groups.section(name)
        format = _format(section, group)
        rules += [FormatRule(pattern, format) for pattern in _patterns(group, "targets")]
    if not rules:
        raise section.rejection("config_groups", "must name the targets of at least one group")
    return tuple(rules), tuple(_patterns(section, "ignore"))


def has_cache_scales(section: ConfigFile) -> bool:
    """Return whether the checkpoint has scales for keys and values in fp8. Raises CheckpointError.

    A layer has a number for its keys and a number for its values.
    """
    if section.value("kv_cache_scheme") is None:
        return False
    scheme = section.section("kv_cache_scheme")
    scheme.note_read(*_RECORDS)
    scheme.choice("type", ("float",))
    scheme.integer("num_bits", least=8, most=8)
    scheme.choice("strategy", ("tensor",))
    scheme.reject_unless("symmetric", True)
    scheme.reject_unless("dynamic", False)
    return True


def block_shape(section: ConfigFile, key: str) -> tuple[int, int]:
    """Return the output and input channels of a block, a list of two numbers."""
    sizes = section.indices(key, most=_MAX_BLOCK)
    if len(sizes) != 2 or not all(sizes):
        raise section.rejection(key, f"must be a list of two numbers above 0, not {list(sizes)}")
    return sizes[0], sizes[1]


def _format(section: ConfigFile, group: ConfigFile) -> WeightFormat:
    weights = group.section("weights")
    group.note_read("format")
    weights.note_read(*_RECORDS)
    weights.reject_unless("dynamic", False)
    if weights.choice("type", ("float", "int")) == "int":
        if weights.integer("num_bits", least=4, most=8) == 8:
            return _int8_format(section, group, weights)
        return _int4_format(group, weights)
    weights.integer("num_bits", least=8, most=8)
    weights.reject_unless("symmetric", True)
    return _fp8_format(group, weights)


def _int4_format(group: ConfigFile, weights: ConfigFile) -> Int4Format:
    weights.integer("num_bits", least=4, most=4)
    group.reject_unless("input_activations", None)
    # Weights that were rounded in another order are stored in theirs.
    weights.choice("actorder", ("weight", "static"), "weight")
    is_grouped = weights.choice("strategy", ("group", "channel")) == "group"
    return Int4Format(
        packing="compressed-tensors",
        group_size=group_size(weights, "group_size") if is_grouped else None,
        has_zeros=not weights.flag("symmetric", True),
    )


def _int8_format(section: ConfigFile, group: ConfigFile, weights: ConfigFile) -> Int8Format:
    weights.reject_unless("symmetric", True)
    weights.choice("actorder", ("weight", "static"), "weight")
    if group.value("input_activations") is not None:
        # Inputs are not quantized; static scales of inputs would have to be stored.
        inputs = group.section("input_activations")
        inputs.note_read(*_RECORDS)
        inputs.choice("type", ("int",))
        inputs.integer("num_bits", least=8, most=8)
        inputs.choice("strategy", ("token",))
        inputs.reject_unless("symmetric", True)
        inputs.reject_unless("dynamic", True)
    stored = group if group.value("format") is not None else section
    is_packed = stored.choice("format", ("int-quantized", "pack-quantized")) == "pack-quantized"
    scales = weights.choice("strategy", ("tensor", "channel", "group"))
    if scales != "group":
        return Int8Format(scales="tensor" if scales == "tensor" else "channel", is_packed=is_packed)
    size = group_size(weights, "group_size")
    return Int8Format(scales="group", group_size=size, is_packed=is_packed)


def _fp8_format(group: ConfigFile, weights: ConfigFile) -> Fp8Format:
    inputs = group.section("input_activations")
    inputs.note_read(*_RECORDS)
    inputs.choice("type", ("float",))
    inputs.integer("num_bits", least=8, most=8)
    inputs.reject_unless("symmetric", True)
    scales = weights.choice("strategy", ("tensor", "channel", "block"))
    if scales == "block":
        block = block_shape(weights, "block_structure")
        inputs.reject_unless("dynamic", True)
        inputs.choice("strategy", ("group",))
        inputs.reject_unless("group_size", block[1])
        return Fp8Format(scales="block", block=block)
    is_dynamic = inputs.flag("dynamic", False)
    inputs.choice("strategy", ("token",) if is_dynamic else ("tensor",))
    return Fp8Format(
        scales="tensor" if scales == "tensor" else "channel", has_input_scale=not is_dynamic
    )


def _patterns(section: ConfigFile, key: str) -> Iterator[re.Pattern[str]]:
    """Yield the patterns of a list of classes, names, and regular expressions of names."""
    for word in section.words(key):
        if word == _LINEAR:
            yield re.compile("")
        elif word.startswith(_REGEX):
            try:
                yield name_pattern(word.removeprefix(_REGEX))
            except PatternError as error:
                raise section.rejection(key, f"has {word[:60]!r}, which {error}") from None
        else:
            yield re.compile(rf"{re.escape(word)}$")
