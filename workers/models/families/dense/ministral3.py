"""Ministral 3: Mistral with yarn, and queries that grow with their position."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from workers.models.config_json.family import Family, base_config
from workers.models.config_json.limits import MAX_POSITIONS
from workers.models.config_json.rope_section import kind_key, rope_section, with_rope

if TYPE_CHECKING:
    from pagedray.model_config import ModelConfig
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["MINISTRAL3", "read_ministral3"]

_MAX_GROWTH = 1e3


def read_ministral3(file: ConfigFile) -> ModelConfig:
    """Return the configuration of a Ministral 3, or of its text part."""
    config = with_rope(
        base_config(
            file,
            MINISTRAL3.architecture,
            default_num_kv_heads=8,
            default_head_size=128,
            default_norm_eps=1e-5,
        ),
        file,
    )
    section = rope_section(file)
    if config.rope is None or config.rope.kind != "yarn":
        raise section.rejection(kind_key(section), "must be yarn")
    # A copy of the context length, which transformers does not use.
    section.note_read("max_position_embeddings")
    growth = section.number("llama_4_scaling_beta", most=_MAX_GROWTH)
    config = replace(config, rope=replace(config.rope, query_growth=growth))
    if "sliding_window" not in file:
        return config
    window = file.integer("sliding_window", most=MAX_POSITIONS)
    return replace(config, sliding_windows=(window,) * config.num_layers)


MINISTRAL3 = Family(
    architecture="Ministral3ForCausalLM", model_types=("ministral3",), read=read_ministral3
)
