"""The text of Qwen3-VL, a Qwen3."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from workers.models.config_json.family import Family, base_config
from workers.models.config_json.rope_section import with_rope
from workers.models.families.multimodal.text_part import TEXT_SECTION, as_text_part

if TYPE_CHECKING:
    from pagedray.model_config import ModelConfig
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["QWEN3_VL"]


def _read(file: ConfigFile) -> ModelConfig:
    text = file.section(TEXT_SECTION)
    has_attention_bias = text.flag("attention_bias", False)
    config = base_config(
        text, QWEN3_VL.architecture, default_num_kv_heads=32, default_head_size=128
    )
    config = replace(
        with_rope(config, text, default_theta=5e5),
        has_qk_norm=True,
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
    )
    return as_text_part(
        config,
        file,
        text,
        architecture=QWEN3_VL.architecture,
        is_tied=file.flag("tie_word_embeddings", False),
        model_types=("qwen3_vl_text",),
    )


QWEN3_VL = Family(
    architecture="Qwen3VLForConditionalGeneration", model_types=("qwen3_vl",), read=_read
)
