"""Qwen3: QK norm, and a head size of its own; optional sliding windows on later layers.

Qwen3-Reranker is a Qwen3 that answers yes or no; converted checkpoints have a head with one score.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from workers.models.config_json.family import Family, base_config
from workers.models.config_json.rope_section import with_rope
from workers.models.config_json.score_section import SCORE_SUFFIX, has_score_head, with_score
from workers.models.config_json.sliding_windows import qwen_windows

if TYPE_CHECKING:
    from pagedray.model_config import ModelConfig
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["QWEN3"]


def _read(file: ConfigFile) -> ModelConfig:
    has_attention_bias = file.flag("attention_bias", False)
    file.reject_unless("use_qk_norm", True)
    config = base_config(file, QWEN3.architecture, default_num_kv_heads=32, default_head_size=128)
    config = replace(
        with_rope(config, file),
        has_qk_norm=True,
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        sliding_windows=qwen_windows(file, config.num_layers),
    )
    if not has_score_head(file):
        return replace(config, score_head="answer")
    file.note_read("sentence_transformers", "sbert_ce_default_activation_function")
    return with_score(replace(config, score_head="linear"), file)


QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_types=("qwen3",),
    read=_read,
    aliases=(f"Qwen3{SCORE_SUFFIX}",),
)
