"""The section `quantization_config`: how the weights of a checkpoint are stored."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from pagedray.weight_format import FormatRule, Fp8Format, Quantization
from workers.models.config_json.compressed_tensors import (
    block_shape,
    compressed_tensors_rules,
    has_cache_scales,
)
from workers.models.config_json.int4_methods import awq_format, gptq_format
from workers.models.config_json.name_pattern import PatternError, name_pattern

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pagedray.model_config import ModelConfig
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["read_quantization", "with_quantization"]

_ALL = re.compile("")


def read_quantization(file: ConfigFile) -> Quantization | None:
    """Return the format of weights, or None for plain weights. Raises CheckpointError."""
    if not file.value("quantization_config"):
        return None
    section = file.section("quantization_config")
    method = section.choice("quant_method", _READERS)
    return _READERS[method](section)


def with_quantization(
    config: ModelConfig, file: ConfigFile, quantization: Quantization
) -> ModelConfig:
    """Return the configuration with these formats. Raises CheckpointError."""
    if config.is_encoder or config.experts is not None:
        what = "an encoder" if config.is_encoder else "a model with experts"
        raise file.rejection(
            "quantization_config", f"is not supported for {what}; use weights in bfloat16"
        )
    tensors = config.text_tensors
    prefixes = tensors.prefixes if tensors is not None else ()
    return replace(config, quantization=replace(quantization, prefixes=prefixes))


def _compressed_tensors(section: ConfigFile) -> Quantization:
    rules, ignored = compressed_tensors_rules(section)
    return Quantization(
        method="compressed-tensors",
        rules=rules,
        has_head=True,
        has_cache_scales=has_cache_scales(section),
        ignored=ignored,
    )


def _fp8(section: ConfigFile) -> Quantization:
    """Read the method of Qwen and DeepSeek, and that of AutoFP8, without blocks."""
    section.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    is_static = section.choice("activation_scheme", ("dynamic", "static"), "dynamic") == "static"
    if "weight_block_size" in section:
        if is_static:
            raise section.rejection("activation_scheme", "must be dynamic with weight_block_size")
        block = block_shape(section, "weight_block_size")
        format = Fp8Format(scales="block", block=block, scale_name="weight_scale_inv")
    else:
        format = Fp8Format(scales="tensor", has_input_scale=is_static)
    key = section.first_of("modules_to_not_convert", "ignored_layers")
    has_scales = "kv_cache_scheme" in section
    if has_scales:
        section.choice("kv_cache_scheme", ("static",))
    return Quantization(
        method="fp8",
        rules=(FormatRule(_ALL, format),),
        has_cache_scales=has_scales,
        ignored=_not_converted(section, key),
    )


def _not_converted(section: ConfigFile, key: str) -> tuple[re.Pattern[str], ...]:
    """Return patterns of the names of layers that a list excludes, as transformers reads it.

    An entry is the start of a name, up to the end of a part, as a regular expression, or its end.
    """
    patterns = []
    for word in section.words(key):
        try:
            patterns.append(name_pattern(word, r"(?:{0})(?:(?<=\.)|(?=\.|$))"))
        except PatternError as error:
            raise section.rejection(key, f"has {word[:60]!r}, which {error}") from None
        patterns.append(re.compile(f".*{re.escape(word)}$"))
    return tuple(patterns)


def _gptq(section: ConfigFile) -> Quantization:
    return Quantization(
        method="gptq",
        rules=(FormatRule(_ALL, gptq_format(section)),),
        has_head=section.flag("lm_head", False),
    )


def _awq(section: ConfigFile) -> Quantization:
    return Quantization(
        method="awq",
        rules=(FormatRule(_ALL, awq_format(section)),),
        ignored=_not_converted(section, "modules_to_not_convert"),
    )


_READERS: Mapping[str, Callable[[ConfigFile], Quantization]] = {
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
}
