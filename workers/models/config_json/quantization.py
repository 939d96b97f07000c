"""The section `quantization_config`: how the weights of a checkpoint are stored."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pagedray.errors import StartupError
from pagedray.weight_format import (
    FormatRule,
    Fp8Format,
    Int4Format,
    Int8Format,
    Quantization,
    WeightFormat,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pagedray.config import QuantizationMethod
    from pagedray.model_config import ModelConfig
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["PatternError", "name_pattern", "read_quantization", "with_method", "with_quantization"]

_ALL = re.compile("")
_REGEX = "re:"
_MAX_BLOCK = 2**16
# The class of all layers that a format can have.
_LINEAR = "Linear"
# How the weights were rounded, and how they are computed with.
_RECORDS = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype", "format")
GROUP_SIZES = (32, 64, 128, 256)
# How the weights were rounded, and which kernels compute with them.
_GPTQ_RECORDS = (
    *("damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "meta", "mse"),
    *("model_name_or_path", "model_file_base_name", "tokenizer", "dataset", "batch_size"),
    *("cache_block_outputs", "exllama_config", "max_input_length", "model_seqlen", "use_exllama"),
    *("use_cuda_fp16", "disable_exllama", "backend", "block_name_to_quantize", "act_group_aware"),
    *("module_name_preceding_first_block", "pad_token_id", "desc_act_order", "offload_to_disk"),
)
_AWQ_RECORDS = ("do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config", "backend")
_MAX_LENGTH = 500
_MAX_REPETITIONS = 4
_MAX_OPTIONS = 4
_DIGITS = (r"\d", "[0-9]")
_MAX_DIGIT_REPETITIONS = 16
"""More are allowed of digits, of which names have few in a row."""
_TOKENS = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?(?:[:=!]|<[=!])|\(\??|[*+?]\??|\{\d*,?\d*\}\??|.",
    re.DOTALL,
)

_FP8 = Quantization(
    method="fp8", rules=(FormatRule(re.compile(""), Fp8Format(is_made_at_load=True)),)
)


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
    has_stored_experts = config.experts is not None and not quantization.is_fp8
    if config.is_encoder or has_stored_experts:
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
    """Return patterns of the names of the layers that the list `key` excludes from quantization.

    As in transformers, an entry matches a name in two ways: as a regular expression for the first
    parts of the name, or as plain text at the end of the name.
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


def _gguf(section: ConfigFile) -> Quantization:
    """Read the section that `workers.hub.gguf_folder` writes: the layers of each format."""
    formats: tuple[tuple[str, WeightFormat], ...] = (
        ("int4", Int4Format(packing="gguf", group_size=32, has_zeros=False)),
        (
            "int4_minimums",
            Int4Format(packing="gguf", group_size=32, has_zeros=False, has_minimums=True),
        ),
        ("int8", Int8Format(scales="group", group_size=32)),
        ("int8_16", Int8Format(scales="group", group_size=16)),
    )
    rules = []
    for key, format in formats:
        if layers := section.words(key):
            names = "|".join(map(re.escape, layers))
            rules.append(FormatRule(re.compile(rf"(?:{names})$"), format))
    return Quantization(method="gguf", rules=tuple(rules), has_head=True)


_READERS: Mapping[str, Callable[[ConfigFile], Quantization]] = {
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gguf": _gguf,
    "gptq": _gptq,
}


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


def gptq_format(section: ConfigFile) -> Int4Format:
    """Return the format of a section. Raises CheckpointError."""
    section.note_read(*_GPTQ_RECORDS, "sym")
    bits = section.integer("bits", least=4, most=8)
    if bits not in (4, 8):
        raise section.rejection("bits", f"must be 4 or 8, not {bits}")
    num_bits: Literal[4, 8] = 4 if bits == 4 else 8
    section.choice("method", ("gptq",), "gptq")
    section.choice("pack_dtype", ("int32",), "int32")
    # The first format stores zeros less one.
    key = section.first_of("checkpoint_format", "format")
    version = section.choice(key, ("gptq", "gptq_v2"), "gptq")
    return Int4Format(
        packing="gptq",
        num_bits=num_bits,
        group_size=group_size(section, "group_size"),
        zero_offset=1 if version == "gptq" else 0,
        is_ordered=section.flag("desc_act", False),
    )


