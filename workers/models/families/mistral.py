"""Families of Mistral AI."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pagedray.model_config import ModelConfig, TensorNames
from workers.models.config_json.family import (
    MAX_POSITIONS,
    STACKED_NAMES,
    Family,
    base_config,
    experts_of,
    windows_by_layer_type,
)
from workers.models.config_json.rope_section import kind_key, rope_section, with_rope
from workers.models.families.text_part import TEXT_SECTION, as_text_part, is_tied_by_default

if TYPE_CHECKING:
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["MINISTRAL", "MINISTRAL3", "MISTRAL", "MISTRAL3", "MIXTRAL"]

_MAX_GROWTH_MINISTRAL3 = 1e3
_THETA_MIXTRAL = 1e6
_NAMES_MIXTRAL = TensorNames(
    router="block_sparse_moe.gate",
    expert_input=("block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight"),
    expert_output="block_sparse_moe.experts.{}.w2.weight",
)


def read_mistral(file: ConfigFile) -> ModelConfig:
    """Return the configuration of a Mistral, or of its text part."""
    config = with_rope(base_config(file, default_num_kv_heads=8), file)
    if file.has_null("sliding_window"):
        return config
    window = file.integer("sliding_window", 4096, most=MAX_POSITIONS)
    return replace(config, sliding_windows=(window,) * config.num_layers)


MISTRAL = Family(architecture="MistralForCausalLM", model_types=("mistral",), reader=read_mistral)


def _read_ministral(file: ConfigFile) -> ModelConfig:
    """Ministral: Mistral with sliding windows on some layers."""
    config = with_rope(base_config(file, default_num_kv_heads=8), file)
    has_window = not file.has_null("sliding_window")
    return replace(
        config,
        sliding_windows=windows_by_layer_type(
            file, default_window=4096, has_window_by_default=[has_window] * config.num_layers
        ),
    )


MINISTRAL = Family(
    architecture="MinistralForCausalLM", model_types=("ministral",), reader=_read_ministral
)


def read_ministral3(file: ConfigFile) -> ModelConfig:
    """Return the configuration of a Ministral 3, or of its text part."""
    config = with_rope(
        base_config(file, default_num_kv_heads=8, default_head_size=128, default_norm_eps=1e-5),
        file,
    )
    section = rope_section(file)
    if config.rope is None or config.rope.kind != "yarn":
        raise section.rejection(kind_key(section), "must be yarn")
    # A copy of the context length, which transformers does not use.
    section.note_read("max_position_embeddings")
    growth = section.number("llama_4_scaling_beta", most=_MAX_GROWTH_MINISTRAL3)
    config = replace(config, rope=replace(config.rope, query_growth=growth))
    if "sliding_window" not in file:
        return config
    window = file.integer("sliding_window", most=MAX_POSITIONS)
    return replace(config, sliding_windows=(window,) * config.num_layers)


MINISTRAL3 = Family(
    architecture="Ministral3ForCausalLM", model_types=("ministral3",), reader=read_ministral3
)


def _read_mixtral(file: ConfigFile) -> ModelConfig:
    """Mixtral: Mistral with experts on all layers."""
    config = base_config(file, default_num_kv_heads=8, default_norm_eps=1e-5)
    windows: tuple[int, ...] = ()
    if "sliding_window" in file:
        window = file.integer("sliding_window", most=MAX_POSITIONS)
        windows = (window,) * config.num_layers
    return replace(
        with_rope(config, file, default_theta=_THETA_MIXTRAL),
        names=_NAMES_MIXTRAL,
        stacked_names=STACKED_NAMES,
        sliding_windows=windows,
        experts=experts_of(
            file,
            default_num=8,
            default_num_chosen=2,
            intermediate_size=config.intermediate_size,
            is_renormalized=True,
        ),
    )


MIXTRAL = Family(architecture="MixtralForCausalLM", model_types=("mixtral",), reader=_read_mixtral)

_READERS_MISTRAL3 = {"mistral": read_mistral, "ministral3": read_ministral3}


def _read_mistral3(file: ConfigFile) -> ModelConfig:
    """The text of Mistral-Small 3.1 and 3.2 (a Mistral), and of Ministral 3."""
    text = file.section(TEXT_SECTION)
    kind = text.choice("model_type", _READERS_MISTRAL3, "mistral")
    return as_text_part(
        _READERS_MISTRAL3[kind](text),
        file,
        text,
        is_tied=is_tied_by_default(file),
        model_types=_READERS_MISTRAL3,
    )


MISTRAL3 = Family(
    architecture="Mistral3ForConditionalGeneration",
    model_types=("mistral3",),
    reader=_read_mistral3,
)
