"""Gemma 4: layers of two kinds that differ in window, heads and rope; the text part only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from pagedray.model_config import (
    ExpertsConfig,
    LayerEmbedding,
    LayerHeads,
    ModelConfig,
    RopeConfig,
    TensorNames,
    TextTensors,
)
from workers.models.config_json.family import (
    MAX_EXPERTS,
    MAX_FACTOR,
    MAX_HEAD_SIZE,
    MAX_HEADS,
    MAX_SIZE,
    MAX_THETA,
    MAX_VOCAB,
    Family,
    base_config,
    windows_by_layer_type,
)
from workers.models.families.text_part import TEXT_SECTION, as_text_part, is_tied_by_default

if TYPE_CHECKING:
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["GEMMA4", "GEMMA4_MULTIMODAL", "GEMMA4_UNIFIED", "GEMMA4_UNIFIED_TEXT"]

_MAX_CAP = 1e6
_FULL, _WINDOW = "full_attention", "sliding_attention"
_PATTERN = 6
_NAMES = TensorNames(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
    layer_scale="layer_scalar",
)
_EXPERT_NAMES = replace(
    _NAMES,
    side_mlp_norm="post_feedforward_layernorm_1",
    side_expert_norm="pre_feedforward_layernorm_2",
    side_expert_post_norm="post_feedforward_layernorm_2",
    router="router.proj",
    router_norm="router.scale",
    expert_scales="router.per_expert_scale",
    expert_input=("experts.gate_up_proj",),
    expert_output="experts.down_proj",
)
_EXPERT_FIELDS = ("num_experts", "top_k_experts", "moe_intermediate_size")
# Published layers that read the keys and values of another layer have weights for their own.
_UNUSED = ("k_proj.", "v_proj.", "k_norm.", "v_norm.", "k_scale", "v_scale")
_MODULES = ("audio_tower.", "embed_vision.", "embed_audio.", "vision_embedder.")
_MULTIMODAL_FIELDS = (
    *("audio_config", "audio_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index"),
    *("vision_soft_tokens_per_image",),
)


@dataclass(frozen=True, slots=True)
class _Class:
    """How a class of transformers differs from the other."""

    window: int
    has_embeddings: bool
    """Whether its models may have embeddings by layer and experts."""


_PLAIN = _Class(window=512, has_embeddings=True)
_UNIFIED = _Class(window=1024, has_embeddings=False)


def _read_text(file: ConfigFile, kind: _Class) -> ModelConfig:
    config = base_config(
        file,
        activation="gelu_tanh",
        default_num_kv_heads=4,
        default_head_size=256,
        is_tied_by_default=True,
    )
    # With "vision", tokens of an image see each other, but all other tokens only earlier tokens.
    file.choice("use_bidirectional_attention", ("vision",), "vision")
    windows = _windows(file, config.num_layers, kind)
    heads = _layer_heads(file, config, windows)
    has_bias = file.flag("attention_bias", False)
    config = replace(
        config,
        names=_NAMES,
        embedding_scale=config.hidden_size**0.5,
        attention_scale=1.0,
        has_qk_norm=True,
        has_value_norm=True,
        rope=_rope(file, _FULL, heads[-1].head_size),
        window_rope=_rope(file, _WINDOW, config.head_size) if any(windows) else None,
        sliding_windows=windows,
        layer_heads=heads,
        mlp_sizes=_mlp_sizes(file, config, heads),
        logit_soft_cap=file.number_or_null("final_logit_softcapping", None, most=_MAX_CAP),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        text_tensors=_without_unused(TextTensors((), ()), heads),
    )
    if not kind.has_embeddings:
        file.note_read("vocab_size_per_layer_input", *_EXPERT_FIELDS)
        file.reject_unless("hidden_size_per_layer_input", 0)
        file.reject_unless("enable_moe_block", False)
        return config
    return _with_experts(replace(config, layer_embedding=_layer_embedding(file, config)), file)


def _windows(file: ConfigFile, num_layers: int, kind: _Class) -> tuple[int | None, ...]:
    """Return the windows; the last layer has none, whatever `layer_types` says."""
    windows = windows_by_layer_type(
        file,
        default_window=kind.window,
        has_window_by_default=[(layer + 1) % _PATTERN != 0 for layer in range(num_layers)],
    )
    return (*windows[:-1], None)


def _layer_heads(
    file: ConfigFile, config: ModelConfig, windows: tuple[int | None, ...]
) -> tuple[LayerHeads, ...]:
    """Return the keys and values of each layer."""
    has_key_values = file.flag("attention_k_eq_v", False)
    plain = LayerHeads(num_kv_heads=config.num_kv_heads, head_size=config.head_size)
    if file.has_null("per_layer_config") or "per_layer_config" in file:
        # It has both for each layer.
        file.note_read("global_head_dim", "num_global_key_value_heads")
        heads = _heads_of_layers(file.section("per_layer_config"), config, plain, windows)
    else:
        full = replace(plain, head_size=_even(file, "global_head_dim", 512))
        file.note_read("num_global_key_value_heads")
        if has_key_values:
            full = replace(full, num_kv_heads=_kv_heads(file, "num_global_key_value_heads", config))
        heads = tuple(full if window is None else plain for window in windows)
    heads = tuple(
        replace(one, has_key_values=has_key_values and window is None)
        for one, window in zip(heads, windows, strict=True)
    )
    return _with_sources(file, heads, windows)


def _heads_of_layers(
    sections: ConfigFile, config: ModelConfig, plain: LayerHeads, windows: tuple[int | None, ...]
) -> tuple[LayerHeads, ...]:
    """Return the heads that a section names by layer."""
    by_layer = dict.fromkeys(range(config.num_layers), plain)
    for key in sections.given_keys():
        if not key.isdecimal() or int(key) not in by_layer or str(int(key)) != key:
            raise sections.rejection(key, "is not the index of a layer")
        section = sections.section(key)
        by_layer[int(key)] = LayerHeads(
            num_kv_heads=_kv_heads(section, "num_key_value_heads", config),
            head_size=_even(section, "head_dim", plain.head_size),
        )
    for kind in (True, False):
        layers = [layer for layer, window in enumerate(windows) if (window is None) == kind]
        if len({by_layer[layer] for layer in layers}) > 1:
            name = _FULL if kind else _WINDOW
            raise sections.rejection(str(layers[0]), f"must be equal for all layers of {name}")
        if not kind and layers and by_layer[layers[0]] != plain:
            raise sections.rejection(
                str(layers[0]), f"is a layer of {_WINDOW}, which must have head_dim"
            )
    return tuple(by_layer.values())


def _kv_heads(section: ConfigFile, key: str, config: ModelConfig) -> int:
    number = section.integer(key, config.num_kv_heads, most=MAX_HEADS)
    if config.num_heads % number:
        raise section.rejection(
            key, f"must be a divisor of num_attention_heads {config.num_heads}, not {number}"
        )
    return number


def _even(section: ConfigFile, key: str, default: int) -> int:
    size = section.integer(key, default, most=MAX_HEAD_SIZE)
    if size % 2:
        raise section.rejection(key, f"must be even, not {size}")
    return size


def _with_sources(
    file: ConfigFile, heads: tuple[LayerHeads, ...], windows: tuple[int | None, ...]
) -> tuple[LayerHeads, ...]:
    """Return the keys and values; the last layers read those of an earlier layer of their kind."""
    key = "num_kv_shared_layers"
    num_own = len(heads) - file.integer(key, 0, least=0, most=len(heads))
    last = {window is None: layer for layer, window in enumerate(windows[:num_own])}
    if num_own < len(heads) and len(last) < len({window is None for window in windows}):
        raise file.rejection(key, "leaves no layer of a kind with keys and values of its own")
    return (
        *heads[:num_own],
        *(
            replace(one, source=last[window is None])
            for one, window in zip(heads[num_own:], windows[num_own:], strict=True)
        ),
    )


def _mlp_sizes(
    file: ConfigFile, config: ModelConfig, heads: tuple[LayerHeads, ...]
) -> tuple[int, ...]:
    factor = 2 if file.flag("use_double_wide_mlp", False) else 1
    size = config.intermediate_size
    return tuple(size if one.source is None else factor * size for one in heads)


def _rope(file: ConfigFile, kind: str, head_size: int) -> RopeConfig:
    """Return the rope of layers of a kind."""
    if "rope_parameters" not in file:
        if kind == _WINDOW:
            return RopeConfig()
        return RopeConfig(theta=1e6, num_rotated_pairs=head_size // 8)
    sections = file.section("rope_parameters")
    for key in sections.given_keys():
        if key not in (_FULL, _WINDOW):
            raise sections.rejection(key, f"is not allowed; use {_FULL} and {_WINDOW}")
    section = sections.section(kind)
    section.note_read("type", "partial_rotary_factor")
    theta = section.number("rope_theta", most=MAX_THETA)
    if section.choice("rope_type", ("default", "proportional"), "default") == "default":
        section.note_read("factor")
        return RopeConfig(theta=theta)
    part = section.number("partial_rotary_factor", 1.0, most=1.0)
    factor = section.number("factor", 1.0, most=MAX_FACTOR)
    return RopeConfig(
        kind="default" if factor == 1.0 else "linear",
        theta=theta,
        factor=factor,
        num_rotated_pairs=int(part * head_size // 2),
    )


def _layer_embedding(file: ConfigFile, config: ModelConfig) -> LayerEmbedding | None:
    size = file.integer("hidden_size_per_layer_input", 256, least=0, most=MAX_SIZE)
    vocab_size = file.integer("vocab_size_per_layer_input", 262144, most=MAX_VOCAB)
    if size and vocab_size < config.vocab_size:
        raise file.rejection(
            "vocab_size_per_layer_input",
            f"must be at least vocab_size {config.vocab_size}, not {vocab_size}",
        )
    return LayerEmbedding(vocab_size=vocab_size, size=size) if size else None


def _with_experts(config: ModelConfig, file: ConfigFile) -> ModelConfig:
    """Return the configuration with the experts beside the MLP, if there are any."""
    file.note_read(*_EXPERT_FIELDS)
    if not file.flag("enable_moe_block", False):
        return config
    num_experts = file.integer("num_experts", most=MAX_EXPERTS)
    experts = ExpertsConfig(
        num_experts=num_experts,
        num_chosen=file.integer("top_k_experts", most=num_experts),
        intermediate_size=file.integer("moe_intermediate_size", most=MAX_SIZE),
        is_renormalized=True,
        activation="gelu_tanh",
    )
    return replace(config, names=_EXPERT_NAMES, experts=experts)


def _without_unused(tensors: TextTensors, heads: tuple[LayerHeads, ...]) -> TextTensors:
    """Return what is stored, without the weights that layers with a source do not use."""
    layers = [layer for layer, one in enumerate(heads) if one.source is not None]
    # As a plain decoder stores them, and as the text part of a multimodal model.
    replaced = [stored for stored, name in tensors.prefixes if name == "model."]
    unused = (
        f"{prefix}layers.{layer}.self_attn.{name}"
        for prefix in ("model.", *replaced)
        for layer in layers
        for name in _UNUSED
    )
    return replace(tensors, skipped=(*tensors.skipped, *unused))


def _read_multimodal(file: ConfigFile, kind: _Class, text_type: str) -> ModelConfig:
    text = file.section(TEXT_SECTION)
    file.note_read(*_MULTIMODAL_FIELDS)
    config = as_text_part(
        _read_text(text, kind),
        file,
        text,
        is_tied=is_tied_by_default(file),
        model_types=(text_type,),
    )
    assert config.text_tensors is not None
    modules = (*_MODULES, *(f"model.{module}" for module in _MODULES))
    tensors = replace(config.text_tensors, skipped=(*config.text_tensors.skipped, *modules))
    return replace(config, text_tensors=_without_unused(tensors, config.layer_heads))


GEMMA4 = Family(
    architecture="Gemma4ForCausalLM",
    model_types=("gemma4_text",),
    reader=partial(_read_text, kind=_PLAIN),
)

GEMMA4_UNIFIED_TEXT = Family(
    architecture="Gemma4UnifiedForCausalLM",
    model_types=("gemma4_unified_text",),
    reader=partial(_read_text, kind=_UNIFIED),
)

GEMMA4_MULTIMODAL = Family(
    architecture="Gemma4ForConditionalGeneration",
    model_types=("gemma4",),
    reader=partial(_read_multimodal, kind=_PLAIN, text_type="gemma4_text"),
)

GEMMA4_UNIFIED = Family(
    architecture="Gemma4UnifiedForConditionalGeneration",
    model_types=("gemma4_unified",),
    reader=partial(_read_multimodal, kind=_UNIFIED, text_type="gemma4_unified_text"),
)
