"""Seed-OSS: Llama with biases on queries, keys and values, and a head size of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from workers.models.config_json.family import Family, base_config
from workers.models.config_json.rope_section import with_rope

if TYPE_CHECKING:
    from pagedray.model_config import ModelConfig
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["SEED_OSS"]


def _read(file: ConfigFile) -> ModelConfig:
    config = base_config(file, SEED_OSS.architecture, default_num_kv_heads=8, default_head_size=128)
    return replace(
        with_rope(config, file),
        has_qkv_bias=file.flag("attention_bias", True),
        has_output_bias=file.flag("attention_out_bias", False),
        has_mlp_bias=file.flag("mlp_bias", False),
    )


SEED_OSS = Family(architecture="SeedOssForCausalLM", model_types=("seed_oss",), read=_read)
