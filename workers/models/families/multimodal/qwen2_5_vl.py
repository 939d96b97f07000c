"""The text of Qwen2.5-VL, a Qwen2.5. Older files have its fields at the top level."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from workers.models.config_json.family import Family, base_config
from workers.models.config_json.rope_section import with_rope
from workers.models.config_json.sliding_windows import qwen_windows
from workers.models.families.multimodal.text_part import TEXT_SECTION, as_text_part

if TYPE_CHECKING:
    from pagedray.model_config import ModelConfig
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["QWEN2_5_VL"]


def _read(file: ConfigFile) -> ModelConfig:
    text = file.section(TEXT_SECTION) if TEXT_SECTION in file else file
    config = base_config(
        text, QWEN2_5_VL.architecture, default_num_kv_heads=8, default_norm_eps=1e-5
    )
    # Transformers reads no other size.
    text.reject_unless("head_dim", config.hidden_size // config.num_heads)
    config = replace(
        with_rope(config, text, default_theta=1e6),
        has_qkv_bias=True,
        sliding_windows=qwen_windows(text, config.num_layers, default_first=80),
    )
    return as_text_part(
        config,
        file,
        text,
        architecture=QWEN2_5_VL.architecture,
        # Transformers 4 wrote it in either place.
        is_tied=file.flag("tie_word_embeddings", False) or config.has_tied_embeddings,
        model_types=("qwen2_5_vl_text",),
    )


QWEN2_5_VL = Family(
    architecture="Qwen2_5_VLForConditionalGeneration", model_types=("qwen2_5_vl",), read=_read
)