def awq_format(section: ConfigFile) -> Int4Format:
    """Return the format of a section. Raises CheckpointError."""
    section.note_read(*_AWQ_RECORDS)
    section.integer(section.first_of("w_bit", "bits"), least=4, most=4)
    section.choice("method", ("awq",), "awq")
    section.choice("pack_dtype", ("int32",), "int32")
    # GPTQModel names the same packing by another key.
    for key in ("version", "checkpoint_format", "format"):
        section.choice(key, ("gemm", "GEMM"), "gemm")
    section.reject_unless("zero_point", True)
    size = group_size(section, section.first_of("q_group_size", "group_size"))
    return Int4Format(packing="awq", group_size=size)


def group_size(section: ConfigFile, key: str) -> int | None:
    """Return the inputs of a group, or None for all, which is stored as -1."""
    size = section.integer(key, least=-1, most=GROUP_SIZES[-1])
    if size == -1:
        return None
    if size not in GROUP_SIZES:
        allowed = ", ".join(map(str, GROUP_SIZES))
        raise section.rejection(key, f"must be one of -1, {allowed}, not {size}")
    return size


class PatternError(ValueError):
    """A text that is not a valid pattern, or a pattern that may take long to match."""


def name_pattern(text: str, form: str = "{}") -> re.Pattern[str]:
    """Return the pattern of a text, put into a form. Raises PatternError."""
    if len(text) > _MAX_LENGTH:
        raise PatternError(f"has more than {_MAX_LENGTH} characters")
    _check_repetitions(text)
    try:
        return re.compile(form.format(text))
    except (re.error, OverflowError, RecursionError) as error:
        raise PatternError(f"is not a valid pattern: {error}") from None


def _check_repetitions(text: str) -> None:
    """Raise PatternError for too many repetitions, and for repetitions of ambiguous parts."""
    num_repetitions = num_digit_repetitions = num_options = 0
    # Whether each open group, and the group just closed, has several ways to match.
    groups = [False]
    has_ways = False
    before = ""
    for token in _TOKENS.findall(text):
        is_repetition = token[0] in "*+" or (token[0] == "{" and len(token) > 1)
        if is_repetition and has_ways:
            raise PatternError("repeats a group with a repetition or with alternatives")
        num_repetitions += is_repetition and before not in _DIGITS
        num_digit_repetitions += is_repetition and before in _DIGITS
        num_options += token[0] == "?"
        has_ways = False
        if token == "(?":
            raise PatternError("has a group of a kind that is not supported")
        if token[0] == "(":
            groups.append(False)
        elif token == ")" and len(groups) > 1:
            has_ways = groups.pop()
            groups[-1] = groups[-1] or has_ways
        elif is_repetition or token[0] in "?|":
            groups[-1] = True
        before = token
    if num_repetitions > _MAX_REPETITIONS or num_options > _MAX_OPTIONS:
        raise PatternError(
            f"has more than {_MAX_REPETITIONS} repetitions or {_MAX_OPTIONS} optional parts"
        )
    if num_digit_repetitions > _MAX_DIGIT_REPETITIONS:
        raise PatternError(f"has more than {_MAX_DIGIT_REPETITIONS} repetitions of digits")


def with_method(model: ModelConfig, method: QuantizationMethod) -> ModelConfig:
    """Return the configuration of a model with weights in this format.

    Raises StartupError. A quantized checkpoint keeps its format, which must be the same.
    """
    if model.quantization is not None:
        if model.quantization.method != method:
            raise StartupError(
                f"quantization {method} was given, but the checkpoint's quantization_config is "
                f"{model.quantization.method}; leave the option out."
            )
        return model
    if method != "fp8":
        raise StartupError(
            f"quantization {method} requires a checkpoint in this format, but {model.name} has "
            "plain weights, which can be quantized to fp8 only."
        )
    if model.is_encoder or model.experts is not None:
        what = "an encoder" if model.is_encoder else "a model with experts"
        raise StartupError(
            f"quantization fp8 is not supported for {what} such as {model.name}; leave it out."
        )
    return replace(model, quantization=_FP8)
